"""Initial weights as a function of (seed, parameter name, expert, row block) alone.

Every block of ROW_BLOCK rows has a generator of its own, so any shard of a parameter is filled without drawing the rest:
the weights are bitwise the same on every mesh, and a rank never builds a full expert tensor.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ROW_BLOCK = 256


@dataclass(frozen=True)
class Rule:
    """How one parameter or buffer starts: `fill(tensor, generator)` writes fp32 values in place.

    per_expert: dim 0 counts experts, and each expert's matrix is drawn as a parameter of its own.
    """

    fill: Callable[[Tensor, torch.Generator], object]
    per_expert: bool = False


def normal(std: float, per_expert: bool = False) -> Rule:
    """N(0, std^2)."""
    return Rule(lambda tensor, generator: tensor.normal_(0.0, std, generator=generator), per_expert)


def constant(value: float) -> Rule:
    return Rule(lambda tensor, generator: tensor.fill_(value))


def uniform(bound: float) -> Rule:
    """U(-bound, bound); a convolution's kaiming_uniform(a=sqrt(5)) has bound 1 / sqrt(fan in)."""
    return Rule(lambda tensor, generator: tensor.uniform_(-bound, bound, generator=generator))


def log_uniform_decay(low: float = 1.0, high: float = 16.0) -> Rule:
    """A_log = log a, a ~ U(low, high), as Megatron-LM starts Mamba-2's decay."""
    return Rule(lambda tensor, generator: tensor.uniform_(low, high, generator=generator).log_())


def time_step_bias(low: float, high: float, floor: float) -> Rule:
    """The bias whose softplus is d = max(exp U(ln low, ln high), floor):  d + log(1 - exp(-d))."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        d = tensor.uniform_(math.log(low), math.log(high), generator=generator).exp_().clamp_(min=floor)
        tensor.copy_(d + torch.log(-torch.expm1(-d)))

    return Rule(fill)


def _generator(device: torch.device, *key: object) -> torch.Generator:
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def initialize_(
    local: Tensor, rule: Rule, *, seed: int, name: str, shape: Sequence[int], offsets: Sequence[int]
) -> None:
    """Fill `local`, the part of a parameter of global `shape` that starts at `offsets`, in place."""
    if local.numel() == 0:
        return
    if rule.per_expert:
        for index, matrix in enumerate(local):
            expert = offsets[0] + index
            _fill_rows(matrix, rule, (seed, name, expert), shape[1:], offsets[1:])
    else:
        _fill_rows(local, rule, (seed, name, 0), shape, offsets)


def _fill_rows(
    local: Tensor, rule: Rule, key: tuple[object, ...], shape: Sequence[int], offsets: Sequence[int]
) -> None:
    start, stop = offsets[0], offsets[0] + local.shape[0]
    rest = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], local.shape[1:], strict=True))
    for block in range(start // ROW_BLOCK, -(-stop // ROW_BLOCK)):
        first, last = block * ROW_BLOCK, min((block + 1) * ROW_BLOCK, shape[0])
        values = torch.empty(last - first, *shape[1:], dtype=torch.float32, device=local.device)
        rule.fill(values, _generator(local.device, *key, block))
        low, high = max(first, start), min(last, stop)
        local[low - start : high - start].copy_(values[(slice(low - first, high - first), *rest)])


def rules(model: nn.Module) -> dict[str, Rule]:
    """The rule of every parameter and persistent buffer, by full name.

    A module states the rules of the tensors it owns in its attribute `initial`, name -> Rule.
    """
    found: dict[str, Rule] = {}
    persistent = set(model.state_dict(keep_vars=True))
    for prefix, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, _ in own:
            full = f"{prefix}.{name}" if prefix else name
            if full not in persistent:
                continue
            initial: dict[str, Rule] = getattr(module, "initial", {})
            if name not in initial:
                raise TypeError(
                    f"{full}: {type(module).__name__} states no initial value; give it initial = {{{name!r}: rule}}"
                )
            found[full] = initial[name]
    return found


def initialize(model: nn.Module, seed: int) -> None:
    """Fill an unsharded model in place; sharded models are filled by parallel.apply through initialize_."""
    tensors = model.state_dict(keep_vars=True)
    for name, rule in rules(model).items():
        tensor = tensors[name]
        initialize_(tensor, rule, seed=seed, name=name, shape=tensor.shape, offsets=[0] * tensor.dim())
