"""The sums over keys in blocks of queries. No T×T tensor is kept, and the backward pass recomputes every block.

``parallel``: a block of L queries computes the weights of all visible keys, [L, T] at a time. ``chunk``: it computes the weights of the keys in its block and its window. Other keys
are summed in a recurrent state that passes from block to block,

    U_t = Σ_{s exact} w_ts·u_s + e^{log_t}·Φ(q_t)ᵀ·H,     H ← M·H + Σ_s Φ(k_s)·u_sᵀ

One function computes a block in both passes. In the backward pass its inputs are leaves, autograd differentiates it, and gradients are summed from the last block
to the first, since u and H of a block depend on earlier blocks.

The log scale ρ is removed from the weights of a row if a later stage cancels it: their maximum, or a bound for polynomials of high degree. y does not depend on ρ, which is a constant
for gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels import log_bound, weight, without_autocast
from .naive import bounded, is_far, is_near
from .parts import ScoreFn, Variant
from .states import monomial_count, monomials, reading

#: Weights per block over all heads and batch rows: few enough for CPU caches, or enough to use an accelerator.
_BUDGET = {"cpu": 1 << 22}
_USUAL_BUDGET = 1 << 24
#: Default length of a chunk.
CHUNK = 64
#: The largest state of a head in values, as in the native engine: 1 GiB of float32.
_MAX_STATE = 1 << 28
#: Rows within which channel decays are computed per pair, since factored ones could overflow.
_STRIP = 16

#: Keys of a piece. Tensors of equal size reuse memory; tensors that grow from block to block would allocate.
_PIECE = 1024

Take = Callable[..., Any]


def _pieces(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Split a range of keys at multiples of the piece."""
    while start < end:
        stop = min(end, (start // _PIECE + 1) * _PIECE)
        yield start, stop
        start = stop


class Plan(NamedTuple):
    """The blocks of a call."""

    variant: Variant
    time: int
    #: Queries of a block.
    rows: int
    #: Whether keys before a block are summed in a state.
    chunk: bool

    @property
    def rescale(self) -> str:
        """States cannot store the ρ of a polynomial."""
        return "none" if self.chunk and self.variant.rescale == "multiply" else self.variant.rescale

    def blocks(self) -> list[tuple[int, int]]:
        return [(a, min(a + self.rows, self.time)) for a in range(0, self.time, self.rows)]

    def remembered_before(self, a: int) -> int:
        """End of the keys that the state contains at the block that starts at a: all earlier keys, or those outside of all windows."""
        if self.variant.window is None:
            return a
        return max(min(self.variant.sinks, a), a - self.variant.window + 1, 0)

    def segments(self, a: int, b: int) -> Iterator[tuple[str, int, int]]:
        """Ranges of near and far keys whose weights the queries from a to b compute. None crosses a, and none before a is longer than a piece."""
        v = self.variant
        if v.window is None:
            runs = [("near", 0 if not self.chunk else a, b)]
        else:
            low = max(0, a - v.window + 1)
            runs = [("near", 0, min(v.sinks, low)), ("near", low, b)]
            if v.far is not None:
                runs.append(("far", self.remembered_before(a) if self.chunk else min(v.sinks, b), max(0, b - v.window)))
        for place, start, end in runs:
            for first, last in (*_pieces(start, min(end, a)), (max(start, a), end)):
                if first < last:
                    yield place, first, last

    def first_state_key(self) -> int:
        return self.variant.sinks if self.variant.window is not None else 0


def has_state(variant: Variant, width: int, values: int) -> bool:
    """Whether keys of dimension ``width`` with values of dimension ``values`` can be summed in a state."""
    if variant.remembered is None or variant.remembered.state is None:
        return False
    return monomial_count(width, [n for n, _ in variant.remembered.state]) * (values + 1) <= _MAX_STATE


def plan(variant: Variant, q: Tensor, width: int, values: int, mode: str) -> Plan:
    """The blocks for q [B, T, H, d] in mode "parallel", "chunk", "chunk=L" or "auto". ``width`` and ``values`` are dimensions, as for :func:`has_state`."""
    batch, time, heads = q.shape[:3]
    word, _, length = mode.partition("=")
    able = has_state(variant, width, values)
    if word in ("recurrent", "fused_recurrent"):
        word, length = "chunk", "1"
    chunk = word in ("chunk", "fused_chunk")
    if word not in ("parallel", "auto", "chunk", "fused_chunk") or (length and not (chunk and length.isdigit() and int(length))):
        raise ValueError(f"a mode is 'parallel', 'chunk', 'chunk=LENGTH' or 'auto', found {mode!r}")
    if word == "auto" and able:
        assert variant.remembered is not None and variant.remembered.state is not None
        orders = [n for n, _ in variant.remembered.state]
        # Operations per position: T/2 keys of dimension d + e, or all monomials times e, three times (to read, to write, to compute them).
        chunk = max(orders) <= 8 and time - (variant.window or 0) > 6 * monomial_count(width, orders) + CHUNK
    if chunk and able:
        return Plan(variant, time, min(int(length) if length else CHUNK, time), True)
    budget = _BUDGET.get(q.device.type, _USUAL_BUDGET)
    keys = time if variant.window is None or variant.far is not None else min(time, 2 * variant.window + variant.sinks)
    rows = max(16, budget // (batch * heads * keys))
    return Plan(variant, time, min(1 << (rows.bit_length() - 1), 1024, time), False)


class _Block:
    """One block, computed by ``_Sums`` in both passes."""

    def __init__(self, plan: Plan, take: Take, a: int, b: int, state: Tensor | None) -> None:
        self.plan, self.variant, self.take, self.a, self.b, self.state = plan, plan.variant, take, a, b, state
        self.work = torch.float64 if take("near_q", a, b).dtype == torch.float64 else torch.float32

    def run(self, rho: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """U, z, ρ, u of the block with a write rule, and the state after the block."""
        take, a, b, v = self.take, self.a, self.b, self.variant
        written = self._written() if v.write is not None else None
        scored = [(start, end, *self._scores(place, start, end)) for place, start, end in self.plan.segments(a, b)]
        read = None if self.state is None else self._read()
        if rho is None:
            rho = self._rho([found[2:] for found in scored], None if read is None else read[1])
        total = z = None
        for start, end, score_fn, x, log, seen in scored:
            w = self._weights(score_fn, x, log, seen, rho)
            sum_w = w.sum(-1)
            if (key_weight := take("key_weight", start, end)) is not None:
                w = w * key_weight.unsqueeze(-2)
            u = take("v", start, end) if written is None else written if start == a else take("u", start, end)
            part = (w.to(u.dtype) @ u).to(w.dtype)
            total, z = (part, sum_w) if total is None or z is None else (total + part, z + sum_w)
        assert total is not None and z is not None
        if read is not None:
            part, log = read
            if log is not None or self.plan.rescale == "subtract":
                log = -rho if log is None else log - rho
                part = part * log.exp().unsqueeze(-1)
            width = total.shape[-1]
            total = total + part[..., :width]
            if v.sums:
                z = z + part[..., width]
        return total, z, rho, written, self._next_state(written)

    def _log_decay(self, keys: tuple[int, int] | None, at: int) -> tuple[Tensor | None, Tensor | None]:
        """C_t of the rows and C_s of the keys minus C at a position, which keeps differences accurate."""
        c = self.take("decay", self.a, self.b)
        if c is None:
            return None, None
        start = self.take("decay", at, at + 1).detach()
        of_keys = None if keys is None else (self.take("decay", *keys) - start)
        return (c - start).to(self.work), None if of_keys is None else of_keys.to(self.work)

    def _scores(self, place: str, start: int, end: int) -> tuple[ScoreFn, Tensor, Tensor | None, Tensor | None]:
        """For a range of keys: their score function, the argument of w (for exp plus the log of the decay), the log of the decay for other kernels, and the mask."""
        take, a, b, v = self.take, self.a, self.b, self.variant
        score_fn = v.near if place == "near" else v.far
        assert score_fn is not None
        q, k = take(f"{place}_q", a, b), take(f"{place}_k", start, end)
        x = bounded(score_fn, score_fn.scale * self._products(q, k, start, end).to(self.work))
        log = None
        of_rows, of_keys = self._log_decay((start, end), a)
        if of_rows is not None and of_keys is not None:
            log = of_rows.unsqueeze(-1) - of_keys.unsqueeze(-2)
        seen = self._seen(place, start, end, x.device)
        if score_fn.is_exp:
            x, log = x if log is None else x + log, None
            x = x if seen is None else x.masked_fill(~seen, -torch.inf)
        elif seen is not None:
            # Masked pairs must not overflow: their gradient would be 0·∞.
            x = x.masked_fill(~seen, 0.0)
            log = None if log is None else log.expand(x.shape).masked_fill(~seen, 0.0)
        return score_fn, x, log, seen

    def _seen(self, place: str, start: int, end: int, device: torch.device) -> Tensor | None:
        """The mask of pairs; None if all are visible."""
        v, a, b = self.variant, self.a, self.b
        if place == "near" and end <= a and (v.window is None or start > b - 1 - v.window or end <= v.sinks):
            return None
        if place == "far" and v.window is not None and start >= v.sinks and end <= a - v.window + 1:
            return None
        t = torch.arange(a, b, device=device)[:, None]
        s = torch.arange(start, end, device=device)
        return is_near(v, t, s) if place == "near" else is_far(v, t, s)

    def _products(self, q: Tensor, k: Tensor, start: int, end: int) -> Tensor:
        """q_t·k_s, with channel decay if the variant has it."""
        c = self.take("channel_decay", self.a, self.b)
        if c is None:
            return q @ k.transpose(-1, -2)
        a, b = self.a, self.b
        of_keys = self.take("channel_decay", start, end)
        if end <= a:
            return _decayed(q, c, k, of_keys, c[..., :1, :])
        strips = []
        for i in range(a, b, _STRIP):
            last = min(i + _STRIP, b)
            first = max(min(i, end), start)
            stop = max(min(last, end), first)
            rows, before, own = slice(i - a, last - a), slice(0, first - start), slice(first - start, stop - start)
            parts = []
            if first > start:
                parts.append(_decayed(q[..., rows, :], c[..., rows, :], k[..., before, :], of_keys[..., before, :], c[..., i - a : i - a + 1, :]))
            if stop > first:
                pairs = (c[..., rows, None, :] - of_keys[..., None, own, :]).to(q.dtype)
                causal = torch.arange(i, last, device=q.device)[:, None] >= torch.arange(first, stop, device=q.device)
                pairs = pairs.masked_fill(~causal.unsqueeze(-1), -torch.inf).exp()
                parts.append((q[..., rows, None, :] * k[..., None, own, :] * pairs).sum(-1))
            if stop < end:
                shape = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], c.shape[:-2])
                parts.append(q.new_zeros(*shape, last - i, end - stop))
            strips.append(torch.cat(parts, -1))
        return torch.cat(strips, -2)

    def _rho(self, scored: list[Any], state_log: Tensor | None) -> Tensor:
        """ρ of every row."""
        with torch.no_grad():
            found = []
            for score_fn, x, log, seen in scored:
                if self.plan.rescale == "subtract":
                    if score_fn.is_exp:
                        found.append(x.amax(-1))
                    elif seen is None:
                        found.append(torch.zeros_like(x[..., 0]) if log is None else log.expand(x.shape).amax(-1))
                    else:
                        size = torch.zeros_like(x) if log is None else log
                        found.append(size.masked_fill(~seen, -torch.inf).amax(-1))
                elif self.plan.rescale == "multiply":
                    found.append(log_bound(score_fn.kernel, x.abs().amax(-1), self._coefficients(score_fn)).to(x.dtype))
                else:
                    found.append(torch.zeros_like(x[..., 0]))
            if self.plan.rescale == "subtract":
                if (sink := self.take("sink")) is not None:
                    found.append(sink.expand(found[0].shape))
                if self.state is not None:
                    found.append(torch.zeros_like(found[0]) if state_log is None else state_log)
            rho = found[0]
            for other in found[1:]:
                rho = torch.maximum(rho, other)
            return rho

    def _coefficients(self, score_fn: ScoreFn) -> Any:
        return self.take("near_coefficients" if score_fn is self.variant.near else "far_coefficients")

    def _weights(self, score_fn: ScoreFn, x: Tensor, log: Tensor | None, seen: Tensor | None, rho: Tensor) -> Tensor:
        rho = rho.unsqueeze(-1)
        subtract = self.plan.rescale == "subtract"
        if score_fn.is_exp:
            return (x - rho if subtract else x).exp()
        scaled = rho if self.plan.rescale == "multiply" and (rho.device.type == "meta" or torch.compiler.is_compiling() or bool((rho != 0).any())) else None
        w = weight(score_fn.kernel, x, self._coefficients(score_fn), scaled)
        if subtract:
            log = -rho if log is None else log - rho
        if log is not None:
            w = w * log.exp()
        return w if seen is None else w.masked_fill(~seen, 0.0)

    def _written(self) -> Tensor:
        """u of the block: one unit lower triangular solve after the terms of earlier writes are subtracted."""
        take, a, b, v = self.take, self.a, self.b, self.variant
        assert v.write is not None
        k, beta, rest = take("near_k", a, b), take("beta", a, b).unsqueeze(-1), take("v", a, b)
        for start, end in _pieces(0, 0 if self.plan.chunk else a):
            rest = rest - self._key_weights(k, start, end) @ take("u", start, end)
        if self.state is not None:
            phi = reading(v.near, self._from_state(k), v.write[1], take("near_coefficients"))
            part = phi @ self.state
            of_rows, _ = self._log_decay(None, a - 1)
            rest = rest - (part if of_rows is None else part * of_rows.exp().unsqueeze(-1))
        own = (beta * self._key_weights(k, a, b)).tril(-1)
        rest = (beta * rest).expand(*torch.broadcast_shapes(rest.shape[:-2], own.shape[:-2]), *rest.shape[-2:])
        return torch.linalg.solve_triangular(own, rest, upper=False, unitriangular=True)

    def _key_weights(self, k: Tensor, start: int, end: int) -> Tensor:
        """M_ts·w(x̂_ts) of the keys of the block with keys from start to end; 0 for later keys."""
        take, a, v = self.take, self.a, self.variant
        assert v.write is not None
        x = bounded(v.near, v.write[1] * self._products(k, take("near_k", start, end), start, end))
        of_rows, of_keys = self._log_decay((start, end), a)
        log = None if of_rows is None or of_keys is None else of_rows.unsqueeze(-1) - of_keys.unsqueeze(-2)
        if start == a:
            later = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu()
            x, log = x.masked_fill(later, 0.0), None if log is None else log.masked_fill(later, 0.0)
        w = weight(v.near.kernel, x, take("near_coefficients"))
        return w if log is None else w * log.exp()

    def _from_state(self, q: Tensor) -> Tensor:
        """Rows with the channel decay since the last key of the state."""
        at = self.plan.remembered_before(self.a) - 1
        c = self.take("channel_decay", self.a, self.b)
        return q if c is None else q * (c - self.take("channel_decay", at, at + 1).detach()).exp().to(q.dtype)

    def _read(self) -> tuple[Tensor, Tensor | None]:
        """The product of the rows with the state, and the log of its decay."""
        assert self.state is not None
        v, a, b = self.variant, self.a, self.b
        place, score_fn = ("near", v.near) if v.window is None else ("far", v.far)
        assert score_fn is not None
        q = self._from_state(self.take(f"{place}_q", a, b).to(self.state.dtype))
        log, _ = self._log_decay(None, self.plan.remembered_before(a) - 1)
        return reading(score_fn, q, score_fn.scale, self._coefficients(score_fn)) @ self.state, log

    def _next_state(self, written: Tensor | None) -> Tensor | None:
        """The state after the keys whose weights the next block does not compute."""
        take, v = self.take, self.variant
        if not self.plan.chunk or self.b == self.plan.time:
            return None
        start, end = self.plan.remembered_before(self.a), self.plan.remembered_before(self.b)
        start = max(start, self.plan.first_state_key())
        if end <= start:
            return self.state
        place, score_fn = ("near", v.near) if v.window is None else ("far", v.far)
        assert score_fn is not None and score_fn.state is not None
        orders = [n for n, _ in score_fn.state]
        k = take(f"{place}_k", start, end)
        u = take("v", start, end) if written is None else written
        k = k.to(self.work)
        u = u.to(k.dtype)
        if (key_weight := take("key_weight", start, end)) is not None:
            u = u * key_weight.unsqueeze(-1)
        if v.sums:
            u = torch.cat([u, torch.ones_like(u[..., :1])], -1)
        # The reference position of a state is a constant for gradients, here and in _read: results do not depend on it.
        keep: Tensor | None = None
        if (c := take("channel_decay", start, end)) is not None:
            last = c[..., -1:, :].detach()
            k = k * (last - c).exp().to(k.dtype)
            if self.state is not None:
                step = (last - take("channel_decay", start - 1, start).detach()).exp().to(k.dtype)
                keep = monomials(step, orders, weighed=False).transpose(-1, -2)
        phi = monomials(k, orders)
        if (c := take("decay", start, end)) is not None:
            last = c[..., -1:].detach()
            phi = phi * (last - c).exp().to(k.dtype).unsqueeze(-1)
            if self.state is not None:
                keep = (last - take("decay", start - 1, start).detach()).exp().to(k.dtype).unsqueeze(-1)
        added = phi.transpose(-1, -2) @ u
        if self.state is None:
            return added
        return (self.state if keep is None else self.state * keep) + added


def _decayed(q: Tensor, of_rows: Tensor, k: Tensor, of_keys: Tensor, between: Tensor) -> Tensor:
    """Σ_i q_i·k_i·exp(C_t,i - C_s,i), factored at a position between both, where neither factor grows."""
    between = between.detach()
    q = q * (of_rows - between).exp().to(q.dtype)
    k = k * (between - of_keys).exp().to(k.dtype)
    return q @ k.transpose(-1, -2)


class _Sums(torch.autograd.Function):
    """U, z, ρ, and u with a write rule."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, names: tuple[str, ...], *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = dict(zip(names, tensors, strict=True))
        with without_autocast(tensors[0]):
            found, kept, u = _forward(plan, given)
        ctx.plan, ctx.names = plan, names
        ctx.save_for_backward(*tensors, found[2], *([u] if u is not None else []), *(x for x in kept if x is not None))
        ctx.has_state = [x is not None for x in kept]
        ctx.mark_non_differentiable(found[2])
        return found

    # Blocks are differentiated with respect to their inputs only: a second derivative would lack most of its terms.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor, dz: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        # Read once: with activation checkpointing each access recomputes them.
        saved = ctx.saved_tensors
        tensors, (rho, *rest) = saved[: len(ctx.names)], saved[len(ctx.names) :]
        u = rest.pop(0) if ctx.plan.variant.write is not None else None
        kept = [rest.pop(0) if there else None for there in ctx.has_state]
        wanted = dict(zip(ctx.names, ctx.needs_input_grad[2:], strict=True))
        with without_autocast(tensors[0]):
            grads = _backward(ctx.plan, dict(zip(ctx.names, tensors, strict=True)), rho, u, kept, wanted, dtotal, dz)
        return None, None, *(grads.get(name) for name in ctx.names)


def _forward(plan: Plan, given: dict[str, Tensor]) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None], Tensor | None]:
    own = dict(given)

    def take(name: str, start: int | None = None, end: int | None = None) -> Tensor | None:
        x = own.get(name)
        return x if x is None or start is None else x.narrow(3, start, end - start)  # type: ignore[operator]

    found: list[tuple[Tensor, Tensor, Tensor]] = []
    kept: list[Tensor | None] = []
    state: Tensor | None = None
    for a, b in plan.blocks():
        kept.append(state)
        total, z, rho, written, state = _Block(plan, take, a, b, state).run(None)
        if written is not None:
            if "u" not in own:
                own["u"] = written.new_empty(*written.shape[:3], plan.time, written.shape[-1])
            own["u"][..., a:b, :] = written
        found.append((total, z, rho))
    joined = tuple(torch.cat(parts, 3) for parts in zip(*found, strict=True))
    return joined, kept, own.get("u")  # type: ignore[return-value]


def _backward(
    plan: Plan,
    given: dict[str, Tensor],
    rho: Tensor,
    u: Tensor | None,
    kept: list[Tensor | None],
    wanted: dict[str, bool],
    dtotal: Tensor,
    dz: Tensor,
) -> dict[str, Tensor]:
    own = dict(given) if u is None else {**given, "u": u}
    wanted = {**wanted, "u": u is not None}
    grads = {name: torch.zeros_like(x) for name, x in own.items() if wanted[name]}
    dstate: Tensor | None = None
    for (a, b), before in reversed(list(zip(plan.blocks(), kept, strict=True))):
        leaves: dict[tuple[str, int | None, int | None], Tensor] = {}

        def take(name: str, start: int | None = None, end: int | None = None, leaves: Any = leaves) -> Tensor | None:
            x = own.get(name)
            if x is None:
                return None
            if (name, start, end) not in leaves:
                x = x if start is None else x.narrow(3, start, end - start)  # type: ignore[operator]
                leaves[name, start, end] = x.detach().requires_grad_(wanted[name])
            return leaves[name, start, end]

        state = None if before is None else before.detach().requires_grad_()
        with torch.enable_grad():
            total, z, _, written, after = _Block(plan, take, a, b, state).run(rho[..., a:b])
        outputs, douts = [total, z], [dtotal[..., a:b, :], dz[..., a:b]]
        if written is not None:
            outputs.append(written)
            douts.append(grads["u"][..., a:b, :])
        if after is not None and dstate is not None:
            outputs.append(after)
            douts.append(dstate)
        pairs = [(x, dx) for x, dx in zip(outputs, douts, strict=True) if x.requires_grad]
        inputs = [x for x in leaves.values() if x.requires_grad] + ([] if state is None else [state])
        if not pairs or not inputs:
            continue
        found = list(torch.autograd.grad([x for x, _ in pairs], inputs, [dx for _, dx in pairs], allow_unused=True))
        dstate = None if state is None else found.pop()
        for ((name, start, end), _), dx in zip([item for item in leaves.items() if item[1].requires_grad], found, strict=True):
            if dx is not None:
                (grads[name] if start is None else grads[name].narrow(3, start, end - start)).add_(dx)  # type: ignore[operator]
    return {name: grads[name] for name in given if name in grads}


@torch.compiler.disable
def sums(plan: Plan, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """U [B, G, R, T, e], z and ρ [B, G, R, T] from the outputs of ``prepare``."""
    return _Sums.apply(plan, tuple(given), *given.values())  # type: ignore[no-any-return,no-untyped-call]
