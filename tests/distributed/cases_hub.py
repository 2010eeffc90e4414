"""Hugging Face directories read into and written from sharded models."""

from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.harness import Context, case
from tests.distributed.reference import CONFIG, SEED, sharded, unsharded, whole_parameters
from titan_nemotron.checkpoint.convert import convert, export
from titan_nemotron.checkpoint.hub_files import HubFiles, write_hub_directory
from titan_nemotron.checkpoint.load import hub_tensors, load_weights
from titan_nemotron.models.layers.init import initialize
from titan_nemotron.models.nemotron3 import FAMILY
from titan_nemotron.parallel.sharded import local_part

OTHER_SEED = SEED + 1


def written(context: Context) -> Path:
    """A hub directory of other weights than `sharded` starts from, in several files, without the head and one expert."""
    path = context.directory / "source"
    if context.rank == 0:
        model = unsharded()
        initialize(model, OTHER_SEED)
        left_out = ("lm_head.weight", "backbone.layers.1.mixer.experts.5.up_proj.weight")
        tensors = hub_tensors(model.state_dict().items(), FAMILY.hub.tensors(CONFIG), {})
        kept = ((name, tensor) for name, tensor in tensors if name not in left_out)
        write_hub_directory(path, kept, FAMILY.hub.config_to_hub(CONFIG), max_shard_bytes=20_000)
    dist.barrier()
    return path


@case()
def sharded_models_load_hub_files_and_our_checkpoints(context: Context) -> None:
    """Each rank reads its part; what the files lack starts by its rule, from the given seed."""
    path = written(context)
    expected = unsharded()
    initialize(expected, OTHER_SEED)
    model = sharded(context.mesh)
    missing = ["lm_head.*", "*.experts.5.up_proj.weight"]
    load_weights(model, FAMILY, CONFIG, path, seed=OTHER_SEED, init_missing=missing, local_part=local_part)
    actual = whole_parameters(model)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(actual[name], tensor), name

    export(model, FAMILY, CONFIG, context.directory, context.directory / "hf")
    dist.barrier()
    files = HubFiles(context.directory / "hf")
    slots, state = FAMILY.hub.tensors(CONFIG), expected.state_dict()
    assert set(files.entries) == set(slots)
    for name, slot in slots.items():
        whole = state[slot.parameter]
        assert torch.equal(files.read(name), whole if slot.expert is None else whole[slot.expert]), name

    if context.rank == 0:
        convert(context.directory / "hf", context.directory / "ours")
    dist.barrier()
    other = sharded(context.mesh)
    load_weights(other, FAMILY, CONFIG, context.directory / "ours", seed=0, local_part=local_part)
    actual = whole_parameters(other)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(actual[name], tensor), name
