"""The process group, and the mesh of ranks that parallelism is described on.

Axes, outermost first: replicate, shard, context; expert divides shard x context again for the routed experts alone.
Today the mesh has the one axis that every run needs: shard.
"""

import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_nemotron.errors import UserError
from titan_nemotron.parallel.config import ParallelConfig

SHARD = "shard"


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


def build_mesh(config: ParallelConfig, device: torch.device) -> DeviceMesh:
    """The mesh of all ranks. Raises UserError for a degree that they cannot form."""
    world = dist.get_world_size()
    if config.shard not in (-1, world):
        raise UserError(f"parallel.shard: {config.shard}, but {world} processes run; set it to -1 or {world}")
    return init_device_mesh(device.type, (world,), mesh_dim_names=(SHARD,))


def data_coordinates(mesh: DeviceMesh) -> tuple[int, int]:
    """(rank, degree) of this process among those that read different rows."""
    return mesh.get_local_rank(SHARD), mesh[SHARD].size()
