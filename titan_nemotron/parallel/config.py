"""The `[parallel]`, `[recompute]` and `[compile]` tables."""

from typing import Annotated, Literal

from pydantic import Field

from titan_nemotron.config import Table


class ParallelConfig(Table):
    """How the ranks of a run share its work."""

    replicate: Annotated[int, Field(gt=0)] = 1
    """Copies of the weights: each is sharded over its own ranks, and only gradients travel between them."""
    shard: Annotated[int, Field(ge=-1)] = -1
    """Ranks with rows of their own that share one copy of the weights, gradients and optimizer state, together with the
    ranks of `context`; -1 is all that replicate and context leave."""
    context: Annotated[int, Field(gt=0)] = 1
    """Ranks that share rows, each with a part of every row: for rows too long for one device. Mamba-2 passes its states
    on, attention exchanges positions for heads. Divides training.sequence_length."""
    expert: Annotated[int, Field(gt=0)] = 1
    """Ranks, of those that share a copy, over which the experts of each layer are spread: tokens travel to them instead of
    weights. Divides the ranks of a copy and the number of experts."""
    world: Annotated[int, Field(ge=0)] = 0
    """Ranks that a --dry-run plans for, in one process; 0 is those that were started."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """A collective operation that takes longer than this ends the run."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward and gather them again for its backward: less memory, more traffic."""
    gradient_sync: Literal["last", "every"] = "last"
    """Reduce gradients once a step, holding whole fp32 gradients on every rank between microbatches ("last"), or after every
    microbatch, holding shards alone ("every": less memory, more traffic)."""


class RecomputeConfig(Table):
    """Activations computed again in the backward instead of kept."""

    mode: Literal["none", "selective", "full"] = "none"
    """selective keeps the outputs of matrix products, attention, scans and experts, and computes the rest of a block again;
    full keeps a block's input alone."""


class CompileConfig(Table):
    """torch.compile."""

    enable: bool = False
    """Compile every block; the first steps take minutes longer."""
