"""The `[parallel]`, `[recompute]` and `[compile]` tables."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from titan_nemotron.config import Table


class FSDPConfig(Table):
    """How sharded weights are gathered and their gradients reduced: memory against traffic."""

    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward and gather them again for its backward: less memory, more traffic."""
    moe_layers_kept_gathered: Annotated[int, Field(ge=0)] = 0
    """Mixture-of-experts blocks, the last ones, that stay gathered from their forward to their backward where the others are
    freed: theirs comes soonest, so that their memory is held for the shortest time, and each saves its largest gather."""
    keep_experts_between_microbatches: bool = False
    """Leave mixture-of-experts blocks gathered after the backward of all microbatches but the last: each saves a gather a
    microbatch, and between microbatches the memory of these blocks is held."""
    prefetch: Annotated[int, Field(gt=0)] = 1
    """Blocks whose gathers are under way while one computes, forward and backward: more hide gathers that take longer than a
    block, and hold the memory of as many blocks."""
    gradient_sync: Literal["last", "every"] = "last"
    """Reduce gradients once a step, holding whole fp32 gradients on every rank between microbatches ("last"), or after every
    microbatch, holding shards alone ("every": less memory, more traffic). Copies of the weights meet once a step with both."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """What gradients travel in to the rank that sums them, in fp32 always: bfloat16 halves the bytes and rounds each rank's
    contribution once. The output layer and the small layers that stay fp32 travel in float32 always."""
    reduce_scatters_in_flight: Annotated[int, Field(gt=0)] = 1
    """Reductions of gradients that may be under way while the backward goes on, each holding a buffer of a block's whole
    gradients: more than 1, where reductions take longer than a block's backward. They then have a communicator of their own,
    so that gathers do not wait for them. More than 1 needs PyTorch 2.13."""

    def mistakes(self) -> Iterator[str]:
        if self.moe_layers_kept_gathered and not self.reshard_after_forward:
            yield (
                f"moe_layers_kept_gathered = {self.moe_layers_kept_gathered}: reshard_after_forward = false keeps every block; "
                "set it to 0, or reshard_after_forward to true"
            )


class ContextMethodConfig(Table):
    """How rows that ranks share are split, by kind of layer. "auto" takes what costs least by parallel/context/cost.py, from
    the rates given here."""

    mamba: Literal["auto", "state", "ulysses"] = "auto"
    """state passes convolution inputs and states on, whatever the length; ulysses exchanges positions for heads."""
    attention: Literal["auto", "ulysses", "ring"] = "auto"
    """ulysses exchanges positions for heads; ring sends keys and values round, which are few where query heads share them,
    but waits for the ranks with the longest documents."""
    document_length: Annotated[int, Field(ge=0)] = 0
    """Mean tokens of a document: what a ring waits for depends on it. 0: a row is one document."""
    device: Literal["auto", "h100", "h200", "gb200", "gloo"] = "auto"
    """Whose rates to take; auto is the device of the run, gloo on a CPU."""
    link_gigabytes: Annotated[float, Field(ge=0)] = 0.0
    """GB a second that a rank receives; 0 is the device's."""
    compute_teraflops: Annotated[float, Field(ge=0)] = 0.0
    """TFLOP a second of a rank; 0 is the device's."""
    latency_microseconds: Annotated[float, Field(ge=0)] = 0.0
    """Of a message between ranks; 0 is the device's."""


class ParallelConfig(Table):
    """How the ranks of a run share its work."""

    replicate: Annotated[int, Field(gt=0)] = 1
    """Copies of the weights: each is sharded over its own ranks, and only gradients travel between them."""
    shard: Annotated[int, Field(ge=-1)] = -1
    """Ranks with rows of their own that share one copy of the weights, gradients and optimizer state, together with the
    ranks of `context`; -1 is all that replicate and context leave."""
    context: Annotated[int, Field(gt=0)] = 1
    """Ranks that share rows, each with a part of every row: for rows too long for one device. Divides
    training.sequence_length."""
    expert: Annotated[int, Field(gt=0)] = 1
    """Ranks, of those that share a copy, over which the experts of each layer are spread: tokens travel to them instead of
    weights. Divides the ranks of a copy and the number of experts."""
    world: Annotated[int, Field(ge=0)] = 0
    """Ranks that a --dry-run plans for, in one process; 0 is those that were started."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """A collective operation that takes longer than this ends the run."""
    fsdp: FSDPConfig = Field(default_factory=FSDPConfig)
    context_method: ContextMethodConfig = Field(default_factory=ContextMethodConfig)


class RecomputeConfig(Table):
    """Activations computed again in the backward instead of kept."""

    mode: Literal["none", "selective", "full"] = "none"
    """selective keeps the outputs of matrix products, attention, scans and experts, and computes the rest of a block again;
    full keeps a block's input, and where rows travel between ranks, alone."""


class CompileConfig(Table):
    """torch.compile."""

    enable: bool = False
    """Compile every block; the first steps take minutes longer."""
