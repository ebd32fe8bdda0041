"""The auxiliary inputs of a layer, gate logits and parameters, in a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def _add_extras(module: nn.Module, layer: Any, hidden: int, make: dict[str, Any]) -> None:
    """Add the projections and parameters of a layer to a module, named as in checkpoints."""
    for extra in layer.extras:
        if extra.logits:
            module.add_module(extra.tensor, nn.Linear(hidden, extra.shape[0], bias=extra.bias, **make))
            continue
        start = torch.empty(extra.shape, **make)
        kind, x = extra.init
        nn.init.constant_(start, x) if kind == "constant" else nn.init.uniform_(start, -x, x)
        place, _, name = extra.tensor.rpartition(".")
        owner = module
        for part in place.split(".") if place else []:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(name, nn.Parameter(start))


def _extras_of(module: nn.Module, layer: Any, x: Tensor) -> dict[str, Any]:
    """The auxiliary inputs of a layer for hidden states x, by name."""
    found = {}
    for extra in layer.extras:
        value: Any = module
        for part in extra.tensor.split("."):
            value = getattr(value, part)
        found[extra.name] = value(x) if extra.logits else value
    return found
