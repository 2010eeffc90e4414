"""Context parallelism: the ranks of the context axis hold consecutive parts of the same rows."""

from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_nemotron.errors import UserError
from titan_nemotron.models.layers.attention import Attention
from titan_nemotron.models.layers.mamba2 import Mamba2
from titan_nemotron.models.layers.moe import MoE
from titan_nemotron.parallel.context.exchange import summed
from titan_nemotron.parallel.context.possible import why_not
from titan_nemotron.parallel.context.ring import RingAttention
from titan_nemotron.parallel.context.state import StatePassingMix
from titan_nemotron.parallel.context.ulysses import UlyssesAttention
from titan_nemotron.parallel.context.ulysses_mix import UlyssesMix

__all__ = ["split_rows", "why_not"]

MIXES = {"state": StatePassingMix, "ulysses": UlyssesMix}
CORES = {"ulysses": UlyssesAttention, "ring": RingAttention}


def split_rows(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mamba: Literal["state", "ulysses"] = "state",
    attention: Literal["ulysses", "ring"] = "ulysses",
) -> None:
    """Swap what crosses tokens for what also crosses the ranks of `mesh`, the context axis.

    state: Mamba-2 passes its states on. ulysses: positions are exchanged for heads. ring: keys and values go round. The sums
    of a row over its positions are those of all ranks. Raises UserError for heads that do not divide.
    """
    group, degree = mesh.get_group(), mesh.size()

    def check(name: str, module: nn.Module, method: str) -> None:
        if reason := why_not(module, method, degree):
            raise UserError(f"parallel.context = {degree}: {name}: {reason}")

    for name, module in model.named_modules():
        if isinstance(module, Mamba2):
            check(name, module, mamba)
            module.mix = MIXES[mamba](module.mix, group)
        elif isinstance(module, Attention):
            check(name, module, attention)
            module.core = CORES[attention](module.core, group)
        elif isinstance(module, MoE):
            module.sequence_sum = lambda stats_BE: summed(stats_BE, group)  # type: ignore[method-assign]
