"""The output layer's loss and log-probabilities.

Shapes: T tokens, D model size, V vocabulary.
"""

import torch
from torch import Tensor

from titan_nemotron.layout import IGNORED


def linear_cross_entropy(
    h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, token_weights_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """loss = -sum_t weight_t log softmax(h_t w^T)[target_t], and the log-probabilities, without gradient.

    Targets of -100 are skipped (log-probability 0). Logits are accumulated in at least fp32.
    Returns a scalar and [T], both in at least fp32.
    """
    logprobs, _ = linear_logprobs(h_TD, w_VD, targets_T, 1.0)
    weighted = logprobs if token_weights_T is None else logprobs * token_weights_T
    return -weighted.sum(), logprobs.detach()


def linear_logprobs(h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log p_t = log softmax(h_t w^T / temperature)[target_t], with gradient, and the entropy of each distribution, without.

    Targets of -100 give log-probability 0 and entropy 0. Returns two [T] tensors in at least fp32.
    """
    dtype = torch.promote_types(h_TD.dtype, torch.float32)
    logprobs = torch.log_softmax(h_TD.to(dtype) @ w_VD.to(dtype).T / temperature, dim=-1)
    valid = targets_T != IGNORED
    chosen = logprobs.gather(1, torch.where(valid, targets_T, 0)[:, None])[:, 0]
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return torch.where(valid, chosen, 0), torch.where(valid, entropy, 0)
