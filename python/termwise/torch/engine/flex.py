"""The sums over keys with FlexAttention, one fused kernel on a GPU.

FlexAttention computes a softmax of modified scores. A weighted mean with weights w ≥ 0 is the softmax of log w:

    Σ_s w_ts·u_s / Σ_s w_ts = Σ_s softmax_s(log w_ts)·u_s,     log w_ts = log w(x_ts) + C_t - C_s

Causality, windows and sinks are a block mask. FlexAttention also returns the log of the sum, so ``epilogue`` computes all denominators and norms. :func:`refusal` decides which
variants are covered.

The forward pass is tested on the CPU. FlexAttention has no backward pass there, and its backward pass on GPUs has not been run. Tests compare the gradient of the same formula.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .parts import Kernel, ScoreFn, Variant

#: Lower bound of weights before the log: a weight of zero would have a gradient of 0·∞.
_TINY = 1e-30

ScoreMod = Callable[..., Tensor]


def refusal(variant: Variant) -> str | None:
    """Why FlexAttention does not compute a variant; None if it does."""
    if variant.write is not None:
        return "a write rule depends on its own earlier writes, position by position"
    if variant.decay is not None and (variant.decay != "fixed" or variant.decay_by_channel):
        return "the decay depends on the input: its gradient would go through a captured tensor"
    for score_fn in (variant.near, variant.far):
        if score_fn is not None and not _is_nonnegative(score_fn):
            return "weights can be negative or unknown, and FlexAttention takes their log"
    if variant.far is not None and any(w.kernel.map != "identity" or w.dim is not None for w in (variant.near, variant.far)):
        return "near and far keys have different features, and FlexAttention has one product of q and k"
    return None


def _is_nonnegative(score_fn: ScoreFn) -> bool:
    """Whether w(x) ≥ 0 for all scores that occur, and w > 0 for almost all."""
    kernel = score_fn.kernel
    match kernel.kind:
        case "exp":
            return True
        case "feature":
            # relu can make all weights of a row zero.
            return kernel.map in ("elu", "hedgehog")
        case _ if kernel.learned:
            return False
    if kernel.is_prefix and kernel.degree % 2 == 0:
        return True
    high = min(x for x in (score_fn.cap, score_fn.clamp, np.inf) if x is not None)
    return _least(kernel, -np.inf if score_fn.cap is None else -score_fn.cap, high) >= 0


@lru_cache(maxsize=64)
def _least(kernel: Kernel, low: float, high: float) -> float:
    """The least value of a polynomial kernel on an interval."""
    polynomial = np.polynomial.Polynomial(kernel.dense)
    if kernel.degree == 0:
        return float(kernel.dense[0])
    for end, sign in ((low, (-1) ** kernel.degree), (high, 1)):
        if np.isinf(end) and sign * kernel.dense[-1] < 0:
            return -np.inf
    slopes = polynomial.deriv().roots()
    critical = slopes[abs(slopes.imag) < 1e-9].real
    candidates = [x for x in (*critical, low, high) if np.isfinite(x) and low <= x <= high]
    # A double root, as that of a square, is found within rounding.
    least = min((float(polynomial(x)) for x in candidates), default=np.inf)
    return 0.0 if -1e-12 < least < 0 else least


@lru_cache(maxsize=64)
def _log_weight(score_fn: ScoreFn) -> Callable[[Tensor], Tensor]:
    """log w(x) of products q·k. Its constants are read in advance, since it is compiled; one function per kernel, so it is compiled once."""
    scale, cap, clamp, kernel = score_fn.scale, score_fn.cap, score_fn.clamp, score_fn.kernel
    kind, degree = kernel.kind, kernel.degree
    # A long series loses negative scores to cancellation in float32.
    wide, dense = kernel.wide, tuple(kernel.dense) if kind == "taylor" else ()

    def log(product: Tensor) -> Tensor:
        x = scale * product
        if cap is not None:
            x = cap * torch.tanh(x / cap)
        if clamp is not None:
            x = x.clamp(max=clamp)
        if kind == "exp":
            return x
        if kind == "feature":
            return x.clamp(min=_TINY).log()
        if kind == "power":
            return degree * x.abs().clamp(min=_TINY).log()
        number = x.double() if wide else x
        w = torch.full_like(number, dense[-1])
        for c in reversed(dense[:-1]):
            w = w * number + c
        return w.clamp(min=_TINY).log().to(product.dtype)

    return log


def score_mod(variant: Variant, given: dict[str, Tensor]) -> ScoreMod:
    """The log of the weight of a pair, from the product of its query and key."""
    near, far = _log_weight(variant.near), None if variant.far is None else _log_weight(variant.far)
    window, sinks = variant.window or 0, variant.sinks
    # The log of the decay is linear in the distance.
    rates = None if (c := given.get("decay")) is None else c[0, ..., 0].flatten().to(given["near_q"].dtype)

    def modified(product: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        log = near(product)
        if far is not None:
            log = torch.where((t - s < window) | (s < sinks), log, far(product))
        return log if rates is None else log + rates[h] * (t - s)

    return modified


@lru_cache(maxsize=32)
def _mask(window: int | None, sinks: int, time: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        causal = s <= t
        return causal if window is None else causal & ((t - s < window) | (s < sinks))

    return create_block_mask(seen, None, None, time, time, device=device)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def sums(variant: Variant, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """U, z and ρ as those of ``naive.sums``."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    q, k, v = given["near_q"], given["near_k"], given["v"]
    groups, each, time = q.shape[1:4]
    if q.device.type in ("cpu", "mps") and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError(f"backend='flex' has no backward pass on {q.device.type}: call it under torch.no_grad(), or leave backend out")
    if (key_weight := given.get("key_weight")) is not None:
        v = v * key_weight.unsqueeze(-1).to(v.dtype)
    k, v = (x.expand(-1, -1, each, -1, -1) if max(k.shape[2], v.shape[2]) > 1 else x for x in (k, v))
    q, k, v = (x.flatten(1, 2).to(v.dtype).contiguous() for x in (q, k, v))
    # Far keys have their own score function, so the mask includes all keys before a query.
    window = variant.window if variant.far is None else None
    mask = _mask(window, variant.sinks, time, q.device)
    # Without a compiler FlexAttention computes all pairs at once. PyTorch warns of it.
    run = flex_attention if q.device.type == "cpu" or torch.compiler.is_compiling() else _compiled()
    mean, aux = run(q, k, v, score_mod(variant, given), mask, 1.0, enable_gqa=k.shape[1] != q.shape[1], return_aux=AuxRequest(lse=True))
    return scaled(variant, mean.unflatten(1, (groups, each)), aux.lse.unflatten(1, (groups, each)))


def scaled(variant: Variant, mean: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, z and ρ from the weighted mean and the log of the sum of weights: U·e^ρ = mean·e^log_sum, z·e^ρ = e^log_sum, ρ a constant for gradients."""
    mean = mean.to(log_sum.dtype)
    restored = variant.sums or variant.restores_scale
    rho = log_sum.detach() if restored else torch.zeros_like(log_sum)
    z = (log_sum - rho).exp()
    return mean * z.unsqueeze(-1), z, rho
