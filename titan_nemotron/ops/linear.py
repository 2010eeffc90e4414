"""The linear map.

Shapes: M rows (all leading dims together), K inputs, N outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.ops.kernels import chosen

FEW_ROWS = 2, 8  # first and last number of rows where the transposed product was measured faster: docs/benchmarks.md


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """y = x W^T + b over the last dim: x [..., K] to [..., N], in x's dtype, which weight and bias share.

    A few rows, as when decoding, are multiplied on a CPU as (W x^T)^T: the same sums, but the library reads a weight that
    is not in the cache at twice the speed or more.
    """
    rows = x.shape[:-1].numel()
    if not FEW_ROWS[0] <= rows <= FEW_ROWS[1] or chosen("linear", x) != "transposed":
        return F.linear(x, weight_NK, bias_N)
    y_NM = torch.mm(weight_NK, x.reshape(rows, -1).T)
    if bias_N is not None:
        y_NM = y_NM + bias_N[:, None]
    return y_NM.T.contiguous().view(*x.shape[:-1], -1)
