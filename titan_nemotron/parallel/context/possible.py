"""Which way of splitting rows each mixer allows, and at which degrees."""

from torch import nn

from titan_nemotron.models.layers.attention import Attention
from titan_nemotron.models.layers.mamba2 import Mamba2


def why_not(module: nn.Module, method: str, degree: int) -> str | None:
    """None when `method` can split the rows of this Attention or Mamba2 over `degree` ranks, else the reason.

    The reason names the degrees that are possible. "ring" (attention) and "state" (Mamba-2) take any number of heads;
    "ulysses" gives each rank as many heads as any other, with the key/value heads or groups that these read: whole ones,
    or one that several ranks share.
    """
    if method != "ulysses":
        return None
    heads, shared = heads_of(module)
    if _divides(heads, shared, degree):
        return None
    possible = ", ".join(str(n) for n in range(1, heads + 1) if _divides(heads, shared, n))
    kind = "query heads on {} key/value heads" if isinstance(module, Attention) else "heads in {} groups"
    return f"ulysses spreads {heads} {kind.format(shared)}; possible: {possible}"


def heads_of(module: nn.Module) -> tuple[int, int]:
    """Query heads and key/value heads of attention, heads and groups of Mamba-2; before weights are sharded."""
    if isinstance(module, Mamba2):
        return module.mix.num_heads, module.mix.num_groups
    assert isinstance(module, Attention), type(module)
    heads, kv_heads = (p.weight.shape[0] // module.head_size for p in (module.q_proj, module.k_proj))
    return heads, kv_heads


def _divides(heads: int, shared: int, degree: int) -> bool:
    return heads % degree == 0 and (shared % degree == 0 or degree % shared == 0)
