"""What each mode computes again, and that a block's results do not change."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.block import Block
from titan_nemotron.models.layers.init import initialize
from titan_nemotron.models.nemotron3.flavors import FLAVORS
from titan_nemotron.models.nemotron3.model import build_mixer
from titan_nemotron.parallel.recompute import EXPENSIVE, apply_recompute

CONFIG = FLAVORS["debug"].model_copy(update={"hidden_size": 48, "vocab_size": 64})


class Operations(TorchDispatchMode):
    """Counts the expensive operations, and all."""

    def __init__(self) -> None:
        super().__init__()
        self.expensive: Counter[str] = Counter()
        self.all: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all[str(function)] += 1
        if function in EXPENSIVE or function.namespace == "titan_nemotron":
            self.expensive[str(function)] += 1
        return function(*args, **(kwargs or {}))


def build_block(letter: str, mode: Any) -> Block:
    block = Block(CONFIG.hidden_size, 1e-5, build_mixer(letter, CONFIG))
    initialize(block, 3)
    apply_recompute(block, mode)
    return block


def run(block: Block) -> tuple[dict[str, Tensor], dict[str, Tensor], Operations]:
    """Results and gradients, statistics, and the operations of the backward."""
    x = torch.randn(2, 40, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layout = DocumentLayout.from_document_ids(torch.arange(40).expand(2, -1) // 15)
    y, stats = block(x, layout)
    loss = y.square().sum() + sum(value for name, value in stats.items() if name == "auxiliary_sum")
    with Operations() as operations:
        loss.backward()
    assert x.grad is not None
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: parameter.grad for name, parameter in block.named_parameters() if parameter.grad is not None}
    return found, {name: value.detach() for name, value in stats.items()}, operations


@pytest.mark.parametrize("letter", "M*-E")
def test_modes_agree(letter: str) -> None:
    expected, statistics, kept = run(build_block(letter, "none"))
    for mode in ("selective", "full"):
        block = build_block(letter, mode)
        assert {name for name, _ in block.named_parameters()} == {
            name for name, _ in build_block(letter, "none").named_parameters()
        }
        actual, actual_statistics, operations = run(block)
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=1e-5, atol=1e-6, msg=f"{mode} {name}")
        for name, tensor in statistics.items():
            torch.testing.assert_close(actual_statistics[name], tensor, rtol=1e-5, atol=0)
        if mode == "selective":
            assert operations.expensive == kept.expensive  # nothing expensive is computed twice
            assert operations.all.total() > kept.all.total()  # but something is
        else:
            assert operations.expensive.total() > kept.expensive.total()
