"""w(x) of every kernel.

    exp      e^x
    taylor   Σ_n a_n·x^n/n!
    power    x^p
    feature  x, since φ was applied to q and k

In float32 a long series of a negative score cancels: at x = -10 its terms reach 2.8e3 while their sum is 4.5e-5. A prefix of the series is therefore computed as exp if the two differ
by less than rounding, and otherwise in float64 without cancellation. Polynomials of high degree are multiplied by the e^-ρ of their row before they are converted to float32.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .parts import Kernel

#: Weights up to e^40 are not scaled: their squares and long sums of them are finite in float32.
_UNSCALED_LOG = 40.0


def wide(x: Tensor) -> Tensor:
    """In float64, if the device supports it."""
    return x if x.device.type == "mps" else x.double()


def without_autocast(x: Tensor) -> Any:
    """A context without autocast."""
    return nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)


def weight(kernel: Kernel, x: Tensor, coefficients: Tensor | None = None, rho: Tensor | None = None) -> Tensor:
    """w(x)·e^-ρ for scores x, with learned ``coefficients`` [..., 1, 1, orders]. For exp, the caller has subtracted ρ from x."""
    match kernel.kind:
        case "exp":
            return x.exp()
        case "feature":
            return x
        case _ if kernel.learned:
            assert coefficients is not None
            if rho is None and not kernel.wide:
                return _learned(kernel, x, coefficients)
            w = _learned(kernel, wide(x), wide(coefficients))
            return (w if rho is None else w * (-wide(rho)).exp()).to(x.dtype)
    return _Series.apply(x, kernel, rho)  # type: ignore[no-any-return,no-untyped-call]


def log_bound(kernel: Kernel, reach: Tensor, coefficients: Tensor | None = None) -> Tensor:
    """ρ of rows whose largest |x| is ``reach``: the log of a bound of |w|, or 0 if weights are far from overflow in float32."""
    reach = wide(reach.detach())
    if kernel.learned:
        assert coefficients is not None
        bound = _learned(kernel, reach, wide(coefficients.detach())[..., 0, :].abs()).log()
    elif kernel.kind == "power":
        bound = kernel.degree * reach.log()
    else:
        bound = _horner([abs(c) for c in kernel.dense], reach).log()
    return torch.where(bound > _UNSCALED_LOG, bound, 0.0)


def _learned(kernel: Kernel, x: Tensor, coefficients: Tensor) -> Tensor:
    """Horner's method with a_n per head."""
    own = dict(zip(kernel.orders, coefficients.unbind(-1), strict=True))
    w = torch.zeros_like(x)
    for n in range(kernel.degree, -1, -1):
        # w = a_n + x/(n+1)·w divides every a_n by n!.
        w = w * (x / (n + 1)) if n < kernel.degree else w
        if n in own:
            w = w + own[n]
    return w


def _horner(dense: Any, x: Tensor) -> Tensor:
    w = torch.full_like(x, dense[-1])
    for c in reversed(dense[:-1]):
        w = w.mul_(x).add_(c)
    return w


def _prefix(p: int, x: Tensor) -> Tensor:
    """Σ_{n≤p} x^n/n! in float64; for scores in (-p-1, 0) as e^x minus the remainder, whose terms decrease."""
    total = torch.ones_like(x)
    for n in range(p, 0, -1):
        total = total.mul_(x).div_(n).add_(1.0)
    lossy = (x < 0) & (x > -(p + 1))
    safe = torch.where(lossy, x, 0.0)
    first, rest = torch.ones_like(x), torch.ones_like(x)
    for n in range(1, p + 2):
        first.mul_(safe).div_(n)
    for n in range(p + 2 + 9 * (isqrt(p) + 1) + 20, p + 1, -1):
        rest.mul_(safe).div_(n).add_(1.0)
    return torch.where(lossy, safe.exp() - first * rest, total)


def _series(kernel: Kernel, x: Tensor, slope: bool, rho: Tensor | None) -> Tensor:
    """w·e^-ρ, or w'·e^-ρ, of a kernel without learned coefficients."""
    dense = [n * c for n, c in enumerate(kernel.dense)][1:] or [0.0] if slope else kernel.dense
    order = kernel.degree - 1 if slope else kernel.degree
    if slope and kernel.degree == 0:
        return torch.zeros_like(x)

    def exact(x: Tensor, rho: Tensor | None) -> Tensor:
        w = _prefix(order, wide(x)) if kernel.is_prefix else _horner(dense, wide(x))
        return (w if rho is None else w * (-wide(rho)).exp()).to(x.dtype)

    if x.dtype == torch.float64:
        return exact(x, rho)
    if kernel.exp_range is not None:
        low, high = kernel.exp_range
        w = (x if rho is None else x - rho.to(x.dtype)).exp()
        outside = (x < low) | (x > high)
        if torch.compiler.is_compiling():
            return torch.where(outside, exact(x, rho), w)
        if x.device.type != "meta" and bool(outside.any()):
            w[outside] = exact(x[outside], None if rho is None else rho.expand_as(x)[outside])
        return w
    return exact(x, rho) if kernel.wide or rho is not None else _horner(dense, x)


class _Series(torch.autograd.Function):
    """Keeps only x for the backward pass; autograd would keep every step of Horner's method."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Kernel, rho: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, rho)
        ctx.kernel = kernel
        return _series(kernel, x, False, rho)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw: Tensor) -> Any:  # type: ignore[override]
        x, rho = ctx.saved_tensors
        return dw * _series(ctx.kernel, x, True, rho), None, None
