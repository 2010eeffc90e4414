"""The process group, and the meshes of ranks that parallelism is described on.

Axes, outermost first: replicate, shard, context. Dense parameters are sharded over shard x context together; the routed
experts see the same ranks as expert_shard x expert.
"""

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_nemotron.errors import UserError
from titan_nemotron.layout import Batch
from titan_nemotron.parallel.config import ParallelConfig

REPLICATE, SHARD, EXPERT_SHARD, EXPERT, CONTEXT = "replicate", "shard", "expert_shard", "expert", "context"


@dataclass(frozen=True)
class Mesh:
    """The same ranks, as two kinds of parameters see them.

    dense    (replicate, shard): parameters that every token meets; its shard axis holds the context axis too
    experts  (replicate, expert_shard, expert): the routed experts; None where no axis spreads them
    context  the ranks that share this one's rows; None where rows are whole
    """

    dense: DeviceMesh
    experts: DeviceMesh | None
    context: DeviceMesh | None = None

    @classmethod
    def of(
        cls, device_type: str, ranks: Sequence[int], *, replicate: int = 1, expert: int = 1, context: int = 1
    ) -> "Mesh":
        """All ranks of the process group have to call this, with degrees that divide."""
        whole = torch.tensor(ranks)
        dense = DeviceMesh(device_type, whole.view(replicate, -1), mesh_dim_names=(REPLICATE, SHARD))
        experts = rows = None
        if expert > 1:
            axes = (REPLICATE, EXPERT_SHARD, EXPERT)
            experts = DeviceMesh(device_type, whole.view(replicate, -1, expert), mesh_dim_names=axes)
        if context > 1:
            rows = DeviceMesh(device_type, whole.view(-1, context), mesh_dim_names=("data", CONTEXT))[CONTEXT]
        return cls(dense, experts, rows)

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        return self.dense.device_type

    @property
    def context_degree(self) -> int:
        """Ranks that share rows; 1 where rows are whole."""
        return 1 if self.context is None else self.context.size()

    @property
    def axes(self) -> dict[str, int]:
        """The degrees, by name; context and expert where there are."""
        found = {REPLICATE: self.dense[REPLICATE].size(), SHARD: self.dense[SHARD].size() // self.context_degree}
        if self.context is not None:
            found[CONTEXT] = self.context_degree
        if self.experts is not None:
            found[EXPERT] = self.experts[EXPERT].size()
        return found

    @property
    def leads_rows(self) -> bool:
        """Whether what belongs to whole rows is counted here: of the ranks that share rows, one does."""
        return self.context is None or self.context.get_local_rank() == 0

    def sharding(self, *, experts: bool = False) -> DeviceMesh:
        """The axes along which parameters are copied and sharded; one axis where there is a single copy."""
        mesh, axis = (self.experts, EXPERT_SHARD) if experts else (self.dense, SHARD)
        assert mesh is not None
        return mesh[axis] if mesh[REPLICATE].size() == 1 else mesh[REPLICATE, axis]


def process_device(name: str = "auto") -> torch.device:
    """This process's device: "auto" is cuda where PyTorch sees a GPU. With torchrun each process takes its LOCAL_RANK."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError('job.device: "cuda", but PyTorch sees no GPU here; set it to "auto" or "cpu"')
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"{torch.cuda.device_count()} GPUs are visible, but a process with LOCAL_RANK={local_rank} was started; "
            "start at most one process a GPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def start_process_group(device: torch.device, timeout_seconds: float) -> None:
    """Join the ranks that torchrun started, or be the only rank; gloo for CPU tensors, NCCL for CUDA tensors."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)


def plan_process_group(world: int) -> None:
    """Be rank 0 of `world` ranks that do not exist: meshes and sharding can be made, and nothing is ever sent."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world)


def build_mesh(config: ParallelConfig, device: torch.device) -> Mesh:
    """The mesh of all ranks. Raises UserError for degrees that they cannot form, with those that they can."""
    world = dist.get_world_size()
    check_degree("replicate", config.replicate, world, f"the {world} processes")
    copy = world // config.replicate
    check_degree("context", config.context, copy, f"the {copy} ranks that share a copy of the weights")
    if config.shard not in (-1, copy // config.context):
        raise UserError(
            f"parallel.shard = {config.shard}: {world} processes run, replicate is {config.replicate} and context is "
            f"{config.context}; possible: -1 or {copy // config.context}"
        )
    check_degree("expert", config.expert, copy, f"the {copy} ranks that share a copy of the weights")
    degrees = {"replicate": config.replicate, "expert": config.expert, "context": config.context}
    return Mesh.of(device.type, range(world), **degrees)


def check_degree(name: str, degree: int, number: int, whose: str) -> None:
    """Raises UserError, with the degrees that are possible, unless the degree divides the number of what `whose` says."""
    if number % degree:
        possible = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
        raise UserError(f"parallel.{name} = {degree}: does not divide {whose}; possible: {possible}")


def data_coordinates(mesh: Mesh) -> tuple[int, int]:
    """(rank, degree) of this process among those that read different rows."""
    replicate, shard = mesh.dense[REPLICATE], mesh.dense[SHARD]
    rank = replicate.get_local_rank() * shard.size() + shard.get_local_rank()
    return rank // mesh.context_degree, mesh.dense.size() // mesh.context_degree


def own_part(batch: Batch, mesh: Mesh, *, shortest: int = 1) -> Batch:
    """This process's part of whole rows, which are padded where the parts would not be equal or shorter than `shortest`."""
    if mesh.context is None:
        return batch
    return batch.shard(mesh.context.get_local_rank(), mesh.context.size(), shortest=shortest)
