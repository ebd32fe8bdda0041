"""From q, k, v and the auxiliary inputs to the inputs of the sums over keys.

    q, k, v ← silu(conv(·))         with a short convolution
    q, k    ← rope(norm(·))
    q, k    ← φ(A·(·))              for near and far keys each
    C_t     = running sum of the log decay, in float64, since it grows with T and only differences are used

All operations are linear in T. ``past`` has the data of earlier positions for a call that continues a sequence: their number, the last inputs of a convolution, running sums. The call
replaces them with those for the next call. Tensors are [batch, kv heads, heads per kv head, time, …]; the third dimension of tensors of keys is 1 if heads share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernels import wide
from .parts import Parts, ScoreFn, Variant

#: The default of PyTorch's RMSNorm in float32.
RMS_EPS = 1.1920929e-7


def prepare(
    variant: Variant, parts: Parts, q: Tensor, k: Tensor, v: Tensor, extras: Mapping[str, Tensor], work: torch.dtype, past: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    """The inputs of the sums over keys by name, for all heads, from q [B, T, H, d], k [B, T, G, d], v [B, T, G, e]."""
    past = {} if past is None else past
    batch, time, heads = q.shape[:3]
    first = past.get("position", 0)
    kv_heads = k.shape[2]
    each = heads // kv_heads

    def of_heads(x: Tensor) -> Tensor:
        """[B, T, H, ...] → [B, G, R, T, ...]"""
        return x.unflatten(2, (kv_heads, each)).movedim(1, 3)

    def of_keys(x: Tensor) -> Tensor:
        """[B, T, G, ...] → [B, G, 1, T, ...]"""
        return x.movedim(1, 2).unsqueeze(2)

    if variant.conv is not None:
        q, k, v = (_conv(x, extras[f"conv_{name}"], past, f"conv_{name}") for name, x in (("q", q), ("k", k), ("v", v)))
    if variant.qk_norm is not None:
        q, k = (_qk_norm(variant, x, extras.get(f"{name}_norm")) for name, x in (("q", q), ("k", k)))
    if variant.rope and parts.frequencies is not None:
        cos, sin = _angles(parts.frequencies, parts.rope_factor, first, time, q.device, work)
        q, k = (_rotate(x.to(work), cos, sin) for x in (q, k))
    made: dict[str, Tensor] = {}
    for far, score_fn in ((False, variant.near), (True, variant.far)):
        if score_fn is None:
            continue
        place = "far" if far else "near"
        low = q.dtype in (torch.bfloat16, torch.float16) and _keeps_low_precision(variant, score_fn)
        own_q, own_k = (x if low else x.to(work) for x in (q, k))
        for name, x in _branch(score_fn, far, own_q, own_k, extras, of_heads, of_keys).items():
            made[f"{place}_{name}"] = x

    low = v.dtype in (torch.bfloat16, torch.float16) and all(w is None or _keeps_low_precision(variant, w) for w in (variant.near, variant.far))
    v = v if low else v.to(work)
    if variant.in_gate:
        v = v * torch.sigmoid(extras["in_gate"].to(work)).unsqueeze(-1).to(v.dtype)
    made["v"] = of_keys(v)
    if variant.write is not None:
        made["beta"] = of_keys(variant.write[0] * torch.sigmoid(extras["beta"].to(work)))
    if variant.decay is not None:
        made["channel_decay" if variant.decay_by_channel else "decay"] = of_heads(_decay(variant, extras, q, past))
    if variant.denominator == "position":
        seen = torch.tensor([variant.visible(t) for t in range(first, first + time)], dtype=work, device=q.device)
        exponent = torch.sigmoid(extras["norm_const"].reshape(kv_heads, each, 1).to(work))
        made["key_weight"] = torch.exp(-exponent * seen.log()).unsqueeze(0)
    if variant.sink:
        made["sink"] = extras["sink"].reshape(1, kv_heads, each, 1).to(work)
    return made


def _keeps_low_precision(variant: Variant, score_fn: ScoreFn) -> bool:
    """Whether scores may be bfloat16 products, as in FlashAttention. A polynomial multiplies their relative error by its degree, and a delta rule accumulates errors."""
    simple = score_fn.is_exp or (score_fn.kernel.kind == "feature" and score_fn.kernel.map in ("identity", "relu"))
    return simple and variant.write is None and score_fn.dim is None and not variant.decay_by_channel


def _branch(
    score_fn: ScoreFn, far: bool, q: Tensor, k: Tensor, extras: Mapping[str, Tensor], of_heads: Callable[[Tensor], Tensor], of_keys: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """q and k for near or far keys, with the learned coefficients."""

    def own(name: str) -> Tensor:
        return extras[f"far_{name}" if far else name]

    if score_fn.dim is not None:
        q = torch.einsum("bthi,hji->bthj", q, own("dim_q").to(q.dtype))
        k = torch.einsum("bthi,hji->bthj", k, own("dim_k").to(k.dtype))
    q, k = (_map(score_fn.kernel.map, x, own, name) for name, x in (("q", q), ("k", k)))
    q, k = of_heads(q), of_keys(k)
    made = {"q": q, "k": k}
    groups, each = q.shape[1:3]
    if score_fn.kernel.learned:
        made["coefficients"] = own("coefficients").reshape(1, groups, each, 1, 1, -1).to(q.dtype)
    return made


def running_sum(x: Tensor, past: dict[str, Any], name: str) -> Tensor:
    """Cumulative sums over time, [B, T, ...], that continue those of earlier calls."""
    sums = x.cumsum(1) if name not in past else past[name] + x.cumsum(1)
    past[name] = sums[:, -1:]
    return sums


def _conv(x: Tensor, taps: Tensor, past: dict[str, Any], name: str) -> Tensor:
    """y_t = silu(Σ_j W_j·x_{t-w+1+j}), one filter per channel."""
    flat = x.flatten(2).transpose(1, 2)
    channels, width = flat.shape[1], taps.shape[-1]
    rows = torch.cat([past[name], flat], -1) if name in past else F.pad(flat, (width - 1, 0))
    past[name] = rows[..., rows.shape[-1] - width + 1 :]
    y = F.conv1d(rows, taps.reshape(channels, 1, width).to(x.dtype), groups=channels)
    return F.silu(y).transpose(1, 2).reshape(x.shape)


def unit(x: Tensor, floor: Tensor | float = 1e-12) -> Tensor:
    """x / max(‖x‖, floor). Below the floor the gradient along x is zero, also at x = 0."""
    squares = x.square().sum(-1, keepdim=True)
    floor = torch.as_tensor(floor, dtype=x.dtype, device=x.device)
    above = squares > floor * floor
    norm = torch.where(above, squares, 1.0).sqrt()
    return x / torch.where(above, norm, floor)


def _qk_norm(variant: Variant, x: Tensor, gain: Tensor | None) -> Tensor:
    if variant.qk_norm == "l2":
        return unit(x.float() if x.dtype != torch.float64 else x).to(x.dtype)
    shape = x.shape
    y = x if x.dtype == torch.float64 else x.float()
    if variant.qk_norm_over_heads:
        y = y.flatten(2)
    assert gain is not None
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + variant.qk_norm_eps) * gain.to(y.dtype)
    return y.reshape(shape).to(x.dtype)


@lru_cache(maxsize=64)
def _angles(frequencies: tuple[float, ...], factor: float, first: int, time: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.arange(first, first + time, dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    return (factor * angle.cos()).to(device, dtype), (factor * angle.sin()).to(device, dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in half-split form; x [B, T, heads, d], cos and sin [T, r/2] for the first r coordinates."""
    pairs = cos.shape[-1]
    low, high, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)


