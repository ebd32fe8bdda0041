"""The sums over keys as in the formula, with T×T tensors. For reading and as a reference for ``blocked``. ρ is 0, so large scores overflow.

    x_ts = min( cap( scale · Σ_i q_ti·k_si·exp(C_ti - C_si) ), clamp )
    w_ts = w(x_ts) · exp(C_t - C_s)             w of near or far keys, depending on t and s
    u_t  = v_t,  or  β_t·( v_t - Σ_{s<t} M_ts·w(x̂_ts)·u_s )
    U_t  = Σ_s w_ts·κ_s·u_s,   z_t = Σ_s w_ts
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import weight
from .parts import ScoreFn, Variant


def bounded(score_fn: ScoreFn, x: Tensor) -> Tensor:
    """Cap and clamp of scores."""
    if score_fn.cap is not None:
        x = score_fn.cap * torch.tanh(x / score_fn.cap)
    return x if score_fn.clamp is None else x.clamp(max=score_fn.clamp)


def is_near(variant: Variant, t: Tensor, s: Tensor) -> Tensor:
    """Whether position t sees key s with the near kernel, [t, s]."""
    seen = s <= t
    return seen if variant.window is None else seen & ((t - s < variant.window) | (s < variant.sinks))


def is_far(variant: Variant, t: Tensor, s: Tensor) -> Tensor:
    """Whether position t sees key s with the far kernel, [t, s]."""
    assert variant.window is not None
    return (t - s >= variant.window) & (s >= variant.sinks)


def sums(variant: Variant, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """U [B, G, R, T, e], z and ρ [B, G, R, T]."""
    q = given["near_q"]
    at = torch.arange(q.shape[3], device=q.device)
    t, s = at[:, None], at[None]
    differences = torch.zeros(1, device=q.device, dtype=q.dtype)
    if (c := given.get("decay")) is not None:
        differences = (c.unsqueeze(-1) - c.unsqueeze(-2)).to(q.dtype)
    weights = _weights(variant.near, "near", given, differences, is_near(variant, t, s))
    if variant.far is not None:
        weights = weights + _weights(variant.far, "far", given, differences, is_far(variant, t, s))
    u = given["v"]
    if variant.write is not None:
        k, beta = given["near_k"], given["beta"]
        before = s < t
        x = bounded(variant.near, variant.write[1] * _products(k, k, given.get("channel_decay")))
        answers = weight(variant.near.kernel, torch.where(before, x, 0.0), given.get("near_coefficients")) * torch.where(before, differences, 0.0).exp()
        answers = torch.where(before, answers, 0.0)
        identity = torch.eye(len(at), device=q.device, dtype=q.dtype)
        u = torch.linalg.solve_triangular(identity + beta.unsqueeze(-1) * answers, beta.unsqueeze(-1) * u, upper=False)
    if (key_weight := given.get("key_weight")) is not None:
        return (weights * key_weight.unsqueeze(-2)) @ u, weights.sum(-1), torch.zeros_like(weights[..., 0])
    return weights @ u, weights.sum(-1), torch.zeros_like(weights[..., 0])


def _products(a: Tensor, k: Tensor, channels: Tensor | None) -> Tensor:
    if channels is None:
        return a @ k.transpose(-1, -2)
    return (a.unsqueeze(-2) * k.unsqueeze(-3) * _decays(channels).to(a.dtype)).sum(-1)


def _decays(channels: Tensor) -> Tensor:
    """exp(C_ti - C_si) for s ≤ t, 0 elsewhere: [..., t, s, i]."""
    at = torch.arange(channels.shape[-2], device=channels.device)
    seen = (at[:, None] >= at).unsqueeze(-1)
    return torch.where(seen, channels.unsqueeze(-2) - channels.unsqueeze(-3), -torch.inf).exp()


def _weights(score_fn: ScoreFn, place: str, given: dict[str, Tensor], differences: Tensor, seen: Tensor) -> Tensor:
    q, k = given[f"{place}_q"], given[f"{place}_k"]
    x = bounded(score_fn, score_fn.scale * _products(q, k, given.get("channel_decay")))
    # Masked pairs must not overflow: their gradient would be 0·∞.
    w = weight(score_fn.kernel, torch.where(seen, x, 0.0), given.get(f"{place}_coefficients")) * torch.where(seen, differences, 0.0).exp()
    return torch.where(seen, w, 0.0)
