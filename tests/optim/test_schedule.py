"""Learning rates: shapes, joints and ends (the fixtures hold Megatron-LM's values)."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_nemotron.optim.config import ScheduleConfig
from titan_nemotron.optim.schedule import learning_rate

PEAK = 3e-4


@st.composite
def schedules(draw: st.DrawFn) -> tuple[ScheduleConfig, int]:
    kind = draw(st.sampled_from(["constant", "linear", "cosine", "wsd"]))
    warmup, stable, decay = (draw(st.integers(low, 50)) for low in (0, 0, 1))
    shape = draw(st.sampled_from(["linear", "cosine", "minus_sqrt"]))
    arguments: dict[str, Any] = {"decay_steps": decay, "decay_shape": shape} if kind == "wsd" else {}
    minimum = draw(st.sampled_from([0.0, 0.01, 0.5, 1.0]))
    config = ScheduleConfig(kind=kind, warmup_steps=warmup, min_ratio=minimum, **arguments)
    return config, warmup + stable + decay


@given(schedules())
def test_rises_to_the_peak_then_never_rises_again(schedule: tuple[ScheduleConfig, int]) -> None:
    config, total = schedule
    rates = [learning_rate(config, PEAK, step, total) for step in range(total + 10)]
    warmup = config.warmup_steps
    assert all(earlier < later for earlier, later in pairwise(rates[: warmup + 1]))
    assert rates[warmup] == pytest.approx(PEAK)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(rates[warmup:]))
    end = PEAK if config.kind == "constant" else PEAK * config.min_ratio
    assert rates[total:] == pytest.approx([end] * 10, abs=1e-18)


@given(schedules(), st.integers(1, 100))
def test_wsd_is_flat_before_its_decay(schedule: tuple[ScheduleConfig, int], step: int) -> None:
    config, total = schedule
    if config.kind == "wsd" and config.warmup_steps < step <= total - config.decay_steps:
        assert learning_rate(config, PEAK, step, total) == pytest.approx(PEAK)


@pytest.mark.parametrize(
    "shape, share", [("linear", 0.75), ("cosine", 0.5 + math.cos(math.pi / 4) / 2), ("minus_sqrt", 0.5)]
)
def test_a_quarter_into_the_decay(shape: Any, share: float) -> None:
    config = ScheduleConfig(kind="wsd", decay_steps=40, decay_shape=shape, min_ratio=0.1)
    assert learning_rate(config, PEAK, 70, 100) == pytest.approx(PEAK * (0.1 + 0.9 * share))
    if shape != "minus_sqrt":  # the same shapes over the whole run, without the flat part
        whole = ScheduleConfig(kind=shape, min_ratio=0.1)
        assert learning_rate(whole, PEAK, 25, 100) == pytest.approx(PEAK * (0.1 + 0.9 * share))


def test_a_run_too_short_for_its_decay() -> None:
    """It still peaks after the warmup and ends at the minimum: a short trial of a long configuration is no mistake."""
    config = ScheduleConfig(kind="wsd", warmup_steps=4, decay_steps=100, decay_shape="linear")
    rates = [learning_rate(config, 1.0, step, 8) for step in range(1, 9)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_decay_steps_belong_to_wsd() -> None:
    with pytest.raises(ValueError, match=r"decay_steps = 0: wsd needs"):
        ScheduleConfig(kind="wsd")
    with pytest.raises(ValueError, match=r"decay_steps = 5: only kind"):
        ScheduleConfig(kind="cosine", decay_steps=5)
