"""Which method splits the rows of which layers: as `[parallel.context_method]` says, or what costs least."""

from typing import NamedTuple

import torch
from torch import nn

from titan_nemotron.errors import UserError
from titan_nemotron.models.layers.attention import Attention
from titan_nemotron.models.layers.mamba2 import Mamba2
from titan_nemotron.parallel.config import ContextMethodConfig
from titan_nemotron.parallel.context.cost import (
    DEVICES,
    AttentionSize,
    Cost,
    MambaSize,
    Rates,
    Rows,
    attention_costs,
    mamba_costs,
)
from titan_nemotron.parallel.context.possible import heads_of, why_not


class Choice(NamedTuple):
    """What splits the layers of one kind and size.

    layers  their names; size  of each
    costs   of a layer, by method; reasons  why methods among them are impossible
    method  the one to take
    """

    layers: list[str]
    size: AttentionSize | MambaSize
    costs: dict[str, Cost]
    reasons: dict[str, str]
    method: str


class ContextPlan(NamedTuple):
    """The choices for a model, and what they compare: the rows, the rates, and whose those are."""

    choices: list[Choice]
    rows: Rows
    rates: Rates
    device: str

    @property
    def methods(self) -> dict[str, str]:
        """By name of layer."""
        return {name: choice.method for choice in self.choices for name in choice.layers}

    def describe(self) -> list[str]:
        """The decision with its numbers, a table within 80 columns."""
        rows, rates = self.rows, self.rates
        documents = f"documents of {rows.document_length:,} tokens" if rows.document_length else "one document a row"
        lines = [
            f"context: parts of {-(-rows.length // rows.degree):,} of {rows.length:,} tokens, {documents}; {self.device}: "
            f"{rates.link / 1e9:g} GB/s, {rates.compute / 1e12:g} TFLOP/s, {rates.latency * 1e6:g} us",
            f"  {'layers':14s} {'method':10s} {'MB in':>9s} {'MB back':>9s} {'GFLOP':>10s} {'waits':>6s} {'ms':>10s}",
        ]
        for choice in self.choices:
            kind = "attention" if isinstance(choice.size, AttentionSize) else "mamba"
            label = f"{len(choice.layers)} {kind}"
            for method, cost in choice.costs.items():
                mark = " *" if method == choice.method else ""
                numbers = f"impossible: {choice.reasons.get(method)}"
                if method not in choice.reasons:
                    received, returned = cost.received / 1e6, cost.received * cost.returned / 1e6
                    numbers = (
                        f"{received:9,.3f} {returned:9,.3f} {cost.flops / 1e9:10,.3f} {cost.waiting:5.2f}x "
                        f"{cost.seconds(rates) * 1e3:10,.3f}"
                    )
                lines.append(f"  {label:14s} {method + mark:10s} {numbers}")
                label = ""
        return [*lines, "  * is taken; of a layer and rank, forward and backward"]


def choose(model: nn.Module, rows: Rows, config: ContextMethodConfig, device_type: str) -> ContextPlan:
    """A choice for each kind and size of layer, in the order of the layers; the same on all ranks.

    Called before weights are sharded and rows are split. Raises UserError for a method that the configuration names and a
    layer's heads do not allow.
    """
    found: dict[AttentionSize | MambaSize, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention | Mamba2):
            found.setdefault(size_of(module), {})[name] = module
    device, rates = rates_of(config, device_type)
    choices = [_choice(layers, size, rows, config, rates) for size, layers in found.items()]
    return ContextPlan(choices, rows, rates, device)


def _choice(
    layers: dict[str, nn.Module],
    size: AttentionSize | MambaSize,
    rows: Rows,
    config: ContextMethodConfig,
    rates: Rates,
) -> Choice:
    kind, costs = ("attention", attention_costs) if isinstance(size, AttentionSize) else ("mamba", mamba_costs)
    by_method = costs(size, rows)  # type: ignore[arg-type]
    name, layer = next(iter(layers.items()))
    reasons = {method: reason for method in by_method if (reason := why_not(layer, method, rows.degree))}
    wanted = getattr(config, kind)
    if wanted in reasons:
        raise UserError(
            f'parallel.context_method.{kind} = "{wanted}": with parallel.context = {rows.degree}: {name}: {reasons[wanted]}'
        )
    possible = [method for method in by_method if method not in reasons]
    cheapest = min(possible, key=lambda method: by_method[method].seconds(rates))
    method = cheapest if wanted == "auto" else wanted
    return Choice(list(layers), size, by_method, reasons, method)


def size_of(module: nn.Module) -> AttentionSize | MambaSize:
    """Sizes of a layer whose weights are whole."""
    heads, shared = heads_of(module)
    if isinstance(module, Mamba2):
        mix = module.mix
        return MambaSize(heads, mix.head_size, shared, mix.state_size, taps=module.conv1d.weight.shape[-1])
    assert isinstance(module, Attention), type(module)
    return AttentionSize(heads, shared, module.head_size, module.head_size)


def rates_of(config: ContextMethodConfig, device_type: str) -> tuple[str, Rates]:
    """The name of the device whose rates are taken, and these, with those that the configuration gives."""
    name = config.device if config.device != "auto" else _device_name(device_type)
    link, compute, latency = DEVICES[name]
    return name, Rates(
        link=config.link_gigabytes * 1e9 or link,
        compute=config.compute_teraflops * 1e12 or compute,
        latency=config.latency_microseconds * 1e-6 or latency,
    )


def _device_name(device_type: str) -> str:
    if device_type == "cpu":
        return "gloo"
    name = torch.cuda.get_device_name().lower()
    return next((known for known in ("gb200", "h200") if known in name), "h100")
