"""The balancing rule (the fixtures hold Megatron-LM's values; the multi-rank cases the counting)."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from titan_nemotron.optim.router_bias import update_router_biases


def model_of(routers: Mapping[str, Any]) -> Any:
    return SimpleNamespace(routers=lambda: routers)


def router(num_experts: int, bias: float = 0.0) -> Any:
    return SimpleNamespace(correction_bias=torch.full((num_experts,), bias))


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=16))
def test_moves_towards_even_load(counts: list[int]) -> None:
    one = router(len(counts))
    update_router_biases(model_of({"layers.1": one}), {"layers.1": torch.tensor(counts)}, 0.5)
    mean = sum(counts) / len(counts)
    for bias, count in zip(one.correction_bias.tolist(), counts):
        assert bias == 0.5 * ((mean > count) - (mean < count))


def test_a_shared_router_moves_once_by_the_sum_of_its_calls() -> None:
    shared, other = router(2), router(2)
    routers = {"mtp.0.layers.1": shared, "mtp.1.layers.1": shared, "layers.3": other}
    counts: dict[str, Tensor] = {
        "mtp.0.layers.1": torch.tensor([9, 1]),
        "mtp.1.layers.1": torch.tensor([0, 20]),
        "layers.3": torch.tensor([4, 4]),
    }
    update_router_biases(model_of(routers), counts, 1e-3)
    assert torch.equal(shared.correction_bias, torch.tensor([1e-3, -1e-3]))
    assert not other.correction_bias.any()


def test_fp32_keeps_the_step_beside_a_large_common_offset() -> None:
    one = router(2, bias=64.0)
    for _ in range(100):
        update_router_biases(model_of({"layers.1": one}), {"layers.1": torch.tensor([2**25 + 1, 2**25])}, 1e-3)
    torch.testing.assert_close(one.correction_bias, torch.tensor([63.9, 64.1]), atol=1e-3, rtol=0)
