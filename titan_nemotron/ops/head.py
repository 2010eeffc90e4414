"""The output layer's loss and log-probabilities, without ever holding all logits.

Shapes: T tokens, D model size, V vocabulary, C tokens of a chunk.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from titan_nemotron.layout import IGNORED
from titan_nemotron.ops.kernels import chosen
from titan_nemotron.ops.opaque import opaque


def linear_cross_entropy(
    h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, token_weights_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """loss = -sum_t weight_t log softmax(h_t w^T)[target_t], and the log-probabilities, without gradient.

    Targets of -100 are skipped (log-probability 0). Logits are accumulated in at least fp32.
    Returns a scalar and [T], both in at least fp32.

    The gradients of h and w are computed with the loss, chunk by chunk, so that the logits are computed once; backward
    multiplies them by the scalar it is given, in place: a second backward through one loss is an error. The gradient of
    w is summed in at least fp32. token_weights are constants.
    """
    path = chosen("head", h_TD)
    if path == "reference":
        logprobs, _ = _reference(h_TD, w_VD, targets_T, 1.0)
        weighted = logprobs if token_weights_T is None else logprobs * token_weights_T
        return -weighted.sum(), logprobs.detach()
    grad = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(
        h_TD, w_VD, targets_T, token_weights_T, grad and h_TD.requires_grad, grad and w_VD.requires_grad, path
    )


def linear_logprobs(h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log p_t = log softmax(h_t w^T / temperature)[target_t], with gradient, and the entropy of each distribution, without.

    Targets of -100 give log-probability 0 and entropy 0. Returns two [T] tensors in at least fp32.
    The logits are computed once more in backward.
    """
    path = chosen("head", h_TD)
    if path == "reference":
        return _reference(h_TD, w_VD, targets_T, temperature)
    return _LinearLogprobs.apply(h_TD, w_VD, targets_T, temperature, path)


def _reference(h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(h_TD.dtype, torch.float32)
    logprobs = torch.log_softmax(h_TD.to(dtype) @ w_VD.to(dtype).T / temperature, dim=-1)
    valid = targets_T != IGNORED
    picked = logprobs.gather(1, torch.where(valid, targets_T, 0)[:, None])[:, 0]
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return torch.where(valid, picked, 0), torch.where(valid, entropy, 0)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TD: Tensor,
        w_VD: Tensor,
        targets_T: Tensor,
        token_weights_T: Tensor | None,
        h_grad: bool,
        w_grad: bool,
        path: str,
    ) -> tuple[Tensor, Tensor]:
        if h_grad or w_grad:
            logprobs, dh, dw = _GRADIENTS(h_TD, w_VD, targets_T, token_weights_T, 1.0, h_grad, w_grad, path)
            ctx.save_for_backward(dh if h_grad else None, dw if w_grad else None)
        else:
            logprobs, _ = _LOGPROBS(h_TD, w_VD, targets_T, 1.0)
        ctx.mark_non_differentiable(logprobs)
        ctx.set_materialize_grads(False)
        weighted = logprobs if token_weights_T is None else logprobs * token_weights_T
        return -weighted.sum(), logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dh, dw = ctx.saved_tensors
        # In place: a copy of dw would be as large as the weight. A compiled graph does not own what it saved.
        scaled = torch.Tensor.mul if torch.compiler.is_compiling() else torch.Tensor.mul_
        dh, dw = (None if tensor is None else scaled(tensor, grad.to(tensor.dtype)) for tensor in (dh, dw))
        return dh, dw, None, None, None, None, None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, temperature: float, path: str
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = _LOGPROBS(h_TD, w_VD, targets_T, temperature)
        ctx.save_for_backward(h_TD, w_VD, targets_T)
        ctx.temperature, ctx.path = temperature, path
        ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, _: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        h, w, targets = ctx.saved_tensors
        h_grad, w_grad, *_ = ctx.needs_input_grad
        scales = grad_T / -ctx.temperature
        _, dh, dw = _GRADIENTS(h, w, targets, scales, ctx.temperature, h_grad, w_grad, ctx.path)
        return dh if h_grad else None, dw if w_grad else None, None, None, None


# --- chunks
#
# On a CPU everything is computed in fp32. On a GPU bf16 hidden states meet a bf16 copy of the weight with fp32 logits
# and fp32 sums.

ROWS = {"cpu": 256, "cuda": 1024}  # tokens of a chunk: enough to keep the matrix products busy
LOGITS = 2**22  # logits of a chunk, 16 MiB: smaller vocabularies have larger chunks
CACHE = 2**20  # logits that are worked off while a CPU's cache holds them


def _operand_dtype(h: Tensor) -> torch.dtype:
    half = h.device.type == "cuda" and h.dtype in (torch.bfloat16, torch.float16)
    return h.dtype if half else torch.promote_types(h.dtype, torch.float32)


