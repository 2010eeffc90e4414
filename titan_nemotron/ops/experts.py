"""Routed experts as grouped matrix products, and the rows they work on.

Shapes: T tokens, K experts a token, R routed rows sorted by expert, E experts, D model (or latent) size, F expert size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.ops.kernels import chosen
from titan_nemotron.ops.opaque import opaque

FEW_ROWS = 64  # up to here no embedding_bag: it is not faster, and slows the small matrix products behind it by half


def relu2_experts(x_RD: Tensor, up_EFD: Tensor, down_EDF: Tensor, weights_R: Tensor, offsets_E: Tensor) -> Tensor:
    """y_r = down_e (w_r * relu(up_e x_r)^2) for the rows r in [offsets[e-1], offsets[e]) of expert e.

    The routing weight is folded in before the down projection, which has no bias, so that combining is a plain sum.
    offsets [E] int32: ends of the experts' rows; rows at and beyond offsets[-1] give 0. Returns [R, D] in x's dtype.
    Outside fp64, what the backward needs is x and up_e x_r alone.
    """
    path = chosen("experts", x_RD)
    if path == "reference":
        return _reference(x_RD, up_EFD, down_EDF, weights_R, offsets_E)
    return _Relu2Experts.apply(x_RD, up_EFD, down_EDF, weights_R, offsets_E, path == "triton")


def gather_rows(x_TD: Tensor, tokens_R: Tensor, places_TK: Tensor) -> Tensor:
    """x[tokens]: a copy of its token for every routed row [R, D].

    tokens_R: the token of a row; places_TK: the rows of a token. Knowing both, the backward gathers as well: it adds the
    K rows of a token in the order of places_TK, where an index_add would add them one by one.
    """
    if not torch.is_grad_enabled():
        return x_TD.index_select(0, tokens_R)
    return _GatherRows.apply(x_TD, tokens_R, places_TK)


def sum_rows(y_RD: Tensor, tokens_R: Tensor, places_TK: Tensor) -> Tensor:
    """out_t = sum_k y[places_tk], [T, D]: the transpose of gather_rows, added in a fixed order and in at least fp32."""
    return _SumRows.apply(y_RD, tokens_R, places_TK)


def inverse_permutation(order_R: Tensor) -> Tensor:
    """[R] int64 with inverse[order[r]] = r."""
    return torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))


def permute_rows(x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """x[order], where inverse[order[r]] = r: knowing both, the backward gathers as well."""
    return _PermuteRows.apply(x_RD, order_R, inverse_R)


def on_host(numbers: Tensor) -> Tensor:
    """A copy in the host's memory, which waits for the device. Recomputation keeps it, and does not wait again."""
    return _ON_HOST(numbers)


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R, inverse_R)
        return x_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        order_R, inverse_R = ctx.saved_tensors
        return _PermuteRows.apply(grad_RD, inverse_R, order_R), None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, tokens_R: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_R, places_TK)
        return x_TD.index_select(0, tokens_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        return _SumRows.apply(grad_RD, *ctx.saved_tensors), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, tokens_R: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_R, places_TK)
        if places_TK.numel() <= FEW_ROWS:
            return y_RD.index_select(0, places_TK.flatten()).view(*places_TK.shape, y_RD.shape[1]).sum(1)
        return F.embedding_bag(places_TK, y_RD, mode="sum")  # a gather and a sum in one pass

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        return _GatherRows.apply(grad_TD, *ctx.saved_tensors), None, None


# --- reference: a loop over the experts


def _reference(x_RD: Tensor, up_EFD: Tensor, down_EDF: Tensor, weights_R: Tensor, offsets_E: Tensor) -> Tensor:
    outputs = []
    start = 0
    for up_FD, down_DF, stop in zip(up_EFD.unbind(), down_EDF.unbind(), offsets_E.tolist()):
        a_RF = torch.relu(x_RD[start:stop] @ up_FD.T).square() * weights_R[start:stop, None].to(x_RD.dtype)
        outputs.append(a_RF @ down_DF.T)
        start = stop
    outputs.append(x_RD.new_zeros(x_RD.shape[0] - start, down_EDF.shape[1]))
    return torch.cat(outputs)


