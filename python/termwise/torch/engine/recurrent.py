"""Calls that continue earlier ones, with one or more positions and gradients by autograd.

If the kernel has a finite state, it contains the keys of earlier calls, as in ``blocked``. Otherwise their prepared rows are kept, all of them or those of the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blocked import CHUNK, Plan, _Block, has_state, plan, sums
from .epilogue import finish
from .kernels import without_autocast
from .parts import Parts, Variant
from .prepare import prepare

#: Prepared tensors with one row per key; others have one row per query.
_OF_KEYS = ("near_k", "far_k", "v", "u", "decay", "channel_decay", "key_weight")


class Past(NamedTuple):
    """The positions before a call."""

    #: Their number, the last inputs of convolutions, running sums.
    carry: dict[str, Any]
    #: Rows of keys that are still read one by one: those before ``sinks``, then those from ``first`` on.
    rows: dict[str, Tensor]
    first: int
    #: The state of all other keys.
    state: Tensor | None


def attend_whole(variant: Variant, parts: Parts, q: Tensor, k: Tensor, v: Tensor, extras: Mapping[str, Tensor], mode: str = "auto") -> Tensor:
    """y [B, T, H, e] of whole sequences, with one variant in all heads; ``mode`` as for ``plan``."""
    if torch.compiler.is_compiling():
        # The compiler cannot trace the backward pass of ``sums``, which calls autograd.
        return extend(variant, parts, q, k, v, extras)[0]
    with without_autocast(q):
        given = prepare(variant, parts, q, k, v, extras, _work(q))
        own = {name: x.detach() if name == "sink" else x for name, x in given.items()}
        total, z, rho = sums(plan(variant, q, _state_width(variant, given), v.shape[3], mode), own)
        y = finish(variant, total, z, rho, given.get("sink"), extras)
    return y.flatten(1, 2).transpose(1, 2).to(q.dtype)


def extend(variant: Variant, parts: Parts, q: Tensor, k: Tensor, v: Tensor, extras: Mapping[str, Tensor], past: Past | None = None) -> tuple[Tensor, Past]:
    """y [B, T, H, e] of the positions after ``past``, and the past for the next call. The given past is not changed."""
    past = Past({}, {}, 0, None) if past is None else past
    carry = dict(past.carry)
    begin = carry.get("position", 0)
    end = begin + q.shape[1]
    with without_autocast(q):
        new = prepare(variant, parts, q, k, v, extras, _work(q), carry)
        kept = [name for name in _OF_KEYS if name in new and not (name == "v" and variant.write is not None)]
        rows = {name: torch.cat([past.rows[name], new[name]], 3) if name in past.rows else new[name] for name in kept}
        rows.update({"u": past.rows["u"]} if "u" in past.rows else {})
        chunk = _through_state(variant, new)
        layout = Plan(variant, end + 1, CHUNK if chunk else plan(variant, q, _state_width(variant, new), v.shape[3], "parallel").rows, chunk)
        gap = max(0, past.first - variant.sinks)

        def take(name: str, start: int | None = None, stop: int | None = None) -> Tensor | None:
            x = rows.get(name, new.get(name))
            if x is None or start is None or stop is None:
                return x.detach() if name == "sink" and x is not None else x
            offset = begin if name not in rows else gap if start >= variant.sinks else 0
            return x.narrow(3, start - offset, stop - start)

        found, state = [], past.state
        for a in range(begin, end, layout.rows):
            b = min(a + layout.rows, end)
            *sums_of_block, written, state = _Block(layout, take, a, b, state).run(None)
            found.append(sums_of_block)
            if written is not None:
                rows["u"] = torch.cat([rows["u"], written], 3) if "u" in rows else written
        total, z, rho = (torch.cat(parts_of_time, 3) for parts_of_time in zip(*found, strict=True))
        y = finish(variant, total, z, rho, new.get("sink"), extras, carry)
    carry["position"] = end
    # The row before the first needed one is kept, since decays are relative to it.
    first = max(past.first, layout.remembered_before(end) - 1) if chunk or (variant.window is not None and variant.far is None) else 0
    rows = {name: _without(x, variant.sinks, first - gap) for name, x in rows.items()}
    return y.flatten(1, 2).transpose(1, 2).to(q.dtype), Past(carry, rows, first, state)


def _work(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _through_state(variant: Variant, given: dict[str, Tensor]) -> bool:
    """Whether keys are summed in a state: polynomials of high degree would lose accuracy in float32."""
    score_fn = variant.remembered
    if score_fn is None or score_fn.kernel.degree > 8 or score_fn.kernel.wide:
        return False
    return has_state(variant, _state_width(variant, given), given["v"].shape[-1])


def _state_width(variant: Variant, given: dict[str, Tensor]) -> int:
    """The dimension of the keys in a state."""
    return given["near_k" if variant.window is None or variant.far is None else "far_k"].shape[-1]


def _without(x: Tensor, start: int, stop: int) -> Tensor:
    """Rows of keys except those from start to stop."""
    return x if stop <= start else torch.cat([x.narrow(3, 0, start), x.narrow(3, stop, x.shape[3] - stop)], 3)
