"""What trains, what decays, and what the table says of it."""

import pytest
import torch

from titan_nemotron.errors import UserError
from titan_nemotron.models.nemotron3.config import Nemotron3Config
from titan_nemotron.models.nemotron3.flavors import FLAVORS
from titan_nemotron.models.nemotron3.model import Nemotron3
from titan_nemotron.optim.adamw import build_optimizer, describe, freeze
from titan_nemotron.optim.config import OptimizerConfig


def build(config: Nemotron3Config = FLAVORS["debug"]) -> Nemotron3:
    with torch.device("meta"):
        return Nemotron3(config)


def names_by_decay(model: Nemotron3, config: OptimizerConfig) -> dict[float, set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, config).param_groups
    return {group["weight_decay"]: {names[id(parameter)] for parameter in group["params"]} for group in groups}


def test_vectors_do_not_decay_and_everything_else_does() -> None:
    config = FLAVORS["debug"].model_copy(update={"use_bias": True, "attention_bias": True, "mlp_bias": True})
    model = build(config)
    groups = names_by_decay(model, OptimizerConfig(weight_decay=0.3))
    assert set(groups) == {0.3, 0.0}
    assert groups[0.3] | groups[0.0] == {name for name, _ in model.named_parameters()}
    assert groups[0.0] == {name for name, parameter in model.named_parameters() if parameter.dim() == 1}
    for suffix in (
        "A_log",
        "D",
        "dt_bias",
        "conv1d.bias",
        "in_proj.bias",
        "q_proj.bias",
        "norm.weight",
        "enorm.weight",
    ):
        assert any(name.endswith(suffix) for name in groups[0.0]), suffix
    for suffix in ("conv1d.weight", "experts.up_proj", "router.weight", "embeddings.weight", "lm_head.weight"):
        assert any(name.endswith(suffix) for name in groups[0.3]), suffix


def test_settings_reach_every_group() -> None:
    config = OptimizerConfig(learning_rate=2e-4, betas=(0.8, 0.99), eps=1e-6)
    for group in build_optimizer(build(), config).param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (2e-4, (0.8, 0.99), 1e-6)


def test_frozen_parameters_are_not_in_the_optimizer() -> None:
    model = build()
    freeze(model, ["*.router.weight", "embeddings.*"])
    trained = set().union(*names_by_decay(model, OptimizerConfig()).values())
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if "router" in name or name == "embeddings.weight"}
    assert not trained & frozen
    counts = {line[:12].strip(): line.split() for line in describe(model).splitlines()[1:]}
    assert set(counts) == {"decay", "no decay", "frozen"}
    assert sum(int(line[-1].replace(",", "")) for line in counts.values()) == sum(p.numel() for p in model.parameters())


def test_mistakes_of_freeze() -> None:
    with pytest.raises(UserError, match=r"optimizer\.freeze: '\*\.rooter\.\*' matches no parameter"):
        freeze(build(), ["*.router.*", "*.rooter.*"])
    model = build()
    freeze(model, ["*"])
    with pytest.raises(UserError, match=r"optimizer\.freeze: \['\*'\] leaves no parameter to train"):
        build_optimizer(model, OptimizerConfig(freeze=["*"]))
