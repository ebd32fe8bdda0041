"""The operators, the function and the module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from .._attention import PAD, Layer, Variants, _layer, _warn_nonpositive
from .._core import Variant
from .engine import attend

#: Arguments of scaled_dot_product_attention, and what stands for them here.
_ELSEWHERE = {
    "scale": "the variant has it, as in 'softmax scale=0.5'",
    "is_causal": "attention is always causal",
    "attn_mask": "attention is causal, with windows by the variant and padding by lengths",
    "dropout_p": "weights are not dropped",
    "enable_gqa": "k and v with fewer heads than q are grouped without it",
}
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


#: Layers with a rope that is more than a base, by a name that the operator is given in the place of a variant.
_registered: WeakValueDictionary[str, Layer] = WeakValueDictionary()
_numbers = count()


def register(layer: Layer) -> str:
    """A name for a layer that stands for its variants and its rope, as long as the layer is there."""
    known = next((key for key, other in _registered.items() if other is layer), None)
    key = known or f"layer={next(_numbers)}"
    _registered[key] = layer
    return key


def _find(variant: str, heads: int, kv_heads: int, dim: int, value_dim: int, rope: float | None) -> Layer:
    if (layer := _registered.get(variant)) is not None:
        return layer
    variants = tuple(variant.split("|"))
    return _layer(variants[0] if len(variants) == 1 else variants, heads, kv_heads, dim, value_dim, rope)


@torch.compiler.assume_constant_result
def _facts(variant: str, heads: int, kv_heads: int, dim: int, value_dim: int, rope: float | None) -> tuple[bool, str | None, tuple[Any, ...]]:
    """What compiled code may know of a layer: whether it is fused, why it has no backward pass, and of each extra its name, whether it is logits, whether it is trained,
    its shape."""
    layer = _find(variant, heads, kv_heads, dim, value_dim, rope)
    without = ((own, own.inference_only) for own in layer.variants)
    refusal = next((f"{str(own)!r}: `{part}` is inference-only and has no backward pass; compute under torch.no_grad(), or train without `{part}`" for own, part in without if part), None)
    return layer._core.is_fused, refusal, tuple((extra.name, extra.logits, extra.trained, extra.shape) for extra in layer.extras)


@torch.compiler.disable
def _complain(variant: str, heads: int, kv_heads: int, dim: int, value_dim: int, rope: float | None, names: tuple[str, ...]) -> None:
    """Raises where names are missing or unknown."""
    _find(variant, heads, kv_heads, dim, value_dim, rope)._extras(dict.fromkeys(names, True))


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    return q.shape[2], k.shape[2], q.shape[3], v.shape[3]


def _array(x: Tensor, dtype: torch.dtype) -> Any:
    """The tensor's own memory, where it is of that type."""
    return x.detach().to(dtype).numpy()


def _given(q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], lengths: Tensor | None, dtype: torch.dtype) -> tuple[Any, ...]:
    arrays = [_array(x, dtype) for x in (q, k, v)]
    return *arrays, [_array(x, dtype) for x in extras], None if lengths is None else lengths.tolist(), None


