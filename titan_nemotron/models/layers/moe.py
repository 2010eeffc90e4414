"""Mixture of experts with aux-loss-free balancing, an optional latent space and a shared expert.

Shapes: B rows, L positions, T = B * L tokens, D model size, L' latent size (D without one), E experts, K experts a token,
R = T * K routed rows, F expert size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.basic import Linear
from titan_nemotron.models.layers.init import Rule, constant, normal
from titan_nemotron.models.layers.mlp import MLP
from titan_nemotron.ops.experts import gather_rows, inverse_permutation, relu2_experts, sum_rows
from titan_nemotron.ops.linear import linear


class Router(nn.Module):
    """Sigmoid router: selection by score + bias, weights from the scores alone.

    s = sigmoid(x W^T) in fp32; the K largest of s + b are chosen, where with n_group > 1 only the topk_group groups with
    the largest sum of their two best s + b take part; w = s[chosen] (divided by their sum if norm_topk) * scaling.
    b (correction_bias) has no gradient: optim.update_router_biases moves it once per optimizer step.
    """

    stays_fp32 = True
    correction_bias: Tensor

    def __init__(
        self,
        size: int,
        num_experts: int,
        topk: int,
        *,
        n_group: int,
        topk_group: int,
        norm_topk: bool,
        scaling: float,
        std: float,
    ) -> None:
        super().__init__()
        self.topk, self.n_group, self.topk_group = topk, n_group, topk_group
        self.norm_topk, self.scaling = norm_topk, scaling
        self.weight = nn.Parameter(torch.empty(num_experts, size))
        self.register_buffer("correction_bias", torch.zeros(num_experts, dtype=torch.float32))
        self.initial: dict[str, Rule] = {"weight": normal(std), "correction_bias": constant(0.0)}

    def select(self, scores: Tensor) -> Tensor:
        """Indices [..., K] of the chosen experts for scores [..., E]."""
        biased = scores.detach() + self.correction_bias
        if self.n_group > 1:
            grouped = biased.unflatten(-1, (self.n_group, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.topk_group, dim=-1).indices
            allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
            biased = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
        return biased.topk(self.topk, dim=-1).indices

    def forward(
        self, x_BLD: Tensor, valid_BL: Tensor, indices_BLK: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """indices given: routing replayed. Statistics exclude padding; they are sums over each row's positions:

        counts_BE of the real (biased) routing; and, unless gradients are off, for the auxiliary loss: auxiliary_counts_BE
        of the top K without bias, score_sums_BE of the scores normalised over all experts, lengths_B1 of valid tokens.
        """
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        scores = torch.sigmoid(linear(x_BLD.to(dtype), self.weight.to(dtype)))
        indices = self.select(scores) if indices_BLK is None else indices_BLK
        weights = scores.gather(-1, indices)
        if self.norm_topk:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        mask = valid_BL[..., None].to(dtype)

        def count(chosen: Tensor) -> Tensor:
            return torch.zeros_like(scores).scatter(-1, chosen, mask.expand(chosen.shape)).sum(1)

        with torch.no_grad():
            stats = {"counts_BE": count(indices)}
        if torch.is_grad_enabled():
            with torch.no_grad():
                stats |= {
                    "auxiliary_counts_BE": count(scores.topk(self.topk, dim=-1).indices),
                    "lengths_B1": mask.sum(1),
                }
            stats["score_sums_BE"] = (scores / (scores.sum(-1, keepdim=True) + 1e-20) * mask).sum(1)
        return indices, weights * self.scaling, stats


class DispatchHandle(NamedTuple):
    """tokens_R: the token of each row sorted by expert; places_TK: the row of (token, k)."""

    tokens_R: Tensor
    places_TK: Tensor


class LocalDispatch(nn.Module):
    """Sort the chosen (token, expert) pairs by expert; all experts live on this rank.

    `send` and `receive` are the halves of a dispatch: between them rows may travel, and the layer does something else.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def send(
        self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, DispatchHandle]:
        """Rows sorted by expert, their weights, the end of each expert's rows (int32), and the way back."""
        experts_R = indices_TK.flatten()
        order_R = experts_R.argsort(stable=True)
        experts = torch.arange(self.num_experts, device=order_R.device)
        offsets_E = torch.searchsorted(experts_R.index_select(0, order_R), experts, right=True, out_int32=True)
        handle = DispatchHandle(order_R // indices_TK.shape[1], inverse_permutation(order_R).view_as(indices_TK))
        return gather_rows(x_TD, *handle), weights_TK.flatten().index_select(0, order_R), offsets_E, handle

    def receive(self, sent: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """x_RD, weights_R, offsets_E and the handle for `combine`: what `send` gave, arrived."""
        arrived: tuple[Tensor, Tensor, Tensor, Any] = sent
        return arrived

    def dispatch(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Both halves at once."""
        return self.receive(self.send(x_TD, indices_TK, weights_TK))

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        """Sum each token's K rows: a gather, not a scatter, so that the order of the sum is fixed."""
        return sum_rows(y_RD, *handle)


class Experts(nn.Module):
    """up_proj [E, F, L'], down_proj [E, L', F] of squared-ReLU experts without bias."""

    def __init__(self, num_experts: int, size: int, hidden: int, *, std: float, out_std: float) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.empty(num_experts, hidden, size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, size, hidden))
        self.initial: dict[str, Rule] = {
            "up_proj": normal(std, per_expert=True),
            "down_proj": normal(out_std, per_expert=True),
        }

    @staticmethod
    def part(weight: Tensor) -> Tensor:
        """The experts of this rank: all, unless parallelism spreads them."""
        return weight

    def forward(self, x_RD: Tensor, weights_R: Tensor, offsets_E: Tensor) -> Tensor:
        """Rows sorted by expert [R, D] -> [R, D] in x's dtype, weighted by weights_R; see ops.experts.relu2_experts."""
        up, down = (self.part(weight).to(x_RD.dtype) for weight in (self.up_proj, self.down_proj))
        return relu2_experts(x_RD, up, down, weights_R, offsets_E)


class MoE(nn.Module):
    """fc2(sum_k w_k expert_k(fc1(x))) + shared(x); fc1 and fc2 are the latent projections, if any."""

    def __init__(
        self,
        size: int,
        *,
        num_experts: int,
        topk: int,
        hidden: int,
        shared_hidden: int,
        latent: int,
        n_group: int,
        topk_group: int,
        norm_topk: bool,
        scaling: float,
        bias: bool,
        std: float,
        out_std: float,
    ) -> None:
        super().__init__()
        self.router = Router(
            size,
            num_experts,
            topk,
            n_group=n_group,
            topk_group=topk_group,
            norm_topk=norm_topk,
            scaling=scaling,
            std=std,
        )
        self.dispatcher = LocalDispatch(num_experts)
        self.experts = Experts(num_experts, latent or size, hidden, std=std, out_std=out_std)
        self.fc1_latent_proj = Linear(size, latent, bias=bias, std=std) if latent else None
        self.fc2_latent_proj = Linear(latent, size, bias=bias, std=out_std) if latent else None
        self.shared_expert = MLP(size, shared_hidden, bias=bias, std=std, out_std=out_std) if shared_hidden else None

    def sequence_sum(self, stats_BE: Tensor) -> Tensor:
        """Sum a row's statistics over the ranks that share the row: nothing to do when rows are whole."""
        return stats_BE

    def forward(
        self, x_BLD: Tensor, layout: DocumentLayout, cache: None = None, indices: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """stats: counts_E, indices_BLK and, unless gradients are off, auxiliary_sum (over rows, without coefficient)."""
        indices_BLK, weights_BLK, sums = self.router(x_BLD, layout.valid, indices)
        u_BLD = x_BLD if self.fc1_latent_proj is None else self.fc1_latent_proj(x_BLD)
        sent = self.dispatcher.send(u_BLD.flatten(0, 1), indices_BLK.flatten(0, 1), weights_BLK.flatten(0, 1))
        shared_BLD = None if self.shared_expert is None else self.shared_expert(x_BLD)  # while rows may travel
        x_RD, weights_R, offsets_E, handle = self.dispatcher.receive(sent)
        out = self.dispatcher.combine(self.experts(x_RD, weights_R, offsets_E), handle).unflatten(0, x_BLD.shape[:2])
        if self.fc2_latent_proj is not None:
            out = self.fc2_latent_proj(out)
        if shared_BLD is not None:
            out = out + shared_BLD
        stats = {"counts_E": sums["counts_BE"].sum(0), "indices_BLK": indices_BLK}
        if "score_sums_BE" in sums:
            stats["auxiliary_sum"] = self.sequence_auxiliary_loss(sums).sum()
        return out, stats

    def sequence_auxiliary_loss(self, sums: dict[str, Tensor]) -> Tensor:
        """E / (K T^2) sum_e count_e sum_t p_te for each row [B]; counts without bias, p normalised over all experts."""
        counts, scores, lengths = (
            self.sequence_sum(sums[name]) for name in ("auxiliary_counts_BE", "score_sums_BE", "lengths_B1")
        )
        scale = counts.shape[-1] / (self.router.topk * lengths.clamp(min=1).squeeze(-1) ** 2)
        return scale * (counts * scores).sum(-1)
