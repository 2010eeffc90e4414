"""The linear map.

Shapes: M rows (all leading dims together), K inputs, N outputs.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.ops.kernels import chosen

FEW_ROWS = 2, 8  # first and last number of rows where these products were measured faster: docs/benchmarks.md
BLOCK = 64  # outputs of a block, at least


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """y = x W^T + b over the last dim: x [..., K] to [..., N], in x's dtype, which weight and bias share.

    A few rows, as when decoding, are multiplied on a CPU in another way, for which the library reads a weight that is not in
    the cache at up to twice the speed: as (W x^T)^T, or as a batch of products with blocks of W.
    """
    rows = x.shape[:-1].numel()
    path = chosen("linear", x) if FEW_ROWS[0] <= rows <= FEW_ROWS[1] else "reference"
    if path == "reference" or x.dtype != torch.float32:
        return F.linear(x, weight_NK, bias_N)
    x_MK = x.reshape(rows, -1)
    if path == "transposed":
        y_MN = torch.mm(weight_NK, x_MK.T).T
    else:
        blocks = _num_blocks(weight_NK.shape[0])
        weights = weight_NK.unflatten(0, (blocks, -1))
        y_MN = torch.bmm(x_MK.expand(blocks, -1, -1), weights.mT).transpose(0, 1).flatten(1)
    if bias_N is not None:
        y_MN = y_MN + bias_N
    return y_MN.contiguous().view(*x.shape[:-1], -1)


@lru_cache
def _num_blocks(outputs: int) -> int:
    """The most equal blocks of at least BLOCK outputs; 1 for fewer than two blocks."""
    return next((number for number in range(outputs // BLOCK, 1, -1) if outputs % number == 0), 1)
