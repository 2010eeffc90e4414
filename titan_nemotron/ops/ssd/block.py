"""The mathematics of the chunked scan, for a few rows and groups at a time.

Inside a chunk, y_t = sum_{s <= t} (C_t . B_s) exp(a_{s+1} + ... + a_t) d_s x_s, with a = d A, is a masked product;
between chunks one state is handed on. C B^T is shared by the heads of a group, and the heads of a group share one
product with B or C wherever the decay can be moved to x or y.

Shapes: B rows, L positions (whole chunks), H heads, P channels of a head, G groups, R heads of a group, J = R P, N state
size; c chunks of Q positions; b, g, h: rows, groups and heads of the block; K = c b g.
Inside a block the layout is [c, b, g, Q, R, P]: chunks first, so that the states before, or after, all chunks are views.
"""

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


class Decays(NamedTuple):
    """Of all rows and heads. s_t is the sum of a up to and with t, from the chunk's or the document's start."""

    d_BLH: Tensor
    s_BLH: Tensor
    s_rest_BLH: Tensor
    """What s has in fp64 over fp32, so that small differences of large sums keep their digits."""
    from_start_BLH: Tensor
    """The decay from the chunk's start up to and with t; 0 behind a restart."""
    to_end_BLH: Tensor
    """The decay behind t up to the chunk's end; 0 before a restart."""
    through_BcH: Tensor
    """The decay of a whole chunk."""
    sees_BcQQ: Tensor
    """1 where position t (row) sees s (column): s <= t in one document; else 0."""

    @classmethod
    def build(cls, d_BLH: Tensor, A_H: Tensor, segments_BL: Tensor, chunk: int) -> "Decays":
        segment = segments_BL.unflatten(1, (-1, chunk))
        before = torch.cat([torch.zeros_like(segment[:, :1, -1]), segment[:, :-1, -1]], dim=1)
        sees = (segment[..., :, None] == segment[..., None, :]).tril_()
        s64 = sees.double() @ (d_BLH.double() * A_H.double()).unflatten(1, (-1, chunk))
        s = s64.float()
        from_start = s.exp().mul_((segment == before[..., None])[..., None])
        to_end = (s64[:, :, -1:] - s64).float().clamp_max_(0).exp_().mul_((segment == segment[..., -1:])[..., None])
        rest = (s64 - s).float()
        positions = (tensor.flatten(1, 2) for tensor in (s, rest, from_start, to_end))
        return cls(d_BLH, *positions, from_start[:, :, -1], sees.float())


