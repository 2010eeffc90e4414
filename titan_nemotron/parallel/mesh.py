"""The process group, and the meshes of ranks that parallelism is described on.

Axes, outermost first: replicate, shard. The routed experts see the ranks of the shard axis as expert_shard x expert.
"""

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_nemotron.errors import UserError
from titan_nemotron.parallel.config import ParallelConfig

REPLICATE, SHARD, EXPERT_SHARD, EXPERT = "replicate", "shard", "expert_shard", "expert"


@dataclass(frozen=True)
class Mesh:
    """The same ranks, as two kinds of parameters see them.

    dense    (replicate, shard): parameters that every token meets
    experts  (replicate, expert_shard, expert): the routed experts; None where no axis spreads them
    """

    dense: DeviceMesh
    experts: DeviceMesh | None

    @classmethod
    def of(cls, device_type: str, ranks: Sequence[int], *, replicate: int = 1, expert: int = 1) -> "Mesh":
        """All ranks of the process group have to call this, with degrees that divide."""
        whole = torch.tensor(ranks)
        dense = DeviceMesh(device_type, whole.view(replicate, -1), mesh_dim_names=(REPLICATE, SHARD))
        if expert == 1:
            return cls(dense, None)
        axes = (REPLICATE, EXPERT_SHARD, EXPERT)
        return cls(dense, DeviceMesh(device_type, whole.view(replicate, -1, expert), mesh_dim_names=axes))

    @property
    def device_type(self) -> str:
        return self.dense.device_type

    @property
    def axes(self) -> dict[str, int]:
        """The degrees, by name; the expert axis where there is one."""
        expert = {} if self.experts is None else {EXPERT: self.experts[EXPERT].size()}
        return {name: self.dense[name].size() for name in (REPLICATE, SHARD)} | expert

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


def build_mesh(config: ParallelConfig, device: torch.device) -> Mesh:
    """The mesh of all ranks. Raises UserError for degrees that they cannot form, with those that they can."""
    world = dist.get_world_size()
    check_degree("replicate", config.replicate, world, f"the {world} processes")
    copy = world // config.replicate
    if config.shard not in (-1, copy):
        raise UserError(
            f"parallel.shard = {config.shard}: {world} processes run and replicate is {config.replicate}; "
            f"possible: -1 or {copy}"
        )
    check_degree("expert", config.expert, copy, f"the {copy} ranks that share a copy of the weights")
    return Mesh.of(device.type, range(world), replicate=config.replicate, expert=config.expert)


def check_degree(name: str, degree: int, ranks: int, whose: str) -> None:
    if ranks % degree:
        possible = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise UserError(f"parallel.{name} = {degree}: does not divide {whose}; possible: {possible}")


def data_coordinates(mesh: Mesh) -> tuple[int, int]:
    """(rank, degree) of this process among those that read different rows."""
    replicate, shard = mesh.dense[REPLICATE], mesh.dense[SHARD]
    return replicate.get_local_rank() * shard.size() + shard.get_local_rank(), mesh.dense.size()
