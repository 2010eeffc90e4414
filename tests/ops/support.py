"""What the tests of operations share."""

import torch
from torch import Tensor


def make_documents(seed: int, num_rows: int, length: int, boundary: float, padding: float) -> Tensor:
    """Document ids [rows, length]: each position starts a document, or is padding, with the given probabilities."""
    random = torch.Generator().manual_seed(seed)
    ids = (torch.rand(num_rows, length, generator=random) < boundary).cumsum(1)
    return torch.where(torch.rand(num_rows, length, generator=random) < padding, -1, ids)


def relative(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|; where a gradient cancels, 0.1 an element stands for |expected|."""
    return float((actual.double() - expected).norm() / max(float(expected.norm()), 0.1 * expected.numel() ** 0.5))


def of_largest(actual: Tensor, expected: Tensor) -> float:
    """Largest error over the largest expected value, whatever its size; infinite when something is not finite."""
    if not actual.isfinite().all():
        return float("inf")
    error, largest = (actual.double() - expected).abs().amax(), expected.abs().amax()
    return float(error / largest) if largest else float(error)