class Block:
    """One block's inputs, chunked: X = d x, and what both passes derive from them."""

    def __init__(self, cut: Cut, decays: Decays, x_BLHP: Tensor, B_BLGN: Tensor, C_BLGN: Tensor) -> None:
        self.x = cut.by_head(x_BLHP)
        self.B, self.C = (cut.by_group(tensor).float().flatten(0, 2) for tensor in (B_BLGN, C_BLGN))  # [K, Q, N]
        self.d, self.s, self.s_rest, self.from_start, self.to_end = (cut.by_head(tensor) for tensor in decays[:5])
        self.through = decays.through_BcH[cut.rows, :, cut.heads].transpose(0, 1)[..., None, None]  # [c, b, h, 1, 1]
        self.sees = decays.sees_BcQQ[cut.rows].transpose(0, 1).unsqueeze(2)  # [c, b, 1, Q, Q]
        self.X = self.scaled(self.x, self.d)
        self.X_to_end = self.scaled(self.X, self.to_end)
        self.shape = self.X.shape

    @staticmethod
    def scaled(tensor: Tensor, factor: Tensor) -> Tensor:
        """[c, b, g, Q, R, P] times a factor for each position and head, fp32 and contiguous."""
        out = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        return torch.mul(tensor, factor[..., None], out=out)

    @staticmethod
    def matrices(tensor: Tensor) -> Tensor:
        """[c, b, g, Q, R, P] -> [K, Q, J]: the heads of a group side by side."""
        return tensor.flatten(4).flatten(0, 2)

    def masked(self, scores_KQQ: Tensor) -> Tensor:
        return scores_KQQ.view(*self.shape[:4], -1).mul_(self.sees).flatten(0, 2)

    def inner_decay(self, head: int) -> Tensor:
        """exp(s_t - s_s) of each group's head number `head`: [K, Q, Q]; 1 where s > t, which masked scores cancel."""
        s, rest = (tensor[..., head].flatten(0, 2) for tensor in (self.s, self.s_rest))
        decay = s[:, :, None] - s[:, None, :]
        return decay.add_(rest[:, :, None]).sub_(rest[:, None, :]).clamp_max_(0).exp_()

    def chain(self, inputs_KQJ: Tensor, keys_KQN: Tensor, edge_bhPN: Tensor | None, reverse: bool) -> Tensor:
        """States at the borders of all chunks, [c + 1, b, h, P, N]: what a chunk adds is inputs^T keys.

        edge: the state at the first border, or in reverse at the last.
        """
        num_chunks, num_rows, num_groups, _, heads_per_group, channels = self.shape
        num_heads, state_size = num_groups * heads_per_group, keys_KQN.shape[-1]
        states = inputs_KQJ.new_empty(num_chunks + 1, num_rows, num_heads, channels, state_size)
        added, edge = (states[:-1], states[-1]) if reverse else (states[1:], states[0])
        edge.copy_(edge_bhPN) if edge_bhPN is not None else edge.zero_()
        torch.bmm(inputs_KQJ.mT, keys_KQN, out=self.state_matrices(added))
        for chunk in reversed(range(num_chunks)) if reverse else range(num_chunks):
            source, target = (chunk + 1, chunk) if reverse else (chunk, chunk + 1)
            states[target].addcmul_(states[source], self.through[chunk])
        return states

    def state_matrices(self, states: Tensor) -> Tensor:
        """[c, b, h, P, N] -> [K, J, N]."""
        return states.view(-1, self.shape[4] * self.shape[5], states.shape[-1])

    def forward(self, D_h: Tensor, initial_state_bhPN: Tensor | None) -> tuple[Tensor, Tensor]:
        """y [c, b, g, Q, R, P] and the final state [b, h, P, N]; padding is not masked."""
        states = self.chain(self.matrices(self.X_to_end), self.B, initial_state_bhPN, reverse=False)
        y = torch.bmm(self.C, self.state_matrices(states[:-1]).mT).view(self.shape).mul_(self.from_start[..., None])
        scores = self.masked(torch.bmm(self.C, self.B.mT))
        for head in range(self.shape[4]):
            inner = torch.bmm(self.inner_decay(head).mul_(scores), self.X[..., head, :].flatten(0, 2))
            y[..., head, :].add_(inner.view(*self.shape[:4], -1))
        return y.addcmul_(self.x, D_h.float().view(self.shape[2], 1, self.shape[4], 1)), states[-1]

    def backward(
        self, dy: Tensor, D_h: Tensor, initial_state_bhPN: Tensor | None, dfinal_state_bhPN: Tensor
    ) -> "Gradients":
        """dy [c, b, g, Q, R, P], 0 at padding."""
        dY = dy.float().contiguous()
        dY_from_start = self.scaled(dY, self.from_start)
        dX, ending = torch.empty_like(dY), dY.new_empty(self.shape[:5], dtype=torch.float64)
        scores = self.masked(torch.bmm(self.C, self.B.mT))
        below = scores.tril(-1)  # the diagonal does not depend on the decay
        dscores = torch.zeros_like(scores)
        for head in range(self.shape[4]):
            decay = self.inner_decay(head)
            dY_head, X_head = (tensor[..., head, :].flatten(0, 2) for tensor in (dY, self.X))
            dX[..., head, :] = torch.bmm((decay * scores).mT, dY_head).view(*self.shape[:4], -1)
            dweights = torch.bmm(dY_head, X_head.mT).mul_(decay)
            dscores.add_(dweights)
            dweights.mul_(below)
            exact = dweights.double()  # what ends and what starts cancels in the sum over paths
            ending[..., head] = (exact.sum(2) - exact.sum(1)).view(self.shape[:4])
        self.masked(dscores)
        states = self.chain(self.matrices(self.X_to_end), self.B, initial_state_bhPN, reverse=False)
        dstates = self.chain(self.matrices(dY_from_start), self.C, dfinal_state_bhPN, reverse=True)
        before, dafter = self.state_matrices(states[:-1]), self.state_matrices(dstates[1:])
        dB = torch.bmm(dscores.mT, self.C).baddbmm_(self.matrices(self.X_to_end), dafter)
        dC = torch.bmm(dscores, self.B).baddbmm_(self.matrices(dY_from_start), before)
        ending += torch.bmm(self.C, before.mT).view(self.shape).mul_(dY_from_start).sum(-1)
        dX_leaving = torch.bmm(self.B, dafter.mT).view(self.shape).mul_(self.to_end[..., None])
        leaving = (dX_leaving * self.X).sum(-1)
        dX += dX_leaving
        D = D_h.float().view(self.shape[2], 1, self.shape[4], 1)
        return Gradients(
            dx=self.scaled(dX, self.d).addcmul_(dY, D),
            dd=(dX * self.x).sum(-1),
            ending=ending,
            leaving=leaving,
            passing=self.through[..., 0, 0] * (states[:-1] * dstates[1:]).sum((-1, -2)),
            dB=dB.view(*self.shape[:4], -1),
            dC=dC.view(*self.shape[:4], -1),
            dD=(dY * self.x).sum((0, 1, 3, 5)).flatten(),
            dinitial_state=dstates[0],
        )


class Gradients(NamedTuple):
    """Of one block. The gradient of a_u is a sum over the paths that cross u: from s < u to t >= u."""

    dx: Tensor
    """[c, b, g, Q, R, P]"""
    dd: Tensor
    """[c, b, g, Q, R], through X = d x alone."""
    ending: Tensor
    """[c, b, g, Q, R]: paths that end at a position, less those that start there and stay in the chunk."""
    leaving: Tensor
    """[c, b, g, Q, R]: paths that start at a position and leave the chunk."""
    passing: Tensor
    """[c, b, h]: paths through the whole chunk."""
    dB: Tensor
    dC: Tensor
    """[c, b, g, Q, N]"""
    dD: Tensor
    """[h]"""
    dinitial_state: Tensor
    """[b, h, P, N]"""
