"""A call: prepare, sum, finish, once per variant of the layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from ..._attention import Layer
from . import blocked, flex, naive, parts
from .epilogue import finish
from .kernels import without_autocast
from .prepare import prepare


@lru_cache(maxsize=256)
def _parts(text: str) -> parts.Parts:
    return parts.read(text)


def attend(
    layer: Layer, q: Tensor, k: Tensor, v: Tensor, extras: Mapping[str, Tensor], *, lengths: Tensor | None = None, mode: str = "auto", backend: str = "blocked"
) -> Tensor:
    """y [B, T, H, e] of a layer for q [B, T, H, d], k [B, T, G, d], v [B, T, G, e] on any device.

    float64 is computed in float64, other types in float32. Scores of bfloat16 q and k are bfloat16 products if the kernel allows it. y has the type of q. ``mode`` may also be
    ``"naive"``, the T×T formula. ``backend="flex"`` computes the sums with FlexAttention.
    """
    read = _parts(layer._core.parts)
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, kv_heads, time = q.shape[2], k.shape[2], q.shape[1]
    with without_autocast(q):
        found: list[tuple[tuple[int, ...], Tensor]] = []
        chunked = False
        for variant, own in read.variants:
            given = prepare(variant, read, q, k, v, extras, work)
            if len(own) < heads:
                given = {name: _selected(x, own, kv_heads, heads // kv_heads) for name, x in given.items()}
            sink = given.get("sink")
            if mode == "naive":
                total, z, rho = naive.sums(variant, given)
            elif backend == "flex":
                if (reason := flex.refusal(variant)) is not None:
                    raise ValueError(f"backend='flex' does not compute {variant.text!r}: {reason}; leave backend out")
                total, z, rho = flex.sums(variant, given)
            else:
                remembered = variant.remembered
                width = 0 if remembered is None else given["near_k" if variant.window is None else "far_k"].shape[-1]
                sink_free = {name: x for name, x in given.items() if name != "sink"}
                sink_free.update({} if sink is None else {"sink": sink.detach()})
                plan = blocked.plan(variant, q[:, :, : len(own)], width, v.shape[3], mode)
                chunked |= plan.chunk
                total, z, rho = blocked.sums(plan, sink_free)
            y = finish(variant, total, z, rho, sink, _of_heads(extras, own, heads))
            found.append((own, y.flatten(1, 2)))
        if "chunk" in mode and not chunked:
            raise ValueError(
                f"chunks need a kernel with a finite state (taylor, power or feature, without clamp, of orders whose state fits into memory), and no head of {layer!r} has one; "
                "use 'parallel' or 'auto'"
            )
        y = found[0][1] if len(found) == 1 else torch.cat([y for _, y in found], 1)
        if len(found) > 1:
            order = [h for own, _ in found for h in own]
            y = y.index_select(1, torch.tensor([order.index(h) for h in range(heads)], device=y.device))
        y = y.transpose(1, 2)
        if lengths is not None:
            counts = torch.arange(time, device=y.device)[None] < lengths.to(y.device)[:, None]
            y = torch.where(counts[:, :, None, None], y, 0.0)
    return y.to(q.dtype)


def _selected(x: Tensor, own: tuple[int, ...], groups: int, each: int) -> Tensor:
    """The heads of one variant, each with kv heads of its own: [B, G, R, …] → [B, n, 1, …]."""
    own_groups = torch.tensor([h // each for h in own], device=x.device)
    if x.shape[2] == 1 and each > 1:
        return x.index_select(1, own_groups)
    return x.flatten(1, 2).index_select(1, torch.tensor(own, device=x.device)).unsqueeze(2)


def _of_heads(extras: Mapping[str, Tensor], own: tuple[int, ...], heads: int) -> dict[str, Tensor]:
    """The auxiliary inputs with the gates of these heads only."""
    if len(own) == heads:
        return dict(extras)
    found = dict(extras)
    for name in ("out_gate", "post_gate"):
        if name in found:
            g = found[name]
            each = g.shape[2] // heads
            found[name] = g.unflatten(2, (heads, each)).index_select(2, torch.tensor(own, device=g.device)).flatten(2)
    return found
