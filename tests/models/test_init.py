"""Initial weights: a function of seed, name, expert and row block alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from titan_nemotron.models.layers import init
from titan_nemotron.models.layers.init import (
    Rule,
    constant,
    initialize,
    initialize_,
    log_uniform_decay,
    normal,
    tensors_by_name,
    time_step_bias,
    uniform,
)
from titan_nemotron.models.nemotron3 import FAMILY
from titan_nemotron.models.nemotron3.config import Nemotron3Config

SMALL = FAMILY.flavors["debug"]


def whole(rule: Rule, *shape: int, seed: int = 0, name: str = "a.weight") -> Tensor:
    tensor = torch.empty(shape)
    initialize_(tensor, rule, seed=seed, name=name, shape=shape, offsets=[0] * len(shape))
    return tensor


@settings(max_examples=60)
@given(data=st.data())
def test_any_split_gives_the_same_values(data: st.DataObject) -> None:
    """Cut dim 0, then dim 1 (and 2, for experts), anywhere, empty pieces included, across row blocks."""
    shape = tuple(data.draw(st.integers(1, limit), label="shape") for limit in (5, 600, 4))
    per_expert = data.draw(st.booleans(), label="per expert")
    rule = normal(0.5, per_expert=per_expert)
    if not per_expert:
        shape = (shape[1], shape[0], shape[2])
    expected = whole(rule, *shape)
    cuts = [sorted(data.draw(st.lists(st.integers(0, size), max_size=3))) for size in shape[:2]]
    edges = [[0, *cut, size] for cut, size in zip(cuts, shape[:2], strict=True)]
    filled = torch.full(shape, math.nan)
    for top, bottom in zip(edges[0], edges[0][1:], strict=False):
        for left, right in zip(edges[1], edges[1][1:], strict=False):
            piece = torch.empty(bottom - top, right - left, shape[2])
            initialize_(piece, rule, seed=0, name="a.weight", shape=shape, offsets=(top, left, 0))
            filled[top:bottom, left:right] = piece
    assert torch.equal(filled, expected)


def test_an_expert_is_drawn_as_a_parameter_of_its_own_and_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        drawn.append(tensor.numel())
        tensor.normal_(generator=generator)

    experts = whole(Rule(fill, per_expert=True), 6, 700, 3)
    assert max(drawn) == init.ROW_BLOCK * 3
    assert experts.flatten(1).unique(dim=0).shape[0] == 6
    # What one rank of many holds is drawn alone.
    drawn.clear()
    initialize_(torch.empty(1, 700, 3), Rule(fill, True), seed=0, name="a.weight", shape=(6, 700, 3), offsets=(4, 0, 0))
    assert sum(drawn) == 700 * 3


def test_seed_name_expert_and_block_all_matter() -> None:
    base = whole(normal(1.0), 600, 4)
    assert not torch.equal(base, whole(normal(1.0), 600, 4, seed=1))
    assert not torch.equal(base, whole(normal(1.0), 600, 4, name="b.weight"))
    assert not torch.equal(base[:256], base[256:512])


def test_order_of_parameters_and_the_global_generator_do_not_matter() -> None:
    first, second = FAMILY.model(SMALL), FAMILY.model(SMALL)
    initialize(first, 3)
    torch.manual_seed(99)
    names = list(tensors_by_name(second))
    for name in reversed(names):
        initialize(second, 3, names=[name])
    other = second.state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in first.state_dict().items())
    initialize(first, 3)  # again: nothing moves
    assert all(torch.equal(tensor, other[name]) for name, tensor in first.state_dict().items())


def test_a_model_built_on_meta_gets_every_tensor() -> None:
    with torch.device("meta"):
        model = FAMILY.model(SMALL)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(math.nan)
    initialize(model, 0)
    expected = FAMILY.model(SMALL)
    initialize(expected, 0)
    other = expected.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other[name]), name
    assert not any(tensor.isnan().any() for tensor in model.buffers())


def test_a_module_without_a_rule_is_named() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(3), persistent=False)

    with pytest.raises(TypeError, match="Forked states no initial value of table"):
        initialize(nn.Sequential(Forked()), 0)


def test_fp64_holds_the_same_values() -> None:
    narrow, wide = torch.empty(300, 3), torch.empty(300, 3, dtype=torch.float64)
    for tensor in (narrow, wide):
        initialize_(tensor, normal(0.1), seed=0, name="x", shape=(300, 3), offsets=(0, 0))
    assert torch.equal(narrow.double(), wide)


# Statistics. A sample of n values has a mean within 4 std / sqrt(n) of the distribution's.


def assert_mean(values: Tensor, mean: float, std: float) -> None:
    assert abs(float(values.double().mean()) - mean) < 4 * std / values.numel() ** 0.5


def test_rules_have_the_stated_distributions() -> None:
    values = whole(normal(0.02), 1000, 100)
    assert_mean(values, 0.0, 0.02)
    assert float(values.std()) == pytest.approx(0.02, rel=0.01)

    decay = whole(log_uniform_decay(), 50_000).exp()
    assert float(decay.min()) >= 1
    assert float(decay.max()) <= 16 * (1 + 1e-6)
    assert_mean(decay, 8.5, 15 / 12**0.5)

    conv = whole(uniform(0.5), 10_000, 1, 4)
    assert float(conv.abs().max()) <= 0.5
    assert_mean(conv, 0.0, 1 / 12**0.5)
    assert_mean(conv.square(), 1 / 12, 0.075)

    step = nn.functional.softplus(whole(time_step_bias(1e-3, 1e-1, 1e-4), 50_000))
    low, high = math.log(1e-3), math.log(1e-1)
    assert float(step.min()) >= 1e-3 * (1 - 1e-3)
    assert float(step.max()) <= 1e-1 * (1 + 1e-3)
    assert_mean(step.log(), (low + high) / 2, (high - low) / 12**0.5)
    floored = nn.functional.softplus(whole(time_step_bias(1e-6, 1e-1, 1e-2), 1000))
    assert float(floored.min()) == pytest.approx(1e-2, rel=1e-3)
    assert torch.equal(whole(constant(1.5), 7), torch.full((7,), 1.5))


def test_every_parameter_starts_as_megatron_does_it() -> None:
    """Residual outputs N(0, std / sqrt(layers)); other matrices N(0, std); the rest by its own rule."""
    config = Nemotron3Config(
        **SMALL.model_dump()
        | {"pattern": "M*-E", "use_bias": True, "mlp_bias": True, "attention_bias": True, "intermediate_size": 300}
    )
    model = FAMILY.model(config)
    initialize(model, 0)
    residual = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj", "fc2_latent_proj.weight")
    for name, tensor in model.state_dict().items():
        last = name.rpartition(".")[2]
        if name.endswith(residual):
            expected = config.initializer_range / len(config.pattern) ** 0.5
        elif "conv1d" in name:
            assert float(tensor.abs().max()) <= config.conv_kernel**-0.5, name
            assert float(tensor.std()) == pytest.approx((3 * config.conv_kernel) ** -0.5, rel=0.1), name
            continue
        elif "norm" in name or last == "D":
            assert torch.equal(tensor, torch.ones_like(tensor)), name
            continue
        elif last in ("bias", "correction_bias"):
            assert torch.equal(tensor, torch.zeros_like(tensor)), name
            continue
        elif last == "A_log":
            assert float(tensor.min()) >= 0
            assert float(tensor.max()) <= math.log(16)
            continue
        elif last == "dt_bias":
            assert float(nn.functional.softplus(tensor).max()) <= 0.101
            continue
        else:
            expected = config.initializer_range
        assert float(tensor.std()) == pytest.approx(expected, rel=0.05), name
        assert_mean(tensor, 0.0, expected)
