"""From the sums of a row to its output: y = P · N(O · U / D).

U and z are divided by the scale e^ρ of their row: the true values are U·e^ρ and z·e^ρ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernels import wide
from .parts import Variant
from .prepare import RMS_EPS, running_sum, unit


def finish(
    variant: Variant, total: Tensor, z: Tensor, rho: Tensor, sink: Tensor | None, extras: Mapping[str, Tensor], past: dict[str, Any] | None = None
) -> Tensor:
    """y [B, G, R, T, e] from U, z and ρ; ``past`` as for ``prepare``."""
    past = {} if past is None else past
    groups, each = total.shape[1:3]
    work = total.dtype

    def of_heads(x: Tensor) -> Tensor:
        return x.unflatten(2, (groups, each)).movedim(1, 3)

    out = None
    if variant.out_gate is not None:
        out = _out_gate(variant, extras["out_gate"].to(work), past)
    y = total / _denominator(variant, z, rho, sink, past.get("position", 0)).unsqueeze(-1)
    if out is not None:
        y = y * of_heads(out).unsqueeze(-1)
    y = _norm(variant, y, rho.unsqueeze(-1) if variant.restores_scale else None, extras)
    match variant.post_gate:
        case "out":
            assert out is not None
            return y * of_heads(out).unsqueeze(-1)
        case "sigmoid" | "silu":
            g = extras["post_gate"].to(work)
            g = g.unflatten(2, (groups * each, -1))
            return y * of_heads(torch.sigmoid(g) if variant.post_gate == "sigmoid" else F.silu(g))
    return y


def _out_gate(variant: Variant, g: Tensor, past: dict[str, Any]) -> Tensor:
    if variant.out_gate == "sigmoid":
        return torch.sigmoid(g)
    # float64, since terms would be lost in a long sum of float32.
    total = running_sum(wide(g).exp(), past, "out_gate")
    return torch.where(total > 1, 1 / torch.where(total > 1, total, 1.0), 1.0).to(g.dtype)


def _denominator(variant: Variant, z: Tensor, rho: Tensor, sink: Tensor | None, first: int) -> Tensor:
    """D·e^-ρ"""
    if variant.denominator == "length":
        return torch.tensor([variant.visible(t) for t in range(first, first + z.shape[-1])], dtype=z.dtype, device=z.device)
    if not variant.sums:
        return torch.ones_like(z)
    if sink is not None:
        z = z + (sink - rho).exp()

    def without_scale(x: float) -> Tensor:
        return (x * (-wide(rho)).exp()).to(z.dtype)

    if variant.floor is not None:
        z = torch.maximum(z, without_scale(variant.floor))
    if variant.detached:
        z = z.detach()
    return z if variant.eps is None else z + without_scale(variant.eps)


def _norm(variant: Variant, x: Tensor, log_scale: Tensor | None, extras: Mapping[str, Tensor]) -> Tensor:
    """N(x·e^λ), over the last dimension."""

    def eps(number: float, power: int) -> Tensor | float:
        return number if log_scale is None else (number * (-power * wide(log_scale)).exp()).to(x.dtype)

    match variant.norm:
        case "l2":
            return unit(x, eps(1e-12, 1))
        case "scaled_l2":
            return x.shape[-1] * unit(x, eps(1e-12, 1))
        case "rms":
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps(RMS_EPS, 2)) * extras["norm_weight"].to(x.dtype)
        case "layer":
            x = x - x.mean(-1, keepdim=True)
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps(1e-5, 2))
            return x * extras["norm_weight"].to(x.dtype) + extras["norm_bias"].to(x.dtype)
        case "none":
            return x
    raise NotImplementedError(f"norm={variant.norm} is not implemented in the PyTorch engine; use the native engine, or add it to _norm")
