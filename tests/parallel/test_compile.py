"""Compiled blocks against eager ones, statistics included."""

import functools
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.test_recompute import CONFIG
from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.block import Block
from titan_nemotron.models.layers.init import initialize
from titan_nemotron.models.nemotron3.model import build_mixer
from titan_nemotron.parallel.apply import compile_blocks
from titan_nemotron.parallel.recompute import apply_recompute

LENGTH = 40


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(letters: str, mode: Any) -> list[nn.Module]:
    blocks: list[nn.Module] = [Block(CONFIG.hidden_size, 1e-5, build_mixer(letter, CONFIG)) for letter in letters]
    for seed, block in enumerate(blocks):
        initialize(block, seed)
        apply_recompute(block, mode)
    return blocks


def run(blocks: list[nn.Module], document_length: int) -> dict[str, Tensor]:
    """Output, statistics and gradients of the blocks in a row."""
    x = torch.randn(2, LENGTH, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layout = DocumentLayout.from_document_ids(torch.arange(LENGTH).expand(2, -1) // document_length)
    h, found = x, {}
    loss = torch.zeros(())
    for index, block in enumerate(blocks):
        h, stats = block(h, layout)
        found |= {f"{index}.{name}": value.detach() for name, value in stats.items()}
        loss = loss + stats.get("auxiliary_sum", 0.0)
    (loss + h.square().sum()).backward()
    assert x.grad is not None
    found |= {"h": h.detach(), "x": x.grad}
    for index, block in enumerate(blocks):
        found |= {f"{index}.{name}": p.grad for name, p in block.named_parameters() if p.grad is not None}
        block.zero_grad()
    return found


def check(letters: str, mode: str) -> int:
    """Compare on two layouts; returns the number of graphs that were compiled."""
    eager, compiled = build(letters, "none"), build(letters, mode)
    compile_blocks(compiled)
    torch._dynamo.utils.counters.clear()
    for document_length in (15, 40):
        expected, actual = run(eager, document_length), run(compiled, document_length)
        assert set(actual) == set(expected)
        for name, tensor in expected.items():
            if tensor.is_floating_point():
                error = (actual[name] - tensor).norm() / tensor.norm().clamp(min=1e-12)
                assert error <= 1e-5, f"{name}: {error:.1e}"
            else:
                assert torch.equal(actual[name], tensor), name
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="compiling needs a C++ compiler")
def test_compiled_blocks_that_recompute_selectively() -> None:
    check("ME", "selective")


@pytest.mark.parametrize("mode", ["none", "full"])
def test_blocks_are_one_graph_and_share_it(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    assert check("M*-EEM*-", mode) == 4  # one of each kind, whatever the documents of a row
