"""Operations that autograd, compilation and recomputation see as one."""

from collections.abc import Callable
from typing import Any

import torch


def opaque(schema: str, kernel: Callable[..., Any], shapes: Callable[..., Any]) -> Callable[..., Any]:
    """Register `kernel` as the torch operation titan_nemotron::<schema> and return it.

    torch.compile takes such an operation as it is, without looking inside; `shapes` gives it empty results of the right
    shapes and dtypes. The kernel must neither change its arguments nor return views of them; gradients are the business of
    a torch.autograd.Function around it. (torch.library.custom_op does all that, but its first call imports the compiler,
    seconds on a CPU, and each call costs twice as much.)
    """
    name = f"titan_nemotron::{schema[: schema.index('(')]}"
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, "CompositeExplicitAutograd", kernel)
    torch.library.register_fake(name, shapes)
    operation: Callable[..., Any] = getattr(torch.ops.titan_nemotron, name.split("::")[1]).default
    return operation