def _working(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _saved_shapes(q: Tensor, v: Tensor, saves: bool) -> list[tuple[Any, ...]]:
    batch, time, heads = q.shape[:3]
    if not saves:
        return [(0,), (0,), (0,)]
    return [(batch, heads, time, (v.shape[3] + PAD - 1) // PAD * PAD), (batch, heads, time), (batch, heads, time)]


@torch.library.custom_op("termwise::attention", mutates_args=(), device_types="cpu")
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Sequence[Tensor],
    lengths: Tensor | None,
    variant: str,
    rope: float | None,
    mode: str,
    reference: bool,
    saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, and if asked for what the backward pass needs: U, z and ρ of every row; the reference computes all anew."""
    layer, dtype = _find(variant, *_sizes(q, k, v), rope), _working(q)
    saves = saves and not reference and dtype == torch.float32
    y = torch.empty((*q.shape[:3], v.shape[3]), dtype=dtype)
    saved = [torch.empty(shape, dtype=torch.float32) for shape in _saved_shapes(q, v, saves)]
    given = _given(q, k, v, extras, lengths, dtype)
    _warn_nonpositive(layer, layer._core.forward(given, y.numpy(), [x.numpy() for x in saved] if saves else None, not reference, mode))
    return y.to(q.dtype), *saved


@_attention.register_fake
def _(q, k, v, extras, lengths, variant, rope, mode, reference, saves):  # type: ignore[no-untyped-def]
    saves = saves and not reference and q.dtype != torch.float64
    saved = [q.new_empty(shape, dtype=torch.float32) for shape in _saved_shapes(q, v, saves)]
    return q.new_empty((*q.shape[:3], v.shape[3])), *saved


@torch.library.custom_op("termwise::attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Sequence[Tensor],
    lengths: Tensor | None,
    saved: Sequence[Tensor],
    dy: Tensor,
    variant: str,
    rope: float | None,
    mode: str,
    reference: bool,
) -> list[Tensor]:
    """Gradients of q, k, v and the extras."""
    layer, dtype = _find(variant, *_sizes(q, k, v), rope), _working(q)
    inputs = (q, k, v, *extras)
    grads = [torch.zeros(x.shape, dtype=dtype) for x in inputs]
    given = _given(q, k, v, extras, lengths, dtype)
    kept = [x.detach().numpy() for x in saved] if saved[0].numel() else None
    layer._core.backward(given, kept, _array(dy, dtype), [x.numpy() for x in grads], not reference, mode)
    return [grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True)]


@_attention_backward.register_fake
def _(q, k, v, extras, lengths, saved, dy, variant, rope, mode, reference):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, *extras)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, extras, lengths, ctx.variant, ctx.rope, ctx.mode, ctx.reference, _ = inputs
    ctx.save_for_backward(q, k, v, lengths, *output[1:], *extras)


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    q, k, v, lengths, *rest = ctx.saved_tensors
    saved, extras = rest[:3], rest[3:]
    grads = torch.ops.termwise.attention_backward(
        q, k, v, extras, lengths, saved, dy.contiguous(), ctx.variant, ctx.rope, ctx.mode, ctx.reference
    )
    return *grads[:3], grads[3:], None, None, None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup)


@torch.compiler.disable
def _attend(
    text: str,
    sizes: tuple[int, int, int, int],
    rope: float | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    names: tuple[str, ...],
    values: Sequence[Tensor],
    lengths: Tensor | None,
    mode: str,
) -> Tensor:
    return attend(_find(text, *sizes, rope), q, k, v, dict(zip(names, values, strict=True)), lengths=lengths, mode=mode)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variants = "softmax",
    *,
    rope: float | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    engine: str = "auto",
    mode: str = "auto",
    **extras: Tensor,
) -> Tensor:
    """Causal attention of any variant, as :func:`termwise.attention`, with gradients.

    q is [batch, time, heads, dim], k and v have [batch, time, kv_heads, …]. Note the order: that of ``torch.nn.functional`` has heads before time.

    engine: ``"fused"`` and ``"reference"`` are those of the extension, for tensors on the processor; ``"torch"`` is plain torch operations on any device; ``"auto"`` takes the
    extension's where it can.
    """
    given = {"q": q, "k": k, "v": v, **extras}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            if name in _ELSEWHERE:
                raise TypeError(f"attention has no argument {name!r}: {_ELSEWHERE[name]}")
            raise TypeError(f"{name} is a {type(x).__name__}, not a tensor: use termwise.attention for arrays, or torch.as_tensor")
        if x.device != q.device:
            raise ValueError(f"q is on {q.device} and {name} on {x.device}: move them to one device")
        if x.dtype not in _FLOATS:
            raise TypeError(f"{name} is {x.dtype}: convert it to float32, bfloat16, float16 or float64")
        if x.layout != torch.strided:
            raise TypeError(f"{name} is {x.layout}: make it dense with .to_dense()")
    if len({x.dtype for x in (q, k, v)}) > 1:
        raise TypeError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: convert them to one dtype")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected [batch, time, heads, dimension], none of them 0")
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k and v have shapes {shapes}, expected [batch, time, heads, dim] and twice [batch, time, kv_heads, …]: tensors are not transposed here")
    text = _text(variant)
    fused, refusal, known = _facts(text, *_sizes(q, k, v), rope)
    if len(known) != len(extras) or any(name not in extras for name, *_ in known):
        _complain(text, *_sizes(q, k, v), rope, tuple(extras))
    values = []
    for name, logits, trained, shape in known:
        x = extras[name]
        expected = (*q.shape[:2], *shape) if logits else shape
        if x.numel() != math.prod(expected) or (logits and x.shape[:2] != q.shape[:2]):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {tuple(expected)}")
        if not trained and x.requires_grad:
            raise ValueError(f"{name} is calibrated, not trained, and has no gradient: give it with .detach()")
        values.append(x.to(q.dtype) if q.dtype in (torch.float32, torch.float64) else x)
    if lengths is not None:
        lengths = _lengths(lengths, *q.shape[:2])
    if engine not in ("auto", "fused", "reference", "torch"):
        raise ValueError(f"an engine is 'auto', 'fused', 'reference' or 'torch', found {engine!r}")
    train = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *values))
    if train and refusal:
        raise ValueError(refusal)
    here = q.device.type in ("cpu", "meta")
    if engine in ("fused", "reference") and not here:
        raise ValueError(f"q is on {q.device}, and engine={engine!r} computes on the processor: use engine='torch', or move tensors with .cpu()")
    if engine == "torch" or not here:
        return _attend(text, _sizes(q, k, v), rope, q, k, v, tuple(name for name, *_ in known), values, lengths, mode)
    if engine == "fused" and not fused:
        raise ValueError(f"{text!r} has a part that only the reference computes so far: use engine='auto'")
    reference = engine == "reference" or not fused
    return torch.ops.termwise.attention(q, k, v, values, lengths, text, rope, mode, reference, train)[0]


def _text(variant: Variants) -> str:
    """The operators' own form: texts joined by a bar."""
    if isinstance(variant, (str, Variant)):
        return str(variant)
    if not isinstance(variant, Sequence):
        raise TypeError(f"a variant is a text such as 'taylor=0..4 norm=l2', a Variant, or one for each head, found {type(variant).__name__}")
    return "|".join(str(one) for one in variant)


def _lengths(lengths: Tensor | Sequence[int], batch: int, time: int) -> Tensor:
    found = torch.as_tensor(lengths, device="cpu")
    if found.shape != (batch,) or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise ValueError(f"lengths are whole numbers [batch], here {batch} of them, found shape {tuple(found.shape)} of {found.dtype}")
    # Compiled code cannot ask for values.
    if not torch.compiler.is_compiling() and (bool((found < 0).any()) or bool((found > time).any())):
        raise ValueError(f"lengths are from 0 to {time} positions, found {found.tolist()}")
    return found.to(torch.int64)


def _add_extras(module: nn.Module, layer: Layer, hidden: int, make: dict[str, Any]) -> None:
    """Gives a module the projections and parameters that a layer reads, under their names in checkpoints."""
    for extra in layer.extras:
        if extra.logits:
            module.add_module(extra.tensor, nn.Linear(hidden, extra.shape[0], bias=extra.bias, **make))
            continue
        start = torch.empty(extra.shape, **make)
        kind, x = extra.init
        nn.init.constant_(start, x) if kind == "constant" else nn.init.uniform_(start, -x, x)
        place, _, name = extra.tensor.rpartition(".")
        owner = module
        for part in place.split(".") if place else []:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(name, nn.Parameter(start, requires_grad=extra.trained))


def _extras_of(module: nn.Module, layer: Layer, x: Tensor) -> dict[str, Tensor]:
    """What a layer reads beyond q, k and v, for hidden states x."""
    found = {}
    for extra in layer.extras:
        value: Any = module
        for part in extra.tensor.split("."):
            value = getattr(value, part)
        value = value(x) if extra.logits else value
        # Those who load parameters may say that all of them are trained.
        found[extra.name] = value if extra.trained else value.detach()
    return found


class Attention(nn.Module):
    """A layer of causal self-attention: projections, gates and parameters of any variant, under the names that checkpoints of termwise have below ``self_attn.``.

    x [batch, time, hidden] becomes [batch, time, hidden]: ``Attention(512, 8, variant="taylor=0..4 norm=l2 out")(x)``.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        dim: int | None = None,
        variant: Variants = "softmax",
        rope: float | None = 10000.0,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim is None and hidden % heads:
            raise ValueError(f"hidden={hidden} is not a multiple of heads={heads}: change one of them, or give dim")
        dim = hidden // heads if dim is None else dim
        self.layer = Layer(variant, heads=heads, kv_heads=kv_heads, dim=dim, rope=rope)
        self.variant = str(variant) if isinstance(variant, (str, Variant)) else tuple(str(one) for one in variant)
        make = {"device": device, "dtype": dtype}
        kv = self.layer.kv_heads
        self.q_proj = nn.Linear(hidden, heads * dim, bias=bias, **make)
        self.k_proj = nn.Linear(hidden, kv * dim, bias=bias, **make)
        self.v_proj = nn.Linear(hidden, kv * dim, bias=bias, **make)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=bias, **make)
        _add_extras(self, self.layer, hidden, make)

    def forward(self, x: Tensor, lengths: Tensor | Sequence[int] | None = None) -> Tensor:
        """[batch, time, hidden]; positions from a row's length on are padding."""
        batch, time, _ = x.shape
        heads, kv, dim = self.layer.heads, self.layer.kv_heads, self.layer.dim
        q = self.q_proj(x).view(batch, time, heads, dim)
        k = self.k_proj(x).view(batch, time, kv, dim)
        v = self.v_proj(x).view(batch, time, kv, dim)
        y = attention(q, k, v, self.variant, rope=self.layer.rope, lengths=lengths, **_extras_of(self, self.layer, x))
        return self.o_proj(y.reshape(batch, time, heads * dim))

    def extra_repr(self) -> str:
        return f"{self.layer!r}"