def _chunks(h_TD: Tensor, w_VD: Tensor, targets_T: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(places, hidden states, logits, targets) of the scored tokens; the logits are overwritten by the next chunk's."""
    places_T = (targets_T != IGNORED).nonzero()[:, 0]
    rows = max(ROWS[h_TD.device.type], LOGITS // len(w_VD))
    buffer = h_TD.new_empty(min(rows, len(places_T)), len(w_VD), dtype=torch.float32)
    for places_C in places_T.split(rows):
        h_CD = h_TD.index_select(0, places_C).to(w_VD.dtype)
        logits_CV = buffer[: len(places_C)]
        if w_VD.dtype == torch.float32:
            torch.mm(h_CD, w_VD.T, out=logits_CV)
        else:
            torch.mm(h_CD, w_VD.T, out_dtype=torch.float32, out=logits_CV)
        yield places_C, h_CD, logits_CV, targets_T[places_C]


def _logprobs(h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies."""
    logprobs, entropy = (h_TD.new_zeros(len(h_TD), dtype=torch.float32) for _ in range(2))
    for places_C, _, logits_CV, targets_C in _chunks(h_TD, w_VD.to(_operand_dtype(h_TD)), targets_T):
        parts = len(places_C) if h_TD.device.type == "cuda" else max(1, CACHE // len(w_VD))
        for place, x, target in zip(places_C.split(parts), logits_CV.split(parts), targets_C.split(parts)):
            if temperature != 1:
                x.div_(temperature)
            x.sub_(x.amax(1, keepdim=True))  # else the entropy would be a small difference of logits
            picked = x.gather(1, target[:, None])[:, 0]
            probabilities = torch.softmax(x, 1)
            log_total = -probabilities.amax(1).log()  # log sum(exp(x)), see _gradient
            logprobs[place] = picked - log_total
            entropy[place] = log_total - torch.linalg.vecdot(probabilities, x)
    return logprobs, entropy


def _gradients(
    h_TD: Tensor,
    w_VD: Tensor,
    targets_T: Tensor,
    scales_T: Tensor | None,
    temperature: float,
    h_grad: bool,
    w_grad: bool,
    path: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, and the gradients of h and w for the loss -sum_t scale_t * temperature * log p_t.

    That is: each logit of token t gets scale_t * (softmax - 1[target]). An unwanted gradient is an empty tensor.
    """
    logprobs = h_TD.new_zeros(len(h_TD), dtype=torch.float32)
    dh = torch.zeros_like(h_TD) if h_grad else h_TD.new_empty(0)
    dw = torch.empty_like(w_VD, dtype=torch.float32) if w_grad else w_VD.new_empty(0)
    started = 0  # the first chunk fills dw, the others add to it
    operand_VD = w_VD.to(_operand_dtype(h_TD))
    for places_C, h_CD, logits_CV, targets_C in _chunks(h_TD, operand_VD, targets_T):
        if temperature != 1:
            logits_CV.div_(temperature)
        logprobs[places_C] = (_liger_gradient if path == "liger" else _gradient)(logits_CV, targets_C)
        g_CV = logits_CV.to(operand_VD.dtype)
        scales_C1 = None if scales_T is None else scales_T[places_C, None].float()
        if h_grad:
            dh_CD = g_CV @ operand_VD
            dh[places_C] = (dh_CD if scales_C1 is None else dh_CD * scales_C1).to(dh.dtype)
        if w_grad:
            h_CD = h_CD if scales_C1 is None else (h_CD * scales_C1).to(h_CD.dtype)
            if g_CV.dtype == torch.float32:
                dw.addmm_(g_CV.T, h_CD, beta=started)
            else:
                torch.addmm(dw, g_CV.T, h_CD, beta=started, out_dtype=torch.float32, out=dw)
            started = 1
    if not started:
        dw.zero_()
    return logprobs, dh, dw.to(w_VD.dtype)


def _gradient(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Turn logits into softmax - 1[target], in place; returns the targets' log-probabilities."""
    targets_C1 = targets_C[:, None]
    picked = logits_CV.gather(1, targets_C1) - logits_CV.amax(1, keepdim=True)
    torch.softmax(logits_CV, 1, out=logits_CV)
    # The largest probability is 1 / sum(exp(x - max(x))): its logarithm is exact where the target's may underflow.
    logprobs = picked + logits_CV.amax(1, keepdim=True).log()
    logits_CV.scatter_add_(1, targets_C1, torch.full_like(logprobs, -1))
    return logprobs[:, 0]


def _liger_gradient(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    """_gradient in one kernel."""
    from liger_kernel.ops.cross_entropy import cross_entropy_forward

    # The kernel writes the gradient over the logits when these require one.
    loss, *_ = cross_entropy_forward(
        logits_CV.requires_grad_(), targets_C, None, IGNORED, 0.0, 0.0, "none", None, return_z_loss=False
    )
    logits_CV.requires_grad_(False)
    return -loss


def _logprobs_shapes(h_TD: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return h_TD.new_empty(len(h_TD), dtype=torch.float32), h_TD.new_empty(len(h_TD), dtype=torch.float32)


def _gradients_shapes(
    h_TD: Tensor,
    w_VD: Tensor,
    targets_T: Tensor,
    scales_T: Tensor | None,
    temperature: float,
    h: bool,
    w: bool,
    path: str,
) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, _ = _logprobs_shapes(h_TD)
    return logprobs, h_TD.new_empty(h_TD.shape if h else 0), w_VD.new_empty(w_VD.shape if w else 0)


_LOGPROBS = opaque(
    "linear_logprobs(Tensor h, Tensor w, Tensor targets, float temperature) -> (Tensor, Tensor)",
    _logprobs,
    _logprobs_shapes,
)
_GRADIENTS = opaque(
    "linear_logprobs_gradients(Tensor h, Tensor w, Tensor targets, Tensor? scales, float temperature, bool h_grad, "
    "bool w_grad, str path) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _gradients_shapes,
)
