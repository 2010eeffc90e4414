"""Parameters and operations of the named sizes, against the published counts."""

import pytest
import torch

from titan_nemotron.models.family import load_family
from titan_nemotron.train.flops import ModelSize, model_size, peak_flops, peak_of


def size_of(flavor: str, length: int = 8192, **changes: object) -> ModelSize:
    family = load_family("nemotron3")
    with torch.device("meta"):
        model = family.model(family.flavors[flavor].model_copy(update=changes))
    return model_size(model, length)


@pytest.mark.parametrize(
    ("flavor", "billions"),
    [
        ("nano_30b", (2.875, 3.228, 3.580)),
        ("super_120b", (11.696, 12.233, 12.770)),
        ("ultra_550b", (53.911, 54.985, 56.059)),
    ],
)
def test_active_parameters_are_the_published_ones(flavor: str, billions: tuple[float, float, float]) -> None:
    """Without embedding and head, with the head, with both."""
    config, active = load_family("nemotron3").flavors[flavor], size_of(flavor).active
    table = config.vocab_size * config.hidden_size
    assert tuple(round(number / 1e9, 3) for number in (active - 2 * table, active - table, active)) == billions


def test_flops_of_dense_parts_by_hand() -> None:
    """One attention and one MLP block: six operations a weight, 12 H E L / 2 of attention, and the head."""
    dense = {"pattern": "*-", "mtp_blocks": 0, "mtp_depths": 0}
    length, config = 1000, load_family("nemotron3").flavors["debug"]
    d, q, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    e, f, v = config.head_dim, config.intermediate_size, config.vocab_size
    weights = d * (q + 2 * kv) * e + q * e * d + 2 * d * f + d * v
    assert size_of("debug", length, **dense).flops == 6 * weights + 12 * q * e * length / 2


def test_shared_depths_and_experts_count_as_often_as_they_are_used() -> None:
    config = load_family("nemotron3").flavors["debug"]
    none, one, two = (size_of("debug", mtp_blocks=min(depths, 1), mtp_depths=depths).flops for depths in (0, 1, 2))
    assert two - one == pytest.approx(one - none)
    more = size_of("debug", n_routed_experts=2 * config.n_routed_experts, mtp_blocks=0, mtp_depths=0)
    routers = 3 * 6 * config.n_routed_experts * config.hidden_size  # in the three routed blocks of the flavor
    assert more.flops - none == pytest.approx(routers)


def test_peaks_are_those_of_the_data_sheets() -> None:
    """Names as the driver gives them, of which one may hold another's."""
    tera = {
        "NVIDIA H200": 989,
        "NVIDIA GH200 480GB": 989,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H20": 148,
        "NVIDIA GB200": 2500,
        "NVIDIA B200": 2250,
        "NVIDIA A100-SXM4-80GB": 312,
    }
    assert {name: peak_of(name) for name in tera} == {name: peak * 1e12 for name, peak in tera.items()}
    assert peak_of("NVIDIA GeForce RTX 3090") is None
    assert peak_flops(torch.device("cpu")) is None
