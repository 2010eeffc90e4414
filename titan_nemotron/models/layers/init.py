"""Initial weights as a function of (seed, parameter name, expert, row block) alone.

Every block of ROW_BLOCK rows has a generator of its own, so any shard of a parameter is filled without drawing the rest:
the weights are bitwise the same on every mesh, and a rank never builds a full expert tensor.
"""

import hashlib
import math
from collections.abc import Callable, Container, Sequence
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
    """Every element is `value`."""
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


WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def tensors_by_name(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Full name, without the names of wrappers -> the module that owns the parameter or buffer, and its name there."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for prefix, module in model.named_modules():
        for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            full = f"{prefix}.{name}" if prefix else name
            for wrapper in WRAPPERS:
                full = full.replace(wrapper, "")
            found[full] = module, name
    return found


def rule_of(module: nn.Module, name: str) -> Rule:
    """The rule that a module states, in its attribute `initial`, for a parameter or buffer it owns.

    Buffers that are not saved need one too: a model built on the meta device has no other way to get them.
    """
    initial: dict[str, Rule] = getattr(module, "initial", {})
    if name not in initial:
        raise TypeError(
            f"{type(module).__name__} states no initial value of {name}; give it initial = {{{name!r}: rule}}"
        )
    return initial[name]


LocalPart = Callable[[Tensor], tuple[Tensor, tuple[int, ...]]]
"""What this process holds of a tensor, as a plain tensor to write to, and where that starts in the whole."""


def unsharded(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The LocalPart of tensors that are not sharded; parallel.sharded.local_part knows both kinds."""
    return tensor.detach(), (0,) * tensor.dim()


def initialize(
    model: nn.Module, seed: int, names: Container[str] | None = None, *, local_part: LocalPart = unsharded
) -> None:
    """Fill a materialised model in place; names: only these parameters and buffers (all by default).

    local_part: for a sharded model, what this rank holds; every mesh gives the same values. Raises TypeError for a
    parameter or buffer whose module states no rule.
    """
    for full, (module, name) in tensors_by_name(model).items():
        rule = rule_of(module, name)
        if names is None or full in names:
            tensor = getattr(module, name)
            local, offsets = local_part(tensor)
            initialize_(local, rule, seed=seed, name=full, shape=tensor.shape, offsets=offsets)
