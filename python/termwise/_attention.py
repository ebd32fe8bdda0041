"""Layers, states and the attention function, for NumPy arrays."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from . import _core
from ._core import Variant
from ._errors import InputError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

VariantLike = str | Variant
#: One variant for all heads, or one per head.
Variants = VariantLike | Sequence[VariantLike]
#: Engines of the extension module.
ArrayEngine = Literal["auto", "fused", "reference"]

# Rows of U in the fused engine are padded to a multiple of this number.
PAD = 16


@dataclass(frozen=True)
class Extra:
    """An auxiliary input of a variant: the logits of a gate, or a parameter."""

    #: Name, a keyword of :func:`attention`.
    name: str
    #: Name in checkpoints, below ``self_attn.``.
    tensor: str
    #: Whether it is logits ``[batch, time, *shape]``, which a model projects from its hidden state; otherwise a parameter.
    logits: bool
    #: Shape of the parameter, or of the logits of one position.
    shape: tuple[int, ...]
    #: Whether the projection of logits has a bias.
    bias: bool = False
    #: Initialization of a parameter: ``("constant", x)``, or ``("uniform", x)`` between -x and x.
    init: tuple[str, float] = ("constant", 0.0)

    def full_shape(self, batch: int, time: int) -> tuple[int, ...]:
        """Return the shape in a call."""
        return (batch, time, *self.shape) if self.logits else self.shape


class _Immutable:
    """A copy is the object itself, and a pickle has the call that makes it."""

    _rebuild: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self._rebuild

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: Any) -> Self:
        return self


class Layer(_Immutable):
    """An attention layer: variants, sizes and RoPE, checked and planned once. It can be used from several threads at once, copied and pickled.

    Parameters
    ----------
    variant : str, Variant or sequence
        A variant for all heads, or one per head.
    heads, kv_heads : int
        Query heads and key-value heads. Default ``kv_heads``: ``heads``.
    dim, value_dim : int
        Dimension of queries and keys, and of values. Default ``value_dim``: ``dim``.
    rope : float, optional
        Base of the rotary frequencies, such as 10000.0. Without it q and k are not rotated, even if the variant has RoPE.

    Attributes
    ----------
    extras : tuple of Extra
        Auxiliary inputs that calls need by name.

    Examples
    --------
    >>> from termwise import Layer
    >>> layer = Layer("taylor=0..2 out", heads=4, kv_heads=2, dim=8)
    >>> [(extra.name, extra.shape) for extra in layer.extras]
    [('out_gate', (4,))]
    """

    def __init__(
        self,
        variant: Variants = "softmax",
        *,
        heads: int,
        dim: int,
        kv_heads: int | None = None,
        value_dim: int | None = None,
        rope: float | None = None,
    ) -> None:
        self.heads, self.dim = heads, dim
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.value_dim = dim if value_dim is None else value_dim
        self.rope = rope
        key = _key(variant)
        self._core = _core.Layer([key] if isinstance(key, (str, Variant)) else list(key), heads, self.kv_heads, dim, self.value_dim, rope)
        self._rebuild = (_make_layer, (key, heads, self.kv_heads, dim, self.value_dim, rope))
        self._read_extras()
        _warn_of_variants(self)

    @classmethod
    def _of(cls, config: str, index: int, positions: int | None = None, core: _core.Layer | None = None) -> Layer:
        """A layer of the model of a ``config.json`` for at most ``positions`` positions, with the RoPE of the model."""
        if core is None:
            core = (_core.layers_of_config(config) if positions is None else _core.model_of_config(config, positions)[1])[index]
        layer = cls.__new__(cls)
        layer._core, layer.rope = core, None
        layer._rebuild = (cls._of, (config, index, positions))
        layer.heads, layer.kv_heads, layer.dim, layer.value_dim = layer._core.sizes
        layer._read_extras()
        return layer

    def _read_extras(self) -> None:
        specs = self._core.extras
        self.extras: tuple[Extra, ...] = tuple(Extra(**{**spec, "shape": tuple(spec["shape"])}) for spec in specs)

    @property
    def variants(self) -> list[Variant]:
        """The variant of each head."""
        return self._core.variants

    def __repr__(self) -> str:
        texts = {str(variant) for variant in self.variants}
        text = repr(texts.pop()) if len(texts) == 1 else repr([str(variant) for variant in self.variants])
        rope = "" if self.rope is None else f", rope={self.rope}"
        return f"Layer({text}, heads={self.heads}, kv_heads={self.kv_heads}, dim={self.dim}, value_dim={self.value_dim}{rope})"

    def _extras(self, extras: Mapping[str, Any]) -> list[Any]:
        """The values in the order of the layer."""
        known = [extra.name for extra in self.extras]
        unknown = [name for name in extras if name not in known]
        missing = [extra for extra in self.extras if extras.get(extra.name) is None]
        if unknown:
            has = f"its auxiliary inputs are {', '.join(known)}" if known else "it has no inputs other than q, k and v"
            raise TypeError(f"{self.variants[0]!r} has no input {unknown[0]!r}: {has}")
        if missing:
            asks = ", ".join(f"{e.name} {['batch', 'time', *e.shape] if e.logits else list(e.shape)}".replace("'", "") for e in missing)
            raise TypeError(f"{self.variants[0]!r} needs {asks}: give it as a keyword argument")
        return [extras[name] for name in known]

    def _call(self, q: Any, k: Any, v: Any, extras: Mapping[str, Any], lengths: Any, documents: Any) -> tuple[Any, ...]:
        q, k, v = _aligned(q), _aligned(k), _aligned(v)
        values = [_aligned(x) for x in self._extras(extras)]
        return q, k, v, values, _sizes("lengths", lengths), _sizes("documents", documents)

    def forward(
        self,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        *,
        lengths: ArrayLike | None = None,
        documents: ArrayLike | None = None,
        engine: ArrayEngine = "auto",
        mode: str = "auto",
        out: NDArray[Any] | None = None,
        **extras: ArrayLike,
    ) -> NDArray[Any]:
        """Return the output ``[batch, time, heads, value_dim]``; arguments as for :func:`attention`."""
        call = self._call(q, k, v, extras, lengths, documents)
        y = np.empty((*call[0].shape[:2], self.heads, self.value_dim), call[0].dtype) if out is None else out
        fused = self._fused(engine)
        if not _is_empty(call):
            _warn_nonpositive(self, self._core.forward(call, y, None, fused, mode))
        return y

    __call__ = forward

    def grad(
        self,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        dy: ArrayLike,
        *,
        lengths: ArrayLike | None = None,
        documents: ArrayLike | None = None,
        engine: ArrayEngine = "auto",
        mode: str = "auto",
        **extras: ArrayLike,
    ) -> dict[str, NDArray[Any]]:
        """Return the gradients of ``(y * dy).sum()`` by name; arguments as for :func:`attention_grad`."""
        call = self._call(q, k, v, extras, lengths, documents)
        names = ["q", "k", "v", *(extra.name for extra in self.extras)]
        grads = [np.zeros(x.shape, call[0].dtype) for x in (*call[:3], *call[3])]
        fused = self._fused(engine)
        if not _is_empty(call):
            self._core.backward(call, None, _aligned(dy), grads, fused, mode)
        return dict(zip(names, grads, strict=True))

    def state(self, batch: int = 1, *, cache: bool = False) -> State:
        """Return an empty state for ``batch`` rows: of constant size if the variant has a recurrent form, otherwise, or with ``cache=True``, a KV cache."""
        return State(self, self._core.state(batch, cache))

    def load_state(self, path: str | os.PathLike[str], batch: int = 1, *, cache: bool = False) -> State:
        """Read a state from a file that :meth:`State.save` wrote."""
        return State(self, self._core.load_state(os.fspath(path), batch, cache))

    def _fused(self, engine: str) -> bool:
        match engine:
            case "auto" | "fused":
                return True
            case "reference":
                return False
        raise InputError(f"engine must be 'auto', 'fused' or 'reference', found {engine!r}")


def _key(variant: Any) -> Any:
    """One variant, or a tuple with one per head."""
    if isinstance(variant, (str, Variant)):
        return variant
    if not isinstance(variant, Sequence):
        raise TypeError(f"a variant is a string such as 'taylor=0..4 norm=l2', a Variant, or one per head, found {type(variant).__name__}")
    return tuple(variant)


def _aligned(x: Any) -> NDArray[Any]:
    """The array, or a copy if its memory is not aligned."""
    array = np.asarray(x)
    return array if array.flags.aligned else array.copy()


def _is_empty(call: tuple[Any, ...]) -> bool:
    """Whether there are no batch rows or no positions."""
    shapes = [x.shape[:2] for x in call[:3]]
    if 0 in shapes[0] and len(set(shapes)) > 1:
        raise InputError(f"q, k and v have shapes {', '.join(str(x.shape) for x in call[:3])}, expected the same batch and time")
    return 0 in shapes[0]


def _warn(layer: Layer, text: str) -> None:
    """Warn of a layer, at the line of the caller outside of this package, PyTorch and Transformers."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "torch")).partition(".")[0] in ("termwise", "torch", "transformers"):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{layer!r}: {text}", RuntimeWarning, stacklevel=level)


