"""The small model and the data of the multi-rank cases, and a training step in plain PyTorch to compare with.

The reference has its own loss, clipping, AdamW groups and bias update, on a model that is not sharded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_nemotron.layout import Batch
from titan_nemotron.models.family import Losses
from titan_nemotron.models.layers.init import initialize
from titan_nemotron.models.nemotron3.config import Nemotron3Config
from titan_nemotron.models.nemotron3.model import Nemotron3
from titan_nemotron.optim.adamw import freeze
from titan_nemotron.parallel.apply import apply
from titan_nemotron.parallel.config import CompileConfig, ParallelConfig, RecomputeConfig
from titan_nemotron.parallel.mesh import Mesh
from titan_nemotron.train.step import StepSettings

SEED = 7
ROWS, LENGTH, DEPTHS = 8, 24, 2

# Nothing divides evenly: 101 tokens, 6 experts and 3 heads over 2 or 4 ranks (A_log has fewer elements than there are ranks).
CONFIG = Nemotron3Config(
    pattern="ME*-",
    vocab_size=101,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    mamba_num_heads=3,
    mamba_head_dim=8,
    n_groups=1,
    ssm_state_size=8,
    chunk_size=8,
    n_routed_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    moe_shared_expert_intermediate_size=20,
    moe_latent_size=16,
    intermediate_size=24,
    mtp_blocks=1,
    mtp_depths=DEPTHS,
    initializer_range=0.1,
)
SETTINGS = StepSettings(
    mtp_loss_scale=0.3, auxiliary_loss_coefficient=0.05, max_gradient_norm=0.5, router_bias_rate=1e-2
)


def rows(step: int, start: int = 0, stop: int = ROWS, length: int = LENGTH) -> Batch:
    """Rows start to stop of global batch `step`: packed documents of any length, some padding, a different amount a row."""
    generator = torch.Generator().manual_seed(1000 + step)
    total = length + 1 + DEPTHS
    tokens = torch.randint(0, CONFIG.vocab_size, (ROWS, total), generator=generator)
    documents = (torch.rand(ROWS, total, generator=generator) < 0.15).cumsum(1)
    for row in range(ROWS):
        documents[row, total - 2 * row :] = -1
    return Batch.from_rows(tokens[start:stop], documents[start:stop], length=length, mtp_depths=DEPTHS)


def microbatches(step: int, rank: int, world_size: int, size: int) -> list[Batch]:
    """This rank's share of a global batch, `size` rows at a time."""
    share = ROWS // world_size
    return [rows(step, start, start + size) for start in range(rank * share, (rank + 1) * share, size)]


def sharded(
    mesh: Mesh,
    *,
    recompute: str = "none",
    dtype: torch.dtype = torch.float32,
    seed: int | None = SEED,
    frozen: Sequence[str] = (),
    config: Nemotron3Config = CONFIG,
    parallel: ParallelConfig | None = None,
    compile: bool = False,
) -> Nemotron3:
    with torch.device("meta"):
        model = Nemotron3(config)
    freeze(model, frozen)
    apply(
        model,
        mesh,
        parallel=parallel or ParallelConfig(),
        recompute=RecomputeConfig(mode=recompute),  # type: ignore[arg-type]
        compile=CompileConfig(enable=compile),
        dtype=dtype,
        microbatch=(ROWS, LENGTH),
        seed=seed,
    )
    return model


def unsharded(config: Nemotron3Config = CONFIG) -> Nemotron3:
    model = Nemotron3(config)
    initialize(model, SEED)
    return model


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(tensor).detach().clone() for name, tensor in model.state_dict().items()}


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


@dataclass
class Reference:
    """Steps of an unsharded model on whole batches. Tensors are those after the last step."""

    model: Nemotron3 = field(default_factory=unsharded)
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        freeze(self.model, self.frozen)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.dim() > 1]
        vectors = [p for name, p in named if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)

    def loss(self, batch: Batch) -> tuple[Tensor, Losses]:
        losses = self.model.loss(batch)
        total = losses.main / batch.num_targets + SETTINGS.auxiliary_loss_coefficient * losses.auxiliary / ROWS
        for depth, count in enumerate(batch.num_mtp_targets):
            total = total + SETTINGS.mtp_loss_scale / DEPTHS * losses.mtp[depth] / count
        return total, losses

    def gradients(self, batch: Batch) -> tuple[Tensor, Losses, dict[str, Tensor]]:
        self.optimizer.zero_grad()
        total, losses = self.loss(batch)
        total.backward()
        return total.detach(), losses, whole_gradients(self.model)

    def step(self, batch: Batch) -> tuple[Losses, float]:
        _, losses, _ = self.gradients(batch)
        trained = [p for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(trained, SETTINGS.max_gradient_norm, foreach=False)
        self.optimizer.step()
        routers = self.model.routers()
        moves = {id(router): torch.zeros_like(router.correction_bias) for router in routers.values()}
        for call, router in routers.items():
            moves[id(router)] += losses.stats[call]["counts_E"]
        for router in {id(router): router for router in routers.values()}.values():
            counts = moves[id(router)]
            router.correction_bias += SETTINGS.router_bias_rate * torch.sign(counts.mean() - counts)
        return losses, norm.item()


def shared(rank: int, values: object) -> object:
    """What rank 0 gives, on every rank: the reference need not be computed more than once."""
    boxed = [values if rank == 0 else None]
    dist.broadcast_object_list(boxed)
    return boxed[0]


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).double().norm() / expected.double().norm().clamp(min=1e-12)).item()


def assert_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], *, total: float, each: float) -> None:
    """Relative errors of all gradients together and of each."""
    assert set(actual) == set(expected)
    difference = sum((actual[name] - expected[name]).double().square().sum() for name in expected)
    size = sum(expected[name].double().square().sum() for name in expected)
    assert (difference / size) ** 0.5 <= total, f"global gradient: {(difference / size) ** 0.5:.2e}"
    worst = max(expected, key=lambda name: relative(actual[name], expected[name]))
    assert relative(actual[worst], expected[worst]) <= each, f"{worst}: {relative(actual[worst], expected[worst]):.2e}"
