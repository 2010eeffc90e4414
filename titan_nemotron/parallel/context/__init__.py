"""Context parallelism: the ranks of the context axis hold consecutive parts of the same rows."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_nemotron.models.layers.attention import Attention
from titan_nemotron.models.layers.mamba2 import Mamba2
from titan_nemotron.models.layers.moe import MoE
from titan_nemotron.parallel.context.exchange import summed
from titan_nemotron.parallel.context.ring import RingAttention
from titan_nemotron.parallel.context.state import StatePassingMix
from titan_nemotron.parallel.context.ulysses import UlyssesAttention
from titan_nemotron.parallel.context.ulysses_mix import UlyssesMix

__all__ = ["CORES", "MIXES", "split_rows"]

MIXES = {"state": StatePassingMix, "ulysses": UlyssesMix}
CORES = {"ulysses": UlyssesAttention, "ring": RingAttention}


def split_rows(model: nn.Module, mesh: DeviceMesh, methods: Mapping[str, str]) -> None:
    """Swap what crosses tokens for what also crosses the ranks of `mesh`, the context axis; methods by name of layer.

    state: Mamba-2 passes its states on. ulysses: positions are exchanged for heads. ring: keys and values go round. The sums
    of a row over its positions are those of all ranks.
    """
    group = mesh.get_group()
    for name, module in model.named_modules():
        if isinstance(module, Mamba2):
            module.mix = MIXES[methods[name]](module.mix, group)
        elif isinstance(module, Attention):
            module.core = CORES[methods[name]](module.core, group)
        elif isinstance(module, MoE):
            module.sequence_sum = lambda stats_BE: summed(stats_BE, group)  # type: ignore[method-assign]
