"""The module: projections, the parameters of the variant, and the forms of the computation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .extras import _add_extras, _extras_of
from .parts import Parts, Variant, _variant
from .recurrent import Past, attend_whole, extend
from .variant import VARIANT


class Extra(NamedTuple):
    """A projection or parameter other than those of q, k and v."""

    #: Name in the engine, and in checkpoints.
    name: str
    tensor: str
    shape: tuple[int, ...]
    #: Whether it is a projection of the hidden state, with or without a bias.
    logits: bool = False
    bias: bool = True
    #: Constant, or uniform between the number and its negative.
    init: tuple[str, float] = ("constant", 0.0)
    trained: bool = True


def extras_of_variant(variant: Variant, heads: int, kv_heads: int, dim: int) -> Iterator[Extra]:
    """The projections and parameters that a variant reads."""
    if variant.in_gate:
        yield Extra("in_gate", "in_gate_proj", (kv_heads,), logits=True)
    if variant.out_gate is not None:
        yield Extra("out_gate", "out_gate_proj", (heads,), logits=True)
    if variant.post_gate in ("sigmoid", "silu"):
        yield Extra("post_gate", "post_gate_proj", (heads * (dim if variant.post_by_channel else 1),), logits=True)
    if variant.decay not in (None, "fixed"):
        near = variant.near
        channels = (2 if near.kernel.map == "hedgehog" else 1) * (near.dim or dim) if variant.decay_by_channel else 1
        yield Extra("decay_gate", "decay_gate_proj", (heads * channels,), logits=True, bias=VARIANT["decay"]["bias"])
    if variant.write is not None:
        yield Extra("beta", "beta_proj", (kv_heads,), logits=True)
    if variant.decay == "mamba":
        yield Extra("decay_rate", "decay_rate", (heads,), init=("constant", -3.0))
    if variant.qk_norm == "rms":
        for name, count in (("q_norm", heads), ("k_norm", kv_heads)):
            yield Extra(name, f"{name}.weight", (count * dim if variant.qk_norm_over_heads else dim,), init=("constant", 1.0))
    if variant.norm in ("rms", "layer"):
        yield Extra("norm_weight", "out_norm.weight", (dim,), init=("constant", 1.0))
    if variant.norm == "layer":
        yield Extra("norm_bias", "out_norm.bias", (dim,))
    if variant.denominator == "position":
        yield Extra("norm_const", "norm_const", (1, heads, 1, 1), init=("constant", 0.5))
    if variant.sink:
        yield Extra("sink", "sinks", (heads,))
    if variant.conv is not None:
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield Extra(f"conv_{name}", f"{name}_conv1d.weight", (count * dim, 1, variant.conv), init=("uniform", variant.conv**-0.5))
    for score_fn, name, tensor in ((variant.near, "", ""), (variant.far, "far_", "far.")):
        if score_fn is None:
            continue
        if score_fn.kernel.learned:
            yield Extra(f"{name}coefficients", f"{tensor}coefficients", (heads, len(score_fn.kernel.orders)), init=("constant", 1.0))
        width = score_fn.dim or dim
        for side, count in (("q", heads), ("k", kv_heads)):
            if score_fn.dim is not None:
                yield Extra(f"{name}dim_{side}", f"{tensor}{side}_dim.weight", (count, width, dim), init=("uniform", (3 / dim) ** 0.5))
            if score_fn.kernel.map == "hedgehog":
                yield Extra(f"{name}feature_{side}", f"{tensor}{side}_feature.weight", (count, width, width), init=("uniform", (3 / width) ** 0.5))
                yield Extra(f"{name}feature_{side}_bias", f"{tensor}{side}_feature.bias", (count, width))


class Attention(nn.Module):
    """Causal self-attention: x [batch, time, hidden] becomes y [batch, time, hidden]."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        rope: float = 10000.0,
        **sizes: int,
    ) -> None:
        """``sizes`` are window, sinks, dim and far_dim, if they are not to be those of the variant."""
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.head_dim = d = head_dim or hidden // heads
        found = {**VARIANT, **{name: sizes.pop(name) for name in ("window", "sinks") if name in sizes}}
        for place, key in (("near", "dim"), ("far", "far_dim")):
            if found[place] is not None:
                dim = sizes.pop(key, found[place]["dim"])
                scale = found[place]["scale"]
                found[place] = {**found[place], "dim": dim, "scale": (dim or d) ** -0.5 if scale is None else scale}
        if sizes:
            raise TypeError(f"the variant {found['text']!r} has no {', '.join(sizes)}")
        self.variant = _variant(found)
        frequencies = tuple(rope ** (-2 * i / d) for i in range(d // 2))
        self.parts = Parts(((self.variant, tuple(range(heads))),), frequencies if self.variant.rope else None, 1.0)
        self.extras = tuple(extras_of_variant(self.variant, heads, self.kv_heads, d))
        self.q_proj = nn.Linear(hidden, heads * d, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(heads * d, hidden, bias=bias)
        _add_extras(self, self, hidden, {})

    def _inputs(self, x: Tensor) -> tuple[Any, ...]:
        q, k, v = (project(x).unflatten(2, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        return self.variant, self.parts, q, k, v, _extras_of(self, self, x)

    def forward(self, x: Tensor, mode: str = "auto") -> Tensor:
        """All positions; ``mode`` is "parallel", "chunk", "chunk=LENGTH", if the kernel has a finite state, or "auto"."""
        return self.o_proj(attend_whole(*self._inputs(x), mode).flatten(2))

    def parallel(self, x: Tensor) -> Tensor:
        """Every query meets all keys that it sees, a block of queries at a time."""
        return self(x, "parallel")

    def chunk(self, x: Tensor, size: int = 64) -> Tensor:
        """One call of ``extend`` per chunk."""
        outputs, state = [], None
        for part in x.split(size, 1):
            y, state = self.extend(part, state)
            outputs.append(y)
        return torch.cat(outputs, 1)

    def recurrent(self, x: Tensor) -> Tensor:
        """One position after the other, as text is generated."""
        return self.chunk(x, 1)

    def extend(self, x: Tensor, state: Past | None = None) -> tuple[Tensor, Past]:
        """Outputs of the positions x [batch, time, hidden] after those of ``state``, and the state after them."""
        y, state = extend(*self._inputs(x), state)
        return self.o_proj(y.flatten(2)), state

    def step(self, x: Tensor, state: Past | None = None) -> tuple[Tensor, Past]:
        """One position x [batch, 1, hidden]."""
        return self.extend(x, state)


class CausalSelfAttention(Attention):
    """Replaces the class of this name in nanoGPT. RoPE, if the variant has it, is added to learned positions."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.n_embd, config.n_head, bias=config.bias)
