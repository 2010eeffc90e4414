"""Context parallelism: the ranks of the context axis hold consecutive parts of the same rows."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_nemotron.errors import UserError
from titan_nemotron.models.layers.attention import Attention
from titan_nemotron.models.layers.mamba2 import Mamba2
from titan_nemotron.models.layers.moe import MoE
from titan_nemotron.parallel.context.exchange import summed
from titan_nemotron.parallel.context.state import StatePassingMix
from titan_nemotron.parallel.context.ulysses import UlyssesAttention

__all__ = ["split_rows"]


def split_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """Swap what crosses tokens for what also crosses the ranks of `mesh`, the context axis.

    Mamba-2 passes its states on, attention exchanges positions for heads, and the sums of a row over its positions are
    those of all ranks. Raises UserError for heads that do not divide.
    """
    group, degree = mesh.get_group(), mesh.size()
    for name, module in model.named_modules():
        if isinstance(module, Mamba2):
            module.mix = StatePassingMix(module.mix, group)
        elif isinstance(module, Attention):
            heads, kv_heads = (p.weight.shape[0] // module.head_size for p in (module.q_proj, module.k_proj))
            if heads % degree or (kv_heads % degree and degree % kv_heads):
                raise UserError(
                    f"parallel.context = {degree}: {name} has {heads} query heads on {kv_heads} key/value heads; use a "
                    "divisor of the query heads that divides, or is a multiple of, the key/value heads"
                )
            module.core = UlyssesAttention(module.core, group)
        elif isinstance(module, MoE):
            module.sequence_sum = lambda stats_BE: summed(stats_BE, group)  # type: ignore[method-assign]
