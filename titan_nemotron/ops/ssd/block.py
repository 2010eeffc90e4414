"""The mathematics of the chunked scan, for a few rows and groups at a time.

Inside a chunk, y_t = sum_{s <= t} (C_t . B_s) exp(a_{s+1} + ... + a_t) d_s x_s, with a = d A, is a masked product;
between chunks one state is handed on. C B^T is shared by the heads of a group, and the heads of a group share one
product with B or C wherever the decay can be moved to x or y.

Shapes: B rows, L positions (whole chunks), H heads, P channels of a head, G groups, R heads of a group, J = R P, N state
size; c chunks of Q positions; b, g, h: rows, groups and heads of the block; K = c b g.
Inside a block the layout is [c, b, g, Q, R, P]: chunks first, so that the states before, or after, all chunks are views.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """A block: which rows, groups and heads, and the length of a chunk."""

    rows: slice
    groups: slice
    heads: slice
    chunk: int

    def by_group(self, tensor_BLGx: Tensor) -> Tensor:
        """[B, L, G, ...] -> [c, b, g, Q, ...], a view."""
        return tensor_BLGx[self.rows, :, self.groups].unflatten(1, (-1, self.chunk)).transpose(0, 1).transpose(2, 3)

    def by_head(self, tensor_BLHx: Tensor) -> Tensor:
        """[B, L, H, ...] -> [c, b, g, Q, R, ...], a view."""
        grouped = tensor_BLHx[self.rows, :, self.heads].unflatten(2, (self.groups.stop - self.groups.start, -1))
        return grouped.unflatten(1, (-1, self.chunk)).transpose(0, 1).transpose(2, 3)


@dataclass(frozen=True)
class Decays:
    """Of all rows and heads. s_t is the sum of a up to and with t, from the chunk's or the document's start.

    Sums are taken in fp64 and rounded to s. What rounding drops from s_t and s_s goes, as a factor, to y_t and x_s, so
    that small differences of large sums keep their digits.
    """

    s_BLH: Tensor
    kept_BLH: Tensor
    """exp(-dropped)."""
    to_end_BLH: Tensor
    """The decay behind t up to the chunk's end; 0 before a restart."""
    through_BcH: Tensor
    """The decay of a whole chunk."""
    sees_BcQQ: Tensor
    """1 where position t (row) sees s (column): s <= t in one document; else 0."""
    x_inside_BLH: Tensor
    """Factor of x_s for what sees it in its chunk: d_s exp(-dropped)."""
    x_leaving_BLH: Tensor
    """Factor of x_s in the state at the chunk's end: d_s times the decay."""
    y_inside_BLH: Tensor
    """Factor of y_t for what it sees in its chunk: exp(dropped); 0 at padding."""
    y_entering_BLH: Tensor
    """Factor of y_t for the state at the chunk's start: the decay up to and with t; 0 behind a restart, at padding."""
    skip_BLH: Tensor
    """D; 0 at padding."""

    @classmethod
    def build(
        cls, d_BLH: Tensor, A_H: Tensor, D_H: Tensor, valid_BL: Tensor, segments_BL: Tensor, chunk: int
    ) -> "Decays":
        """From time steps d [B, L, H], A and D [H], valid [B, L] bool, segments [B, L] int; chunk divides L.

        a_t = d_t A_h, bounded below by -200. The fields are fp32.
        """
        segment, valid = segments_BL.unflatten(1, (-1, chunk)), valid_BL[..., None]
        before = torch.cat([torch.zeros_like(segment[:, :1, -1]), segment[:, :-1, -1]], dim=1)
        sees = (segment[..., :, None] == segment[..., None, :]).tril_()
        # exp(-200) is 0 in fp32 already; without the bound, what rounding drops from a huge sum has no exponential.
        a_BLH = (d_BLH.double() * A_H.double()).clamp_min_(-200)
        s64 = sees.double() @ a_BLH.unflatten(1, (-1, chunk))
        s = s64.float()
        from_start = s.exp().mul_((segment == before[..., None])[..., None])
        to_end = (s64[:, :, -1:] - s64).float().clamp_max_(0).exp_().mul_((segment == segment[..., -1:])[..., None])
        dropped, to_end = (s64 - s).float().flatten(1, 2), to_end.flatten(1, 2)
        kept = torch.exp(-dropped)
        return cls(
            s_BLH=s.flatten(1, 2),
            kept_BLH=kept,
            to_end_BLH=to_end,
            through_BcH=from_start[:, :, -1],
            sees_BcQQ=sees.float(),
            x_inside_BLH=d_BLH * kept,
            x_leaving_BLH=d_BLH * to_end,
            y_inside_BLH=torch.exp(dropped) * valid,
            y_entering_BLH=from_start.flatten(1, 2) * valid,
            skip_BLH=D_H.float() * valid,
        )