def _warn_of_variants(layer: Layer) -> None:
    for text in dict.fromkeys(text for variant in layer.variants for text in variant.warnings):
        _warn(layer, text)


def _warn_nonpositive(layer: Layer, found: tuple[int, int, int, float] | None) -> None:
    if found is not None:
        row, head, position, value = found
        _warn(layer, f"the denominator of batch row {row}, head {head}, position {position} is {value:.3g}, not positive: the output is invalid there")


def _make_layer(variant: Any, heads: int, kv_heads: int, dim: int, value_dim: int, rope: float | None) -> Layer:
    return Layer(variant, heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim, rope=rope)


def _sizes(name: str, values: Any) -> list[int] | None:
    if values is None:
        return None
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array < 0).any():
        raise InputError(f"{name} must be non-negative integers in one dimension, found shape {array.shape} of {array.dtype}")
    return [int(value) for value in array]


class State:
    """The float32 state of a layer between tokens: a recurrent state of constant size, or a KV cache. Made by :meth:`Layer.state`.

    Examples
    --------
    >>> import numpy as np
    >>> from termwise import Layer
    >>> state = Layer("taylor=0..2", heads=2, dim=4).state(batch=3)
    >>> token = np.ones((3, 1, 2, 4), np.float32)
    >>> state.step(token, token, token).shape, state.positions
    ((3, 1, 2, 4), [1, 1, 1])
    >>> state.select([0, 0]).batch     # beam search: rows in any order, with repetition
    2
    """

    def __init__(self, layer: Layer, core: _core.State) -> None:
        self.layer, self._core = layer, core

    def __reduce__(self) -> tuple[Any, ...]:
        return _state_of_bytes, (self.layer, self._core.to_bytes(), self.batch, self._core.is_cache)

    def __copy__(self) -> State:
        return self.copy()

    def __deepcopy__(self, _: Any) -> State:
        return self.copy()

    def extend(
        self, q: ArrayLike, k: ArrayLike, v: ArrayLike, *, lengths: ArrayLike | None = None, mode: str = "auto", **extras: ArrayLike
    ) -> NDArray[np.float32]:
        """Process further positions of every row and return their outputs."""
        call = self.layer._call(q, k, v, extras, lengths, None)
        y = np.empty((*call[0].shape[:2], self.layer.heads, self.layer.value_dim), np.float32)
        _warn_nonpositive(self.layer, self._core.extend(call, y, mode))
        return y

    def step(self, q: ArrayLike, k: ArrayLike, v: ArrayLike, *, lengths: ArrayLike | None = None, **extras: ArrayLike) -> NDArray[np.float32]:
        """Process one position. Rows of length 0 do not change."""
        if np.shape(q)[1:2] != (1,):
            raise InputError(f"step takes one position, [batch, 1, heads, dimension], found shape {np.shape(q)}: use extend for more")
        return self.extend(q, k, v, lengths=lengths, mode="auto", **extras)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as safetensors; :meth:`Layer.load_state` reads it."""
        self._core.save(os.fspath(path))

    def select(self, rows: Sequence[int]) -> State:
        """Return the state of these batch rows, in this order."""
        return State(self.layer, self._core.select([int(row) for row in rows]))

    def compress(self, layer: Layer) -> State:
        """Return the state of a layer with a truncated series that has seen the keys of this ``exp`` cache. This state is not changed."""
        core = self._core.copy()
        core.compress(layer._core)
        return State(layer, core)

    def copy(self) -> State:
        """Return an independent copy."""
        return State(self.layer, self._core.copy())

    def clear(self) -> None:
        """Reset the state to empty."""
        self._core.clear()

    @property
    def batch(self) -> int:
        """Batch rows."""
        return self._core.batch

    @property
    def bytes(self) -> int:
        """Bytes of its buffers."""
        return self._core.bytes

    @property
    def is_constant(self) -> bool:
        """Whether its size is independent of the number of tokens."""
        return self._core.is_constant

    @property
    def positions(self) -> list[int]:
        """Number of positions that each row has seen."""
        return self._core.positions

    def __repr__(self) -> str:
        return f"<State of {self.layer!r}: {self.batch} rows, {self.bytes} bytes>"


def _state_of_bytes(layer: Layer, content: bytes, batch: int, cache: bool) -> State:
    return State(layer, layer._core.state_of_bytes(content, batch, cache))


@lru_cache(maxsize=64)
def _layer(variants: Any, heads: int, kv_heads: int, dim: int, value_dim: int, rope: float | None) -> Layer:
    return Layer(variants, heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim, rope=rope)


def _layer_for(x: Sequence[ArrayLike], variant: Variants, rope: float | None) -> Layer:
    """The layer with the sizes of q, k and v, cached."""
    shapes = [np.shape(array) for array in x]
    for name, shape in zip("qkv", shapes, strict=True):
        if len(shape) != 4 or 0 in shape[2:]:
            raise InputError(f"{name} has shape {tuple(shape)}, expected [batch, time, heads, dimension] with heads and dimension above 0")
    q, k, v = shapes
    return _layer(_key(variant), q[2], k[2], q[3], v[3], rope)


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    variant: Variants = "softmax",
    *,
    rope: float | None = None,
    lengths: ArrayLike | None = None,
    documents: ArrayLike | None = None,
    engine: ArrayEngine = "auto",
    mode: str = "auto",
    out: NDArray[Any] | None = None,
    **extras: ArrayLike,
) -> NDArray[Any]:
    """Causal attention of any variant.

    Arrays are all float32, computed by the fused engine, or all float64, computed by the reference. Arrays with a regular stride are not copied, including slices of a packed
    ``[batch, time, heads, 3 * dim]``.

    Parameters
    ----------
    q : array_like
        Queries ``[batch, time, heads, dim]``.
    k, v : array_like
        Keys ``[batch, time, kv_heads, dim]`` and values ``[batch, time, kv_heads, value_dim]``.
    variant : str, Variant or sequence
        A variant such as ``"taylor=0..4 norm=l2"``, or one per head.
    rope : float, optional
        Base of the rotary frequencies. Without it q and k are not rotated.
    lengths : array_like of int, optional
        Length of each batch row. Later positions are padding, and their output is zero.
    documents : array_like of int, optional
        Boundaries of documents that do not attend to each other, ``[0, ..., batch * time]``; ``cu_seqlens`` in other packages.
    engine : {"auto", "fused", "reference"}
        ``"auto"`` uses the fused engine for float32.
    mode : str
        ``"parallel"``, ``"chunk"``, ``"chunk=64"`` or ``"auto"``, the cheaper one.
    out : ndarray, optional
        Array for the output.
    **extras : array_like
        Gate logits and parameters of the variant by name; :attr:`Layer.extras` lists them.

    Returns
    -------
    ndarray
        Outputs ``[batch, time, heads, value_dim]``.

    Examples
    --------
    >>> import numpy as np, termwise
    >>> x = np.ones((1, 3, 2, 4))
    >>> gate = np.zeros((1, 3, 2))
    >>> float(termwise.attention(x, x, x, "softmax out", out_gate=gate)[0, 0, 0, 0])   # sigmoid(0) * 1
    0.5
    """
    return _layer_for((q, k, v), variant, rope).forward(q, k, v, lengths=lengths, documents=documents, engine=engine, mode=mode, out=out, **extras)


def attention_grad(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dy: ArrayLike,
    variant: Variants = "softmax",
    *,
    rope: float | None = None,
    lengths: ArrayLike | None = None,
    documents: ArrayLike | None = None,
    engine: ArrayEngine = "auto",
    mode: str = "auto",
    **extras: ArrayLike,
) -> dict[str, NDArray[Any]]:
    """Gradients of ``(attention(q, k, v, variant, ...) * dy).sum()``.

    Parameters
    ----------
    q, k, v, variant, rope, lengths, documents, engine, mode, **extras
        As for :func:`attention`.
    dy : array_like
        Gradient of the output, ``[batch, time, heads, value_dim]``.

    Returns
    -------
    dict of str to ndarray
        Gradients of q, k, v and all extras by name.

    Examples
    --------
    >>> import numpy as np, termwise
    >>> x = np.ones((1, 3, 2, 4))
    >>> sorted(termwise.attention_grad(x, x, x, x, "softmax out", out_gate=np.zeros((1, 3, 2))))
    ['k', 'out_gate', 'q', 'v']
    """
    return _layer_for((q, k, v), variant, rope).grad(q, k, v, dy, lengths=lengths, documents=documents, engine=engine, mode=mode, **extras)
