"""What must fit together in a whole job."""

from pathlib import Path

import pytest

from titan_nemotron.config import load
from titan_nemotron.errors import UserError
from titan_nemotron.train.job import Job

COMBINATIONS = {
    "[model.config]\npattern = 'MEQ'": "job.toml:2: model.config.pattern = 'MEQ': unknown letter 'Q'; known: "
    "M Mamba-2, * attention, E mixture of experts, - MLP",
    "[model.config]\nnum_attention_heads = 5": "job.toml:2: model.config.num_attention_heads = 5: is not divisible "
    "by num_key_value_heads = 2; change one of them",
    "[model.config]\nhidden_sise = 5": "job.toml:2: model.config.hidden_sise = 5: unknown key; did you mean "
    "hidden_size?",
    "[model]\nflavor = 'nano'": 'job.toml:2: model.flavor = "nano": nemotron3 has no such flavor; known: debug, tiny, '
    "nano_30b, super_120b, ultra_550b",
    "[model]\nfamily = 'nowhere'": "job.toml:2: model.family: cannot import 'nowhere' (No module named 'nowhere'); "
    "built in: nemotron3",
    "[model.config]\nn_groups = 5": "job.toml:2: model.config.mamba_num_heads = 12: is not divisible by n_groups = 5; "
    "change one of them",
    "[data]\nvocabulary_size = 5000": "job.toml:2: data.vocabulary_size = 5000: more tokens than "
    "model.config.vocab_size = 4096; raise that or lower this",
    "[training]\nmicrobatch_size = 3": "job.toml:2: training.microbatch_size = 3: does not divide global_batch_size = "
    "8; make one a multiple of the other",
    "[schedule]\nkind = 'wsd'": "job.toml:1: schedule.decay_steps = 0: wsd needs the number of steps of its decay",
    "[parallel]\ncontext = 3": "job.toml:2: parallel.context = 3: does not divide training.sequence_length = 1024; change "
    "one of them",
    "[parallel.fsdp]\nreshard_after_forward = false\nmoe_layers_kept_gathered = 2": "job.toml:3: "
    "parallel.fsdp.moe_layers_kept_gathered = 2: reshard_after_forward = false keeps every block; set it to "
    "0, or reshard_after_forward to true",
    "[training]\nsequence_length = 8\n[parallel]\ncontext = 4": "job.toml:4: parallel.context = 4: parts of 2 tokens are "
    "shorter than the convolution's reach of 3; lower it or raise training.sequence_length",
    "[job]\nname = 'a/b'": r'job.toml:2: job.name = "a/b": expected string like ^[\w.-]+$',
}


@pytest.mark.parametrize("toml, expected", COMBINATIONS.items(), ids=COMBINATIONS)
def test_impossible_combinations(tmp_path: Path, toml: str, expected: str) -> None:
    (tmp_path / "job.toml").write_text(toml)
    with pytest.raises(UserError) as raised:
        load(Job, tmp_path / "job.toml")
    assert str(raised.value).replace(f"{tmp_path}/", "") == expected


def test_all_of_them_at_once(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        '[model.config]\npattern = "MQ"\nn_groups = 5\nhidden_size = "x"\nhead_dims = 3\n[training]\nsteps = 0\n'
    )
    with pytest.raises(UserError) as raised:
        load(Job, tmp_path / "job.toml", ["--data.streams", "x"])
    starts = [
        "job.toml:4: model.config.hidden_size = ",
        "job.toml:5: model.config.head_dims = 3: unknown key; did you mean head_dim?",
        "job.toml:2: model.config.pattern = 'MQ': unknown letter",
        "job.toml:3: model.config.mamba_num_heads = 12: is not divisible by n_groups = 5",
        "--data.streams x: expected integer >= 1",
        "job.toml:7: training.steps = 0: expected integer > 0",
    ]
    lines = str(raised.value).replace(f"{tmp_path}/", "").splitlines()
    assert [start for start, line in zip(starts, lines, strict=True) if not line.startswith(start)] == []


def test_flags_of_the_family_take_lists_and_booleans() -> None:
    flags = "--model.config.time_step_limit 0.0 0.1 --model.config.use_bias --model.config.use_conv_bias false"
    config = load(Job, None, flags.split()).model.resolved()
    assert (config.time_step_limit, config.use_bias, config.use_conv_bias) == ((0.0, 0.1), True, False)
    with pytest.raises(UserError, match=r"model.config.hidden_size = true: expected integer > 0"):
        load(Job, None, ["--model.config.hidden_size"])


def test_what_must_fit_the_ranks() -> None:
    job = load(
        Job, None, ["--training.global_batch_size", "12", "--training.microbatch_size", "2", "--data.streams", "8"]
    )
    job.check_ranks(1)
    job.check_ranks(2)
    with pytest.raises(UserError) as raised:
        job.check_ranks(3 * 4)
    assert str(raised.value).splitlines() == [
        "training.global_batch_size = 12: not divisible by microbatch_size * ranks = 2 * 12; use a multiple of 24",
        "data.streams = 8: not divisible by the 12 ranks; use a multiple of 12",
    ]
    load(Job, None, ["--training.global_batch_size", "4", "--parallel.context", "2"]).check_ranks(8)
