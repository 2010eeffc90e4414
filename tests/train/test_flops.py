"""Parameters and operations of the named sizes, against the published counts."""

import pytest
import torch

from titan_nemotron.models.family import load_family
from titan_nemotron.train.flops import ModelSize, model_size


def size_of(flavor: str, length: int = 8192, **changes: object) -> ModelSize:
    family = load_family("nemotron3")
    with torch.device("meta"):
        model = family.model(family.flavors[flavor].model_copy(update=changes))
    return model_size(model, length)


@pytest.mark.parametrize(
    ("flavor", "active_billions"), [("nano_30b", 3.580), ("super_120b", 12.770), ("ultra_550b", 56.059)]
)
def test_active_parameters_are_the_published_ones(flavor: str, active_billions: float) -> None:
    assert round(size_of(flavor).active / 1e9, 3) == active_billions


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
