"""The operators, the function :func:`attention` and the module :class:`Attention`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count, pairwise
from typing import Any, Literal, overload
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .._attention import PAD, Layer, State, Variants, _layer, _warn_nonpositive
from .._core import Variant
from .._errors import InputError
from .engine import attend
from .engine.extras import _add_extras, _extras_of

#: Arguments of scaled_dot_product_attention, and their equivalents here.
_ELSEWHERE = {
    "is_causal": "attention is always causal",
    "attn_mask": "attention is causal; a window is part of the variant, and padding is given by lengths",
    "dropout_p": "dropout is not supported",
    "enable_gqa": "k and v may always have fewer heads than q",
}
#: Engines of :func:`attention`.
Engine = Literal["auto", "fused", "reference", "torch"]
#: Backends of the PyTorch engine.
Backend = Literal["blocked", "flex"]
Integers = Tensor | Sequence[int]
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


#: Layers whose RoPE is not given by a base alone, by the name that the operator receives instead of a variant string.
_registered: WeakValueDictionary[str, Layer] = WeakValueDictionary()
_numbers = count()


def register(layer: Layer) -> str:
    """Return the name under which the operator finds a layer while the layer exists."""
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
def _facts(variant: str, heads: int, kv_heads: int, dim: int, value_dim: int, rope: float | None) -> tuple[str | None, tuple[Any, ...]]:
    """Constants of a layer for compiled code: the reason why it has no backward pass, and name, whether logits, and shape of each auxiliary input."""
    layer = _find(variant, heads, kv_heads, dim, value_dim, rope)
    without = ((own, own.inference_only) for own in layer.variants)
    refusal = next((f"{str(own)!r}: `{part}` is inference-only and has no backward pass; compute under torch.no_grad(), or train without `{part}`" for own, part in without if part), None)
    return refusal, tuple((extra.name, extra.logits, extra.shape) for extra in layer.extras)


@torch.compiler.disable
def _complain(variant: str, heads: int, kv_heads: int, dim: int, value_dim: int, rope: float | None, names: tuple[str, ...]) -> None:
    """Raise an error for missing or unknown names."""
    _find(variant, heads, kv_heads, dim, value_dim, rope)._extras(dict.fromkeys(names, True))


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    return q.shape[2], k.shape[2], q.shape[3], v.shape[3]


def _array(x: Tensor, dtype: torch.dtype) -> Any:
    """The memory of the tensor if it has this type, otherwise a copy."""
    return x.detach().to(dtype).numpy()


def _given(q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], spans: Sequence[Tensor | None], dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of the extension. ``spans`` are lengths and the starts of documents."""
    arrays = [_array(x, dtype) for x in (q, k, v)]
    return *arrays, [_array(x, dtype) for x in extras], *(None if x is None else x.tolist() for x in spans)


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
    cu_seqlens: Tensor | None,
    variant: str,
    rope: float | None,
    mode: str,
    reference: bool,
    saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, and U, z and ρ of every row if the backward pass needs them. The reference saves nothing."""
    layer, dtype = _find(variant, *_sizes(q, k, v), rope), _working(q)
    saves = saves and not reference and dtype == torch.float32
    y = torch.empty((*q.shape[:3], v.shape[3]), dtype=dtype)
    saved = [torch.empty(shape, dtype=torch.float32) for shape in _saved_shapes(q, v, saves)]
    given = _given(q, k, v, extras, (lengths, cu_seqlens), dtype)
    _warn_nonpositive(layer, layer._core.forward(given, y.numpy(), [x.numpy() for x in saved] if saves else None, not reference, mode))
    return y.to(q.dtype), saved[0], saved[1], saved[2]


@_attention.register_fake
def _(q, k, v, extras, lengths, cu_seqlens, variant, rope, mode, reference, saves):  # type: ignore[no-untyped-def]
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
    cu_seqlens: Tensor | None,
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
    grads = [torch.empty(x.shape, dtype=dtype) for x in inputs]
    arrays = [x.numpy() for x in grads]
    for array in arrays:
        # Filled by this thread: the threads of a parallel fill in PyTorch would spin afterwards and take time from those of the extension.
        array.fill(0)
    given = _given(q, k, v, extras, (lengths, cu_seqlens), dtype)
    kept = [x.detach().numpy() for x in saved] if saved[0].numel() else None
    layer._core.backward(given, kept, _array(dy, dtype), arrays, not reference, mode)
    return [grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True)]


@_attention_backward.register_fake
def _(q, k, v, extras, lengths, cu_seqlens, saved, dy, variant, rope, mode, reference):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, *extras)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, extras, lengths, cu_seqlens, ctx.variant, ctx.rope, ctx.mode, ctx.reference, _ = inputs
    # Otherwise PyTorch fills gradients of U, z and ρ with zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, lengths, cu_seqlens, *output[1:], *extras)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    q, k, v, lengths, cu_seqlens, *rest = ctx.saved_tensors
    saved, extras = rest[:3], rest[3:]
    if dy is None:
        return None, None, None, [None] * len(extras), *[None] * 7
    grads = torch.ops.termwise.attention_backward(
        q, k, v, extras, lengths, cu_seqlens, saved, dy.contiguous(), ctx.variant, ctx.rope, ctx.mode, ctx.reference
    )
    return *grads[:3], grads[3:], *[None] * 7


_attention.register_autograd(_backward, setup_context=_setup)


# Not traced: the autograd functions of the engine call autograd to recompute blocks in the backward pass. Traced blocks would keep all T×T weights instead.
@torch.compiler.disable
def _attend(key: tuple[Any, ...], x: tuple[Tensor, ...], extras: Mapping[str, Tensor], spans: tuple[Tensor | None, Tensor | None], mode: str) -> Tensor:
    """The PyTorch engine. ``key`` are the arguments of :func:`_find`."""
    return _attend_documents(_find(*key), x, extras, spans, mode=mode)


def _attend_documents(
    layer: Layer, x: tuple[Tensor, ...], extras: Mapping[str, Tensor], spans: tuple[Tensor | None, Tensor | None], **options: Any
) -> Tensor:
    """One document at a time."""
    (q, k, v), (lengths, cu_seqlens) = x, spans
    if cu_seqlens is None:
        return attend(layer, q, k, v, extras, lengths=lengths, **options)
    logits = {extra.name for extra in layer.extras if extra.logits}

    def document(start: int, end: int) -> Tensor:
        own = {name: x[:, start:end] if name in logits else x for name, x in extras.items()}
        return attend(layer, q[:, start:end], k[:, start:end], v[:, start:end], own, **options)

    return torch.cat([document(*pair) for pair in pairwise(cu_seqlens.tolist())], 1)


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, variant: Variants = ..., *, scale: float | None = ..., rope: float | None = ..., lengths: Integers | None = ..., cu_seqlens: Integers | None = ...,
    initial_state: State | None = ..., output_final_state: Literal[False] = ..., engine: Engine = ..., backend: Backend = ..., mode: str = ..., **extras: Tensor,
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, variant: Variants = ..., *, scale: float | None = ..., rope: float | None = ..., lengths: Integers | None = ..., cu_seqlens: Integers | None = ...,
    initial_state: State | None = ..., output_final_state: Literal[True], engine: Engine = ..., backend: Backend = ..., mode: str = ..., **extras: Tensor,
) -> tuple[Tensor, State]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, variant: Variants = ..., *, scale: float | None = ..., rope: float | None = ..., lengths: Integers | None = ..., cu_seqlens: Integers | None = ...,
    initial_state: State | None = ..., output_final_state: bool, engine: Engine = ..., backend: Backend = ..., mode: str = ..., **extras: Tensor,
) -> Tensor | tuple[Tensor, State]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variants = "softmax",
    *,
    scale: float | None = None,
    rope: float | None = None,
    lengths: Integers | None = None,
    cu_seqlens: Integers | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    engine: Engine = "auto",
    backend: Backend = "blocked",
    mode: str = "auto",
    **extras: Tensor,
) -> Tensor | tuple[Tensor, State]:
    """Causal attention of any variant, with gradients.

    Parameters
    ----------
    q : Tensor
        Queries [batch, time, heads, dim]. In ``torch.nn.functional`` heads come before time.
    k, v : Tensor
        Keys [batch, time, kv_heads, dim] and values [batch, time, kv_heads, value_dim].
    variant : str, Variant or sequence
        A variant such as ``"taylor=0..4 norm=l2"``, or one per head.
    scale : float, optional
        Factor of the scores, if the variant has no ``scale``. Default: ``1 / sqrt(dim)``.
    rope : float, optional
        Base of the rotary frequencies. Without it q and k are not rotated.
    lengths : sequence of int, optional
        Length of each batch row. Later positions are padding, and their output is zero.
    cu_seqlens : sequence of int, optional
        Boundaries of packed sequences ``[0, ..., time]``, as in flash-attn and flash-linear-attention. The batch must be 1.
    initial_state : State, optional
        The state to continue from, which stays unchanged. States have no gradients: call it under ``torch.no_grad()``.
    output_final_state : bool
        Also return the state after the last position.
    engine : {"auto", "fused", "reference", "torch"}
        ``"fused"`` and ``"reference"`` are the engines of the extension, for CPU tensors. ``"torch"`` uses PyTorch operations on any device; it has first derivatives only.
        ``"auto"`` uses the extension if it can.
    backend : {"blocked", "flex"}
        How the PyTorch engine computes the sums over keys. ``"flex"`` uses FlexAttention, one fused kernel on a GPU, for variants with non-negative weights; it raises an error
        that names the reason for others. It implies ``engine="torch"``. Its backward pass has not been run on a GPU, and there is none on the CPU.
    mode : str
        ``"parallel"``, ``"chunk"``, ``"chunk=64"`` or ``"auto"``.
    **extras : Tensor
        Gate logits and parameters of the variant by name; :attr:`termwise.Layer.extras` lists them.

    Returns
    -------
    Tensor or (Tensor, State)
        Outputs [batch, time, heads, value_dim], and the state if ``output_final_state``.

    Examples
    --------
    >>> import torch, termwise.torch
    >>> q = k = v = torch.randn(1, 6, 2, 8)
    >>> termwise.torch.attention(q, k, v, "taylor=0..4 norm=l2").shape
    torch.Size([1, 6, 2, 8])
    """
    given = {"q": q, "k": k, "v": v, **extras}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            if name in _ELSEWHERE:
                raise TypeError(f"attention has no argument {name!r}: {_ELSEWHERE[name]}")
            raise TypeError(f"{name} is a {type(x).__name__}, not a tensor: use termwise.attention for arrays, or torch.as_tensor")
        if x.device != q.device:
            raise InputError(f"q is on {q.device} and {name} on {x.device}: move them to one device")
        if x.dtype not in _FLOATS:
            raise TypeError(f"{name} is {x.dtype}: convert it to float32, bfloat16, float16 or float64")
        if x.layout != torch.strided:
            raise TypeError(f"{name} is {x.layout}: convert it with .to_dense()")
    if len({x.dtype for x in (q, k, v)}) > 1:
        raise TypeError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: convert them to one dtype")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape[2:]:
            raise InputError(f"{name} has shape {tuple(x.shape)}, expected [batch, time, heads, dimension] with heads and dimension above 0")
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise InputError(f"q, k and v have shapes {shapes}, expected [batch, time, heads, dim], [batch, time, kv_heads, dim] and [batch, time, kv_heads, value_dim]: heads come after time")
    text = _text(variant) if scale is None else _scaled(_text(variant), float(scale))
    key = (text, *_sizes(q, k, v), rope)
    refusal, known = _facts(*key)
    if len(known) != len(extras) or any(name not in extras for name, *_ in known):
        _complain(*key, tuple(extras))
    values = []
    for name, logits, shape in known:
        x = extras[name]
        expected = (*q.shape[:2], *shape) if logits else shape
        if x.numel() != math.prod(expected) or (logits and x.shape[:2] != q.shape[:2]):
            raise InputError(f"{name} has shape {tuple(x.shape)}, expected {tuple(expected)}")
        values.append(x.to(q.dtype) if q.dtype in (torch.float32, torch.float64) else x)
    if lengths is not None:
        lengths = _lengths(lengths, *q.shape[:2])
    if cu_seqlens is not None:
        cu_seqlens = _boundaries(cu_seqlens, *q.shape[:2])
        if lengths is not None:
            raise InputError("lengths and cu_seqlens are both given: give one of them")
    if engine not in ("auto", "fused", "reference", "torch"):
        raise InputError(f"engine must be 'auto', 'fused', 'reference' or 'torch', found {engine!r}")
    if backend not in ("blocked", "flex"):
        raise InputError(f"backend must be 'blocked' or 'flex', found {backend!r}")
    if backend == "flex":
        if engine not in ("auto", "torch"):
            raise InputError(f"backend='flex' needs engine='torch', found engine={engine!r}")
        if mode not in ("auto", "parallel"):
            raise InputError(f"backend='flex' needs mode='parallel' or 'auto', found mode={mode!r}")
        engine = "torch"
    train = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *values))
    if train and refusal:
        raise InputError(refusal)
    names = tuple(name for name, *_ in known)
    if initial_state is not None or output_final_state:
        if train or cu_seqlens is not None or engine not in ("auto", "fused"):
            raise InputError("states have no gradients and need the fused engine: call attention under torch.no_grad(), without cu_seqlens and engine")
        y, state = _continue(key, (q, k, v), dict(zip(names, values, strict=True)), lengths, initial_state)
        return (y, state) if output_final_state else y
    here = q.device.type in ("cpu", "meta")
    if engine in ("fused", "reference") and not here:
        raise InputError(f"q is on {q.device}, and engine={engine!r} computes on the CPU: use engine='torch', or move tensors with .cpu()")
    if not torch.compiler.is_compiling() and any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v, *values)):
        raise InputError("forward-mode derivatives are not supported: use reverse mode, such as torch.autograd.grad")
    if 0 in q.shape[:2]:
        # An empty output that has a gradient.
        return v.repeat_interleave(q.shape[2] // k.shape[2], 2) + 0 * (q.sum() + k.sum() + sum(x.sum() for x in values))
    if backend == "flex":
        # Visible to the compiler, which FlexAttention needs.
        return _attend_documents(_find(*key), (q, k, v), dict(zip(names, values, strict=True)), (lengths, cu_seqlens), backend=backend)
    if engine == "torch" or not here:
        return _attend(key, (q, k, v), dict(zip(names, values, strict=True)), (lengths, cu_seqlens), mode)
    return torch.ops.termwise.attention(q, k, v, values, lengths, cu_seqlens, text, rope, mode, engine == "reference", train)[0]


@torch.compiler.disable
def _continue(key: tuple[Any, ...], x: tuple[Tensor, ...], extras: Mapping[str, Tensor], lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
    """The outputs after a state, and the state after them, computed on the CPU in float32."""
    layer = _find(*key)
    if state is None:
        state = layer.state(x[0].shape[0])
    elif not isinstance(state, State):
        raise TypeError(f"initial_state must be a termwise.State, found {type(state).__name__}")
    elif repr(state.layer) != repr(layer):
        raise InputError(f"initial_state is one of {state.layer!r}, and this call needs one of {layer!r}")
    else:
        state = state.copy()
    arrays = [t.detach().float().cpu().numpy() for t in x]
    own = {name: t.detach().float().cpu().numpy() for name, t in extras.items()}
    y = state.extend(*arrays, lengths=None if lengths is None else lengths.tolist(), mode="auto", **own)
    return torch.from_numpy(y).to(x[0]), state


def _scaled(text: str, scale: float) -> str:
    for one in text.split("|"):
        if any(word.startswith("scale=") for word in one.split()):
            raise InputError(f"{one!r} already has a scale: leave out scale={scale!r}")
    return "|".join(f"{one} scale={scale!r}" for one in text.split("|"))


def _text(variant: Variants) -> str:
    """The argument of the operators: variant strings joined by a bar."""
    if isinstance(variant, (str, Variant)):
        return str(variant)
    if not isinstance(variant, Sequence):
        raise TypeError(f"a variant is a string such as 'taylor=0..4 norm=l2', a Variant, or one per head, found {type(variant).__name__}")
    return "|".join(str(one) for one in variant)


def _integers(name: str, values: Integers, shape: tuple[int, ...] | None = None) -> Tensor:
    found = torch.as_tensor(values, device="cpu")
    if found.ndim != 1 or (shape is not None and found.shape != shape) or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        expected = "one dimension" if shape is None else f"shape {shape}"
        raise InputError(f"{name} must be integers of {expected}, found shape {tuple(found.shape)} of {found.dtype}")
    return found.to(torch.int64)


def _lengths(lengths: Integers, batch: int, time: int) -> Tensor:
    found = _integers("lengths", lengths, (batch,))
    # Compiled code has no access to values.
    if not torch.compiler.is_compiling() and (bool((found < 0).any()) or bool((found > time).any())):
        raise InputError(f"lengths must be from 0 to {time}, found {found.tolist()}")
    return found


def _boundaries(cu_seqlens: Integers, batch: int, time: int) -> Tensor:
    found = _integers("cu_seqlens", cu_seqlens)
    if batch != 1:
        raise InputError(f"cu_seqlens needs a batch of 1, found {batch}: concatenate the sequences along time")
    if not torch.compiler.is_compiling() and (len(found) < 2 or found[0] != 0 or found[-1] != time or bool((found.diff() <= 0).any())):
        raise InputError(f"cu_seqlens must increase from 0 to {time}, found {found.tolist()}")
    return found


class Attention(nn.Module):
    """A layer of causal self-attention with the projections, gates and parameters of any variant.

    Parameters have the names of termwise checkpoints below ``self_attn.``. The module can be copied, pickled and compiled.

    Parameters
    ----------
    hidden : int
        Hidden size of inputs and outputs.
    heads, kv_heads : int
        Query heads and key-value heads. Default ``kv_heads``: ``heads``.
    dim : int, optional
        Head dimension. Default: ``hidden / heads``.
    variant : str, Variant or sequence
        A variant, or one per head.
    rope : float, optional
        Base of the rotary frequencies.
    bias : bool
        Whether projections have a bias.
    engine, backend
        As for :func:`attention`.
    device, dtype
        Of the parameters.

    Examples
    --------
    >>> import torch
    >>> from termwise.torch import Attention
    >>> Attention(64, 4, variant="taylor=0..4 norm=l2 out")(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
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
        engine: Engine = "auto",
        backend: Backend = "blocked",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.engine, self.backend = engine, backend
        if dim is None and hidden % heads:
            raise InputError(f"hidden={hidden} is not a multiple of heads={heads}: change one of them, or give dim")
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

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, [batch, time, heads, dim]."""
        heads, kv_heads, dim = self.layer.heads, self.layer.kv_heads, self.layer.dim
        shape = x.shape[:2]
        return self.q_proj(x).view(*shape, heads, dim), self.k_proj(x).view(*shape, kv_heads, dim), self.v_proj(x).view(*shape, kv_heads, dim)

    def forward(self, x: Tensor, lengths: Integers | None = None, cu_seqlens: Integers | None = None) -> Tensor:
        """Outputs [batch, time, hidden] of hidden states x; ``lengths`` and ``cu_seqlens`` as for :func:`attention`."""
        q, k, v = self._project(x)
        y = attention(
            q, k, v, self.variant, output_final_state=False, rope=self.layer.rope, lengths=lengths, cu_seqlens=cu_seqlens, engine=self.engine, backend=self.backend,
            **_extras_of(self, self.layer, x),
        )  # fmt: skip
        return self.o_proj(y.flatten(2))

    @torch.no_grad()
    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Decode: return the outputs of the positions x [batch, time, hidden] after a state, and the state after them.

        The state has constant size if the variant has a recurrent form; otherwise it is a KV cache. None is the empty state. The given state is not changed.

        Examples
        --------
        >>> import torch
        >>> from termwise.torch import Attention
        >>> layer, x = Attention(16, 2, variant="taylor=0..2"), torch.randn(1, 5, 16)
        >>> y, state = layer.step(x[:, :4])
        >>> y, state = layer.step(x[:, 4:], state)
        >>> torch.allclose(y, layer(x)[:, 4:], atol=1e-5), state.positions
        (True, [5])
        """
        q, k, v = self._project(x)
        y, state = attention(q, k, v, self.variant, output_final_state=True, rope=self.layer.rope, initial_state=state, **_extras_of(self, self.layer, x))
        return self.o_proj(y.flatten(2)), state

    def extra_repr(self) -> str:
        return f"{self.layer!r}"