@dataclass(frozen=True)
class Gradients:
    """What a backward writes, block by block, in fp32 (`ending` in fp64).

    The gradient of the decay a_u is a sum over the paths that cross u, from s < u to t >= u; below, P and N are summed.
    """

    dx_BLHP: Tensor
    dB_BLGN: Tensor
    dC_BLGN: Tensor
    dinitial_state_BHPN: Tensor
    x_inside_BLH: Tensor
    """Gradient of the factor of x of the same name."""
    x_leaving_BLH: Tensor
    """Likewise."""
    skip_BLH: Tensor
    """Likewise; also at padding, where it does not count."""
    ending_BLH: Tensor
    """Paths inside a chunk that end at a position, less those that start there."""
    entering_BLH: Tensor
    """Paths from before the chunk that end at a position."""
    passing_BcH: Tensor
    """Paths through a whole chunk."""


class Block:
    """The inputs of one block, chunked, and what both passes derive from them."""

    def __init__(self, cut: Cut, decays: Decays, x_BLHP: Tensor, B_BLGN: Tensor, C_BLGN: Tensor) -> None:
        self.cut, self.decays = cut, decays
        self.x = cut.by_head(x_BLHP)
        self.shape = self.x.shape
        self.s, self.y_inside, self.y_entering, self.skip = (
            cut.by_head(tensor)[..., None]
            for tensor in (decays.s_BLH, decays.y_inside_BLH, decays.y_entering_BLH, decays.skip_BLH)
        )
        self.through = decays.through_BcH[cut.rows, :, cut.heads].transpose(0, 1)[..., None, None]  # [c, b, h, 1, 1]
        self.sees = decays.sees_BcQQ[cut.rows].transpose(0, 1).unsqueeze(2)  # [c, b, 1, Q, Q]
        self.B, self.C = (cut.by_group(tensor).float().flatten(0, 2) for tensor in (B_BLGN, C_BLGN))  # [K, Q, N]
        self.x_inside_factor, self.x_leaving_factor = (
            cut.by_head(tensor)[..., None] for tensor in (decays.x_inside_BLH, decays.x_leaving_BLH)
        )
        self.x_inside, self.x_leaving = (
            self.scaled(self.x, factor) for factor in (self.x_inside_factor, self.x_leaving_factor)
        )

    @staticmethod
    def scaled(tensor: Tensor, factor: Tensor) -> Tensor:
        """[c, b, g, Q, R, P] times [c, b, g, Q, R, 1], fp32 and contiguous."""
        out = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        return torch.mul(tensor, factor, out=out)

    @staticmethod
    def matrices(tensor: Tensor) -> Tensor:
        """[c, b, g, Q, R, P] -> [K, Q, J]: the heads of a group side by side."""
        return tensor.flatten(4).flatten(0, 2)

    def state_matrices(self, states: Tensor) -> Tensor:
        """[c, b, h, P, N] -> [K, J, N]."""
        return states.view(-1, self.shape[4] * self.shape[5], states.shape[-1])

    def masked(self, scores_KQQ: Tensor) -> Tensor:
        """scores [K, Q, Q], in place, with 0 where row t does not see column s."""
        return scores_KQQ.view(*self.shape[:4], -1).mul_(self.sees).flatten(0, 2)

    def inner_decay(self, head: int) -> Tensor:
        """exp(s_t - s_s) of each group's head number `head`: [K, Q, Q]; 1 where s > t, which masked scores cancel."""
        s = self.s[..., head, 0].flatten(0, 2)
        return (s[:, :, None] - s[:, None, :]).clamp_max_(0).exp_()

    def chain(self, inputs: Tensor, keys_KQN: Tensor, edge_bhPN: Tensor | None, reverse: bool) -> Tensor:
        """States at the borders of all chunks, [c + 1, b, h, P, N]: each chunk adds inputs^T keys to what passes it.

        edge: the state at the first border, or in reverse at the last.
        """
        num_chunks, num_rows, num_groups, _, heads_per_group, channels = self.shape
        num_heads, state_size = num_groups * heads_per_group, keys_KQN.shape[-1]
        states = inputs.new_empty(num_chunks + 1, num_rows, num_heads, channels, state_size)
        added, edge = (states[:-1], states[-1]) if reverse else (states[1:], states[0])
        edge.copy_(edge_bhPN) if edge_bhPN is not None else edge.zero_()
        torch.bmm(self.matrices(inputs).mT, keys_KQN, out=self.state_matrices(added))
        for chunk in reversed(range(num_chunks)) if reverse else range(num_chunks):
            source, target = (chunk + 1, chunk) if reverse else (chunk, chunk + 1)
            states[target].addcmul_(states[source], self.through[chunk])
        return states

    def forward(self, initial_state_bhPN: Tensor | None, y_BLHP: Tensor) -> Tensor:
        """Writes this block of y, fp32; returns the final state [b, h, P, N]."""
        states = self.chain(self.x_leaving, self.B, initial_state_bhPN, reverse=False)
        y = torch.bmm(self.C, self.state_matrices(states[:-1]).mT).view(self.shape).mul_(self.y_entering)
        scores = self.masked(torch.bmm(self.C, self.B.mT))
        for head in range(self.shape[4]):
            inside = torch.bmm(self.inner_decay(head).mul_(scores), self.x_inside[..., head, :].flatten(0, 2))
            y[..., head, :].addcmul_(inside.view(*self.shape[:4], -1), self.y_inside[..., head, :])
        torch.addcmul(y, self.x, self.skip, out=self.cut.by_head(y_BLHP))
        return states[-1]

    def backward(
        self, dy_BLHP: Tensor, initial_state_bhPN: Tensor | None, dfinal_state_bhPN: Tensor, grads: Gradients
    ) -> None:
        """Writes this block of every gradient."""
        cut, dy = self.cut, self.cut.by_head(dy_BLHP)
        dy_inside, dy_entering = self.scaled(dy, self.y_inside), self.scaled(dy, self.y_entering)
        # inside the chunks
        scores = self.masked(torch.bmm(self.C, self.B.mT))
        below = scores.tril(-1)  # the diagonal does not depend on the decay
        dscores = torch.zeros_like(scores)
        dinside = torch.empty_like(dy_inside)
        ending = cut.by_head(grads.ending_BLH)
        for head in range(self.shape[4]):
            decay = self.inner_decay(head)
            dy_head, x_head = (tensor[..., head, :].flatten(0, 2) for tensor in (dy_inside, self.x_inside))
            dinside[..., head, :] = torch.bmm((decay * scores).mT, dy_head).view(*self.shape[:4], -1)
            dweights = torch.bmm(dy_head, x_head.mT).mul_(decay)
            dscores.add_(dweights)
            exact = dweights.mul_(below).double()  # what starts and what ends cancels in sums over paths
            ending[..., head] = (exact.sum(2) - exact.sum(1)).view(self.shape[:4])
        self.masked(dscores)
        # between the chunks
        states = self.chain(self.x_leaving, self.B, initial_state_bhPN, reverse=False)
        dstates = self.chain(dy_entering, self.C, dfinal_state_bhPN, reverse=True)
        dafter = self.state_matrices(dstates[1:])
        dB = torch.bmm(dscores.mT, self.C).baddbmm_(self.matrices(self.x_leaving), dafter)
        dC, entering = torch.bmm(dscores, self.B), cut.by_head(grads.entering_BLH)
        for head, states_head in enumerate(states[:-1].unflatten(2, (-1, self.shape[4])).unbind(3)):
            dC_head = torch.bmm(dy_entering[..., head, :].flatten(0, 2), states_head.flatten(0, 2))
            dC.add_(dC_head)
            # by head, because what ends at a position is its C times the gradient of C that the states give
            entering[..., head] = dC_head.mul_(self.C).sum(-1).view(self.shape[:4])
        cut.by_group(grads.dB_BLGN).copy_(dB.view(*self.shape[:4], -1))
        cut.by_group(grads.dC_BLGN).copy_(dC.view(*self.shape[:4], -1))
        # what is no longer needed gives its memory: states here, dinside below
        passing = self.through[..., 0, 0] * states[:-1].mul_(dstates[1:]).sum((-1, -2))
        grads.passing_BcH[cut.rows, :, cut.heads] = passing.transpose(0, 1)
        grads.dinitial_state_BHPN[cut.rows, cut.heads] = dstates[0]
        # x
        dleaving = torch.bmm(self.B, dafter.mT).view(self.shape)
        dx = torch.mul(dinside, self.x_inside_factor, out=cut.by_head(grads.dx_BLHP))
        dx.addcmul_(dleaving, self.x_leaving_factor).addcmul_(dy, self.skip)
        torch.sum(dinside.mul_(self.x), -1, out=cut.by_head(grads.x_inside_BLH))
        torch.sum(dleaving.mul_(self.x), -1, out=cut.by_head(grads.x_leaving_BLH))
        torch.sum(torch.mul(dy, self.x, out=dinside), -1, out=cut.by_head(grads.skip_BLH))
