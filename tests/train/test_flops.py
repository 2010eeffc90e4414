"""Counts of operations against PyTorch's own counter."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.models.support import VOCABULARY, random_tokens, small_model
from titan_nemotron.train.flops import model_size

LENGTH = 32


def test_matrix_products_are_what_pytorch_counts() -> None:
    model = small_model(pattern="--", mtp_blocks=0, mtp_depths=0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(random_tokens(1, LENGTH))
    assert model_size(model, LENGTH).flops == 3 * counter.get_total_flops() / LENGTH


def test_attention_counts_its_causal_half() -> None:
    """4 heads of 8: query and output 32 x 32, key and value 32 x 16; scores and values 2 x 2 x 32 for each of L / 2 keys."""
    plain = model_size(small_model(pattern="-", mtp_blocks=0, mtp_depths=0), LENGTH).flops
    attending = model_size(small_model(pattern="-*", mtp_blocks=0, mtp_depths=0), LENGTH).flops
    assert attending - plain == 3 * (2 * (2 * 32 * 32 + 2 * 32 * 16) + 2 * 2 * 32 * LENGTH / 2)


def test_experts_count_as_often_as_tokens_visit_them() -> None:
    """3 of 8 experts: up and down projection of 24 x 16 each, latent projections and the shared expert of 40, the router."""
    dense = model_size(small_model(pattern="-", mtp_blocks=0, mtp_depths=0), LENGTH).flops
    routed = model_size(small_model(pattern="-E", mtp_blocks=0, mtp_depths=0), LENGTH).flops
    weights = 3 * 2 * 24 * 16 + 2 * 32 * 16 + 2 * 32 * 40 + 8 * 32
    assert routed - dense == 3 * 2 * weights


def test_multi_token_depths_count_the_head_and_their_blocks_again() -> None:
    plain = model_size(small_model(pattern="-", mtp_blocks=0, mtp_depths=0), LENGTH)
    once = model_size(small_model(pattern="-", mtp_pattern="-", mtp_blocks=1, mtp_depths=1), LENGTH)
    twice = model_size(small_model(pattern="-", mtp_pattern="-", mtp_blocks=1, mtp_depths=2), LENGTH)
    depth = 2 * (2 * 32 * 48 + 2 * 32 * 32 + VOCABULARY * 32)
    assert once.flops - plain.flops == 3 * depth
    assert twice.flops - plain.flops == 6 * depth
    assert twice.active == once.active == plain.active
    assert twice.total == once.total > plain.total
