"""The parts of a layer, parsed and checked in Rust (``Layer._core.parts``).

None of the classes is a dataclass: with postponed annotations it needs its module in ``sys.modules``, and an exported file can be loaded without that.
"""

from __future__ import annotations

import json
from functools import cached_property
from math import exp, factorial, lgamma, log
from typing import Any, NamedTuple


class KernelFields(NamedTuple):
    """The fields of a kernel."""

    #: exp, taylor, power or feature.
    kind: str
    #: Orders of a series, ascending; the power.
    orders: tuple[int, ...] = ()
    #: a_n, if they are given.
    given: tuple[float, ...] | None = None
    #: Whether a_n are learned per head.
    learned: bool = False
    #: φ of a feature: identity, elu, relu, l2 or hedgehog.
    map: str = "identity"


class Kernel(KernelFields):
    """w(x). A subclass, since a named tuple cannot cache properties."""

    @cached_property
    def degree(self) -> int:
        return self.orders[-1] if self.orders else 1

    @cached_property
    def wide(self) -> bool:
        """Whether it cancels in float32: terms of a long series reach e^|x| while their sum is e^-|x|."""
        return self.degree > (8 if self.learned else 4) and len(self.orders) > 1

    @cached_property
    def exp_range(self) -> tuple[float, float] | None:
        """Range of scores in which a prefix of the series and its derivative equal exp within float32 rounding; None if the range is small."""
        if not self.is_prefix or self.degree < 2:
            return None

        def close(x: float) -> bool:
            # The remainder is at most its first term times 1/(1 - |x|/(p + 2)). The bound of the derivative is larger.
            p = self.degree - 1
            if abs(x) >= p + 2:
                return False
            first = exp((p + 1) * log(abs(x)) - lgamma(p + 2))
            return first / (1 - max(x, 0.0) / (p + 2)) < 1.5e-8 * exp(x)

        low, high = (max((i / 8 for i in range(1, 640) if close(sign * i / 8)), default=0.0) for sign in (-1, 1))
        return (-low, high) if low >= 6 else None

    @cached_property
    def is_prefix(self) -> bool:
        """Orders 0..p with Taylor's coefficients."""
        return self.kind == "taylor" and len(self.orders) == self.degree + 1 and self.given is None and not self.learned

    @cached_property
    def dense(self) -> tuple[float, ...]:
        """a_n/n! for n = 0..p; learned a_n count as 1."""
        if self.kind == "power":
            return (0.0,) * self.degree + (1.0,)
        numbers = self.given or (1.0,) * len(self.orders)
        by_order = dict(zip(self.orders, numbers, strict=True))
        return tuple(by_order.get(n, 0.0) / factorial(n) for n in range(self.degree + 1))


class ScoreFn(NamedTuple):
    """The weight of near or far keys: w(min(cap(x), clamp)), x = scale·q·k."""

    kernel: Kernel
    scale: float
    cap: float | None
    clamp: float | None
    dim: int | None
    #: Orders and a_n of the polynomial in x that a state holds; None without a finite state.
    state: tuple[tuple[int, float], ...] | None

    @property
    def is_exp(self) -> bool:
        return self.kernel.kind == "exp"


class Variant(NamedTuple):
    """One attention: the part in each slot of the formula."""

    text: str
    near: ScoreFn
    far: ScoreFn | None
    window: int | None
    sinks: int
    #: Range of β and scale_k of a write rule.
    write: tuple[float, float] | None
    denominator: str
    floor: float | None
    eps: float | None
    detached: bool
    sink: bool
    in_gate: bool
    out_gate: str | None
    post_gate: str | None
    post_by_channel: bool
    decay: str | None
    decay_by_channel: bool
    decay_divisor: float
    qk_norm: str | None
    qk_norm_over_heads: bool
    qk_norm_eps: float
    norm: str
    rope: bool
    conv: int | None
    #: How overflow of rows is avoided: none, subtract (the row maximum), or multiply (polynomials of high degree).
    rescale: str

    @property
    def sums(self) -> bool:
        return self.denominator == "sum"

    @property
    def restores_scale(self) -> bool:
        """Whether the scale of a row must be restored in the norm."""
        return self.rescale != "none" and not self.sums

    @property
    def remembered(self) -> ScoreFn | None:
        """The score function of keys outside of the window; None if they are dropped."""
        return self.far if self.window is not None else self.near

    def visible(self, t: int) -> int:
        """S_t: number of visible keys at position t."""
        if self.far is not None or self.window is None:
            return t + 1
        end = max(0, t + 1 - self.window)
        return t + 1 - (end - min(self.sinks, end))


class Parts(NamedTuple):
    """A layer: its distinct variants with their heads, and its RoPE."""

    variants: tuple[tuple[Variant, tuple[int, ...]], ...]
    frequencies: tuple[float, ...] | None
    rope_factor: float


def _score_fn(found: dict[str, Any]) -> ScoreFn:
    kernel: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in found["kernel"].items()}
    kernel["map"] = kernel["map"] or "identity"
    state = found["state"]
    return ScoreFn(
        kernel=Kernel(**kernel),
        scale=found["scale"],
        cap=found["cap"],
        clamp=found["clamp"],
        dim=found["dim"],
        state=None if state is None else tuple((n, a) for n, a in state),
    )


def _variant(found: dict[str, Any]) -> Variant:
    total = found["sum"] or {"floor": None, "eps": None, "detached": False, "sink": False}
    post = found["post_gate"] or {"kind": None, "channel": False}
    decay = found["decay"] or {"kind": None, "channel": False, "divisor": 1.0}
    qk_norm = found["qk_norm"] or {"kind": None, "over_heads": False, "eps": 0.0}
    write = found["write"]
    same = {key: found[key] for key in ("text", "window", "denominator", "in_gate", "out_gate", "norm", "rope", "conv", "rescale")}
    if found["pooled"] is not None:
        raise ValueError(
            f"{found['text']!r}: `{found['pooled']}` needs the KV store of the native engine; remove it, or use the native engine on the CPU"
        )
    return Variant(
        near=_score_fn(found["near"]),
        far=None if found["far"] is None else _score_fn(found["far"]),
        sinks=found["sinks"] or 0,
        write=None if write is None else (write["range"], write["scale"]),
        post_gate=post["kind"],
        post_by_channel=post["channel"],
        decay=decay["kind"],
        decay_by_channel=decay["channel"],
        decay_divisor=decay["divisor"],
        qk_norm=qk_norm["kind"],
        qk_norm_over_heads=qk_norm["over_heads"],
        qk_norm_eps=qk_norm["eps"],
        **total,
        **same,
    )


def read(text: str) -> Parts:
    """The parts in the JSON of a layer."""
    found = json.loads(text)
    heads = [tuple(h for h, index in enumerate(found["of_head"]) if index == i) for i in range(len(found["variants"]))]
    rope = found["rope"]
    return Parts(
        variants=tuple((_variant(variant), own) for variant, own in zip(found["variants"], heads, strict=True)),
        frequencies=None if rope is None else tuple(rope["frequencies"]),
        rope_factor=1.0 if rope is None else rope["factor"],
    )