# --- grouped matrix products, with squared ReLU and routing weight between them
#
# Opaque to the compiler, because F.grouped_mm does not compile in fp32.


def _products(a_RM: Tensor, b_EMN: Tensor, offsets_E: Tensor) -> Tensor:
    """a_r b_e for the rows of each expert, [R, N]; rows beyond offsets[-1] hold anything."""
    if _aligned(a_RM, b_EMN):
        return F.grouped_mm(a_RM, b_EMN, offs=offsets_E)
    out, start = a_RM.new_empty(a_RM.shape[0], b_EMN.shape[2]), 0
    for b_MN, stop in zip(b_EMN, offsets_E.tolist()):
        torch.mm(a_RM[start:stop], b_MN, out=out[start:stop])
        start = stop
    return out


def _weight_gradients(a_RM: Tensor, b_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """sum_r a_r b_r^T over the rows of each expert, [E, M, N]; 0 for an expert without rows."""
    if _aligned(a_RM, b_RN):
        return F.grouped_mm(a_RM.T, b_RN, offs=offsets_E)
    out, start = a_RM.new_empty(len(offsets_E), a_RM.shape[1], b_RN.shape[1]), 0
    for out_MN, stop in zip(out, offsets_E.tolist()):
        torch.mm(a_RM[start:stop].T, b_RN[start:stop], out=out_MN)
        start = stop
    return out


def _aligned(a: Tensor, b: Tensor) -> bool:
    """F.grouped_mm wants every row to start at a multiple of 16 bytes, and at least one row."""
    sizes = (a.shape[1], *b.shape[1:])
    return a.shape[0] > 0 and all(size * a.element_size() % 16 == 0 for size in sizes)


def _clear_tail(rows: Tensor, offsets_E: Tensor) -> Tensor:
    """Zero the rows beyond offsets[-1], where a grouped product leaves uninitialised memory."""
    if rows.device.type == "cpu":
        rows[int(offsets_E[-1]) :] = 0
        return rows
    beyond = torch.arange(rows.shape[0], device=rows.device) >= offsets_E[-1]  # without waiting for the device
    return rows.masked_fill_(beyond.view(-1, *[1] * (rows.dim() - 1)), 0)


def _activate(h_RF: Tensor, weights_R: Tensor) -> Tensor:
    """a = w relu(h)^2."""
    a_RF = torch.relu(h_RF)
    return a_RF.mul_(a_RF).mul_(weights_R[:, None])


def _activate_backward(h_RF: Tensor, da_RF: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a once more, and the gradients of h (in the memory of da) and of the weights."""
    relu_RF = torch.relu(h_RF)
    square_RF = relu_RF.square()
    dtype = torch.promote_types(h_RF.dtype, torch.float32)
    dweights_R = torch.linalg.vecdot(da_RF.to(dtype), square_RF.to(dtype)).to(weights_R.dtype)
    return square_RF.mul_(weights_R[:, None]), da_RF.mul_(relu_RF).mul_(2 * weights_R[:, None]), dweights_R


def _forward(
    x_RD: Tensor, up_EFD: Tensor, down_EDF: Tensor, weights_R: Tensor, offsets_E: Tensor, fused: bool
) -> tuple[Tensor, Tensor]:
    """y [R, D] and the pre-activations h = up_e x_r [R, F]."""
    few = None if fused else _columns_of_few(x_RD.shape[0], offsets_E)
    if few is not None:
        return _forward_of_few(x_RD, up_EFD, down_EDF, weights_R, *few)
    h_RF = _products(x_RD.contiguous(), up_EFD.transpose(1, 2), offsets_E)
    if fused:
        from titan_nemotron.ops.experts_triton import activate
    else:
        activate = _activate
    a_RF = activate(h_RF, weights_R)
    return _clear_tail(_products(a_RF, down_EDF.transpose(1, 2), offsets_E), offsets_E), h_RF


def _backward(
    grad_RD: Tensor,
    x_RD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    weights_R: Tensor,
    offsets_E: Tensor,
    h_RF: Tensor,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, up, down and weights."""
    grad_RD, x_RD = grad_RD.contiguous(), x_RD.contiguous()  # a sum hands on a gradient with stride 0
    if fused:
        from titan_nemotron.ops.experts_triton import activate_backward
    else:
        activate_backward = _activate_backward
    a_RF, dh_RF, dweights_R = activate_backward(h_RF, _products(grad_RD, down_EDF, offsets_E), weights_R)
    ddown = _weight_gradients(grad_RD, a_RF, offsets_E)
    dx = _products(dh_RF, up_EFD, offsets_E)
    dup = _weight_gradients(dh_RF, x_RD, offsets_E)
    return _clear_tail(dx, offsets_E), dup, ddown, _clear_tail(dweights_R, offsets_E)


def _columns_of_few(num_rows: int, offsets_E: Tensor) -> tuple[int, list[int]] | None:
    """Where, on a CPU, most experts have a few rows, as when decoding: a number of columns C that holds the rows of any
    expert, and the column, counted through all experts, of each row. Else None.
    """
    num_experts = offsets_E.shape[0]
    if offsets_E.device.type != "cpu" or not num_experts <= num_rows <= 4 * num_experts:
        return None
    stops = offsets_E.tolist()
    counts = [stop - start for start, stop in zip([0, *stops], stops)]
    if max(counts) > 8 or sum(map(bool, counts)) < num_experts / 2 or stops[-1] < num_rows:
        return None
    num_columns = max(2, *counts)  # the product with one column is a slower one
    return num_columns, [expert * num_columns + i for expert, count in enumerate(counts) for i in range(count)]


def _forward_of_few(
    x_RD: Tensor, up_EFD: Tensor, down_EDF: Tensor, weights_R: Tensor, num_columns: int, columns: list[int]
) -> tuple[Tensor, Tensor]:
    """The same by two batched products, whose time is that of reading the weights. See _columns_of_few.

    Which comes first in a product, the weight or the rows, is chosen as in ops.linear.
    """
    columns_R = torch.tensor(columns, device=x_RD.device)

    def spread(rows: Tensor) -> Tensor:  # [R, ...] -> [E, C, ...], zero where an expert has no row
        empty = rows.new_zeros(up_EFD.shape[0] * num_columns, *rows.shape[1:])
        return empty.index_copy_(0, columns_R, rows).unflatten(0, (-1, num_columns))

    def products(weight_EMN: Tensor, rows_ECN: Tensor) -> Tensor:
        if chosen("linear", rows_ECN) == "transposed":
            return torch.bmm(weight_EMN, rows_ECN.mT).mT.contiguous()
        return torch.bmm(rows_ECN, weight_EMN.mT)

    h_ECF = products(up_EFD, spread(x_RD))
    a_ECF = torch.relu(h_ECF).square_().mul_(spread(weights_R.to(x_RD.dtype))[..., None])
    y_ECD = products(down_EDF, a_ECF)
    return y_ECD.flatten(0, 1).index_select(0, columns_R), h_ECF.flatten(0, 1).index_select(0, columns_R)


def _forward_shapes(x_RD: Tensor, up_EFD: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x_RD.new_empty(x_RD.shape), x_RD.new_empty(x_RD.shape[0], up_EFD.shape[1])


def _backward_shapes(grad_RD: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in rest[:4])


_INPUTS = "Tensor x, Tensor up, Tensor down, Tensor weights, Tensor offsets"
_FORWARD = opaque(f"relu2_experts({_INPUTS}, bool fused) -> (Tensor, Tensor)", _forward, _forward_shapes)
_BACKWARD = opaque(
    f"relu2_experts_backward(Tensor grad, {_INPUTS}, Tensor h, bool fused) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_shapes,
)


class _Relu2Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        y_RD, h_RF = _FORWARD(*inputs)
        *tensors, ctx.fused = inputs
        ctx.save_for_backward(*tensors, h_RF)
        return y_RD

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_BACKWARD(grad_RD, *ctx.saved_tensors, ctx.fused), None, None


_ON_HOST = opaque(
    "on_host(Tensor numbers) -> Tensor",
    lambda numbers: torch.empty_like(numbers, device="cpu").copy_(numbers),
    lambda numbers: torch.empty_like(numbers, device="cpu"),
)
