"""Checkpoints that any number of ranks reads, whatever the number that wrote them."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.data.support import config, texts, tokenizer, write_jsonl
from tests.distributed.harness import Context, case
from tests.distributed.reference import LENGTH, ROWS, SEED, Reference, rows, sharded, whole
from titan_nemotron.checkpoint.config import CheckpointConfig
from titan_nemotron.checkpoint.manager import CheckpointManager
from titan_nemotron.data.config import DataConfig
from titan_nemotron.data.loader import Loader, build_loader, merge_states
from titan_nemotron.optim.adamw import build_optimizer
from titan_nemotron.optim.config import OptimizerConfig
from titan_nemotron.parallel.mesh import Mesh
from titan_nemotron.parallel.sharded import local_part

NUMBERS = (1, 2, 4)
STEPS = 2


class Group:
    """The first `size` ranks; those behind them only take part in making it."""

    def __init__(self, context: Context, size: int) -> None:
        self.rank, self.size = context.rank, size
        self.mesh = Mesh.of("cpu", range(size))
        self.group = dist.new_group(list(range(size)), backend="gloo")

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def manager(self, directory: Path) -> CheckpointManager:
        return CheckpointManager(directory, CheckpointConfig(), self.group)

    def loader(self, data: DataConfig) -> Loader:
        return build_loader(
            data,
            tokenizer(),
            sequence_length=LENGTH,
            mtp_depths=2,
            rows_per_microbatch=1,
            data_rank=self.rank,
            data_degree=self.size,
            seed=3,
        )

    def global_batch(self, loader: Loader) -> list[list[int]]:
        """Its rows in their order."""
        mine = [next(loader).tokens[0].tolist() for _ in range(ROWS // self.size)]
        return [row for group in zip(*self.gather(mine), strict=True) for row in group]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, router biases, and AdamW's moments and steps by name; each whole and on its own memory."""
    found = {name: whole(tensor).detach().clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = whole(value).clone()
    return found


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Tensor]) -> None:
    """Write each rank's part of what `everything` gave."""

    def write(tensor: Tensor, value: Tensor) -> None:
        part, offsets = local_part(tensor)
        part.copy_(value[tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))])

    for name, tensor in model.state_dict().items():
        write(tensor, values[name])
    for name, parameter in model.named_parameters():
        for key, tensor in optimizer.state[parameter].items():
            write(tensor, values[f"{name} {key}"])


@case(4)
def saved_and_loaded_on_any_number_of_ranks(context: Context) -> None:
    """From each of 1, 2 and 4 ranks to each: model, router biases, moments, steps, random state, data position."""
    reference = Reference()
    for step in range(STEPS):
        reference.step(rows(step))
    expected = everything(reference.model, reference.optimizer)
    assert all(router.correction_bias.any() for router in reference.model.routers().values())

    if context.rank == 0:
        write_jsonl(context.directory / "text.jsonl", texts(40))
    dist.barrier()
    data = config(context.directory / "text.jsonl", "jsonl")
    groups = {size: Group(context, size) for size in NUMBERS}
    batches: list[Any] = [None, None]
    if context.rank == 0:
        alone = groups[1].loader(data)
        batches = [groups[1].global_batch(alone) for _ in range(2)]
    dist.broadcast_object_list(batches, src=0)

    random: dict[int, Tensor] = {}
    for size, group in groups.items():
        if context.rank < size:
            model = sharded(group.mesh)
            optimizer = build_optimizer(model, OptimizerConfig())
            fill(model, optimizer, expected)
            loader = group.loader(data)
            assert group.global_batch(loader) == batches[0]
            torch.manual_seed(10 * size + context.rank)
            random[size] = torch.get_rng_state()
            manager = group.manager(context.directory / f"from-{size}")
            state = {"data": merge_states(group.gather(loader.state_dict()))}
            manager.save(STEPS, model, optimizer, state, "")
            manager.close()
        dist.barrier()

    for size, group in groups.items():
        if context.rank < size:
            for source in NUMBERS:
                model = sharded(group.mesh, seed=SEED + 1)
                optimizer = build_optimizer(model, OptimizerConfig())
                torch.manual_seed(0)
                start = torch.get_rng_state()
                manager = group.manager(context.directory / f"from-{source}")
                assert manager.latest() == STEPS
                state = manager.load(STEPS, model, optimizer)
                manager.close()
                found = everything(model, optimizer)
                assert found.keys() == expected.keys()
                differing = [name for name, value in expected.items() if not torch.equal(found[name], value)]
                assert differing == [], f"from {source} to {size} ranks: {differing}"
                assert torch.equal(torch.get_rng_state(), random[source] if context.rank < source else start)
                loader = group.loader(data)
                loader.load_state_dict(state["data"])
                assert group.global_batch(loader) == batches[1], f"from {source} to {size} ranks"
        dist.barrier()