def _map(kind: str, x: Tensor, own: Callable[[str], Tensor], name: str) -> Tensor:
    """φ"""
    match kind:
        case "elu":
            return F.elu(x) + 1
        case "relu":
            return F.relu(x)
        case "l2":
            return unit(x)
        case "hedgehog":
            y = 2 * (torch.einsum("bthi,hji->bthj", x, own(f"feature_{name}").to(x.dtype)) + own(f"feature_{name}_bias").to(x.dtype))
            return torch.softmax(torch.cat([y, -y], -1), -1)
    return x


def _decay(variant: Variant, extras: Mapping[str, Tensor], q: Tensor, past: dict[str, Any]) -> Tensor:
    """C, [B, T, H] or [B, T, H, channels]."""
    batch, time, heads = q.shape[:3]
    if variant.decay == "fixed":
        first = past.get("position", 0)
        t = torch.arange(first + 1, first + time + 1, dtype=torch.float64)
        steps = torch.tensor([-(2.0 ** (-5 - h)) for h in range(heads)], dtype=torch.float64).log1p()
        c = t[:, None] * steps
        return wide((c.float() if q.device.type == "mps" else c).to(q.device)).expand(batch, time, heads)
    g = wide(extras["decay_gate"])
    g = g.unflatten(2, (heads, -1)) if variant.decay_by_channel else g
    match variant.decay:
        case "linear":
            return (running_sum(g, past, "decay") - g) / 1024
        case "softplus":
            return -running_sum(F.softplus(g), past, "decay")
        case "sigmoid":
            return -running_sum(F.softplus(-g), past, "decay") / variant.decay_divisor
        case "mamba":
            rate = wide(extras["decay_rate"]).exp()
            return -(rate[:, None] if variant.decay_by_channel else rate) * running_sum(F.softplus(g), past, "decay")
    return running_sum(g, past, "decay")
