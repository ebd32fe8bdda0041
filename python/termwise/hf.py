"""Taylor spectra of Transformers models, and other attention variants in them.

All code that touches internals of Transformers is in this file. Tested with Transformers 5.23.

    import termwise.hf
    termwise.hf.spectrum(model, text, tokenizer=tokenizer)
    with termwise.hf.using(model, "softmax window=256 sinks=4"):
        model.generate(...)

Every causal model whose attention goes through the attention interface of Transformers is supported (GPT-2, GPT-NeoX, OPT, Llama, Qwen, Gemma, Phi, ...). Other models are
refused: one token is computed, and the attention of every layer must have gone through termwise. Padding, sliding windows, static caches and packed sequences (by ``position_ids``)
are honored as sdpa does. Position biases such as ALiBi and masks that are not causal are refused.

Models written by termwise load with ``AutoModelForCausalLM.from_pretrained`` once this module is imported. Models with an attention variant have their own ``model_type``:
without this module Transformers raises an error, or imports it with ``trust_remote_code=True``. ``generate`` stores recurrent states in the cache of Transformers, for these models and for
models changed by :func:`use`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import causal_mask_function, sdpa_mask

from . import _core
from ._attention import Layer, State, VariantLike, Variants, _layer
from ._cache_audit import CacheAudit, CacheCheck, audit_cache
from ._core import Variant
from ._errors import InputError
from ._results import Result
from .torch import attention
from .torch._attention import register
from .torch.engine.extras import _add_extras, _extras_of

__all__ = ["CacheAudit", "CacheCheck", "audit_cache", "cut", "restore", "spectrum", "truncate", "use", "using"]

NAME = "termwise"
#: Key of a config with the variant strings of each layer, None for softmax.
KEY = "termwise_attention"

#: The variant string of softmax, as it is recorded.
_SOFTMAX = str(Variant("softmax"))
#: The running measurement of :func:`spectrum`.
_meter: Any = None
#: Modules whose attention termwise computed during the check of :func:`_switch`.
_seen: set[torch.nn.Module] | None = None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: Any = None,
    **_: Any,
) -> Tensor | None:
    """The mask of a batch in compact form, int64 [batch, 1, 2, keys], or None for one text per row without padding and without a window.

    ``[:, 0, 0]`` is the number of the text of each key, from 1, and 0 for padding. ``[:, 0, 1]`` is the window, 0 without one, and negative if the cache has dropped keys before the
    window. Transformers does not change masks of four dimensions. Keys end at the last query, even if a cache of fixed size has room for more.
    """
    start = int(q_offset)
    end, keys = start + q_length, start + q_length - kv_offset
    if keys > kv_length:
        raise InputError(f"the cache has room for {kv_offset + kv_length} positions, and the text has {end}: use a larger cache")
    texts = torch.ones((batch_size, keys), dtype=torch.long, device=device)
    window = 0
    if mask_function is not causal_mask_function:
        own = partial(sdpa_mask, batch_size, mask_function=mask_function, kv_offset=kv_offset, allow_is_causal_skip=False, use_vmap=use_vmap, device=device)
        texts, window = _layout(own, texts, range(start, end), kv_offset, local_size)
    if attention_mask is not None:
        if attention_mask.shape[1] != end:
            raise InputError(f"attention_mask has {attention_mask.shape[1]} columns, and the text has {end} positions: give one column per position")
        texts = texts * attention_mask[:, kv_offset:].bool()
    if not window and keys == kv_length and bool((texts == 1).all()):
        return None
    return torch.stack([texts, torch.full_like(texts, -window if kv_offset else window)], 1)[:, None]


def _layout(own: Callable[..., Any], texts: Tensor, queries: range, kv_offset: int, local_size: int | None) -> tuple[Tensor, int]:
    """The number of the text of each key and the window of a mask, checked against the mask for sdpa."""
    batch, keys = texts.shape
    key = torch.arange(kv_offset, kv_offset + keys, device=texts.device)
    # Queries in blocks, so that a block of the mask has at most 2^24 entries.
    count = max(1, 2**24 // (batch * keys))
    blocks = [queries[i : i + count] for i in range(0, len(queries), count)]

    def block(at: range) -> tuple[Tensor, Tensor]:
        mask = own(q_length=len(at), kv_length=keys, q_offset=at.start)[:, 0]
        return mask.expand(batch, -1, -1), torch.arange(at.start, at.stop, device=texts.device)[:, None]

    # A text begins where a query does not see the key before it.
    for at in blocks:
        mask, query = block(at)
        before = (key == query - 1).expand_as(mask)
        begins = (before & ~mask).any(-1)
        texts = texts + torch.nn.functional.pad(begins.cumsum(1), (at.start - kv_offset, kv_offset + keys - at.stop))
        texts[:, at.stop - kv_offset :] += begins.sum(1, keepdim=True)

    def matches(window: int) -> bool:
        for at in blocks:
            mask, query = block(at)
            numbers = texts[:, at.start - kv_offset : at.stop - kv_offset, None]
            expected = (key <= query) & (key > query - (window or kv_offset + keys + 1)) & (texts[:, None] == numbers)
            if not torch.equal(mask, expected):
                return False
        return True

    window = next((window for window in (local_size, 0) if window is not None and matches(window)), None)
    if window is None:
        raise InputError(
            "termwise computes causal attention with windows, and the model needs another mask: positions see later ones, as in images, or a chunk or a packed text continues a cache"
        )
    return texts, window


def _read_mask(mask: Tensor | None, batch: int, keys: int, device: Any) -> tuple[Tensor | None, int | None]:
    """The number of the text of each key [batch, keys], None if all are of one text, and the window, from the mask of :func:`_mask`."""
    if mask is None:
        return None, None
    if mask.ndim != 4 or mask.shape[:3] != (batch, 1, 2) or mask.dtype != torch.long:
        raise InputError(f"an attention mask of shape {tuple(mask.shape)} is not supported: give a padding mask, [batch, time]")
    if mask.shape[3] > keys:
        raise InputError(f"the mask has {mask.shape[3]} keys, and the layer has {keys}")
    mask = mask.to(device)
    return mask[:, 0, 0], int(mask[0, 0, 1, 0]) or None


def _boundaries(texts: Tensor) -> list[int]:
    """Starts of the texts in concatenated rows, and the end of the last one."""
    if bool((texts == 0).any()):
        raise InputError("packed texts and padding in one batch are not supported: remove the padding")
    rows = torch.arange(len(texts), device=texts.device)[:, None] * (int(texts.max()) + 1)
    changes = (rows + texts).flatten().diff().nonzero().flatten() + 1
    return [0, *changes.tolist(), texts.numel()]


def _padding(seen: Tensor) -> tuple[Tensor, Tensor]:
    """The length of each row, and the source of each position if left padding becomes right padding."""
    time = seen.shape[1]
    lengths, first = seen.sum(1), seen.int().argmax(1)
    last = time - seen.flip(1).int().argmax(1)
    if not bool(((last - first == lengths) | (lengths == 0)).all()):
        raise InputError("the attention mask has holes: padding must precede or follow a text")
    return lengths, (torch.arange(time, device=seen.device)[None] + first[:, None]) % time


def _moved(x: Tensor, shift: Tensor) -> Tensor:
    return x.gather(1, shift.reshape(*shift.shape, *[1] * (x.ndim - 2)).expand_as(x))


def _moved_back(x: Tensor, shift: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter(1, shift.reshape(*shift.shape, *[1] * (x.ndim - 2)).expand_as(x), x)


def _variant(module: torch.nn.Module, scaling: float, dim: int, sliding: int | None, cap: float | None) -> tuple[str, ...]:
    """The variants of a layer's heads: the recorded ones, otherwise softmax; with scale, window and cap of the model unless a variant has its own."""
    usual = dim**-0.5
    own = {
        "scale": None if abs(scaling - usual) < 1e-9 * usual else repr(scaling),
        "window": sliding,
        "cap": None if cap is None else repr(cap),
    }

    def completed(text: str, keys: Sequence[str]) -> str:
        words = text.split()
        return " ".join(words + [f"{key}={own[key]}" for key in keys if own[key] and not any(word.startswith(f"{key}=") for word in words)])

    def both(text: str) -> str:
        """Near and far keys have the same scores."""
        near, parenthesis, far = text.partition("far(")
        far, _, rest = far.partition(")")
        whole = completed(f"{near} {rest}", ("scale", "window", "cap"))
        return f"{whole} far({completed(far, ('scale', 'cap'))})" if parenthesis else whole

    return tuple(map(both, _recorded(module) or ("softmax",)))


def _recorded(module: torch.nn.Module) -> tuple[str, ...] | None:
    """The variant strings of a layer, as :func:`use` has recorded them in the config."""
    layers = getattr(getattr(module, "config", None), KEY, None)
    return None if layers is None or layers[module.layer_idx] is None else tuple(layers[module.layer_idx])


def _with_sink(text: str) -> str:
    """The variant with a sink in its denominator, as in gpt-oss."""
    words = text.split()
    over = next((i for i, word in enumerate(words) if word.startswith("over=")), None)
    if over is None:
        return f"{text} over=sum,sink"
    parts = words[over].removeprefix("over=").split(",")
    if parts[0] != "sum":
        raise InputError(f"the model adds a sink to the sum of weights, and {text!r} has {words[over]}: use a variant with over=sum")
    if "sink" not in parts:
        words[over] += ",sink"
    return " ".join(words)


def _check_packed(cu_seq_lens: Tensor | None, boundaries: Sequence[int]) -> None:
    """Raise if boundaries for flash attention are not those of the mask."""
    if cu_seq_lens is not None and cu_seq_lens.tolist() != list(boundaries):
        raise InputError(
            f"cu_seq_lens_q has the boundaries {cu_seq_lens.tolist()}, and the mask {list(boundaries)}: "
            "Transformers finds packed texts by position_ids if there is no attention_mask and use_cache=False"
        )


def _array(x: Tensor) -> Any:
    return x.detach().float().cpu().numpy()


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """q [batch, heads, time, dim], k and v [batch, kv_heads, keys, dim]; y [batch, time, heads, dim]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or position_bias is not None:
        raise InputError(f"{type(module).__name__} is not causal or has a position bias: termwise does not compute it")
    if dropout:
        raise InputError(f"{type(module).__name__} has attention dropout {dropout}, which termwise does not support: set the attention dropout of the config to 0")
    if getattr(getattr(module, "config", None), "attention_variant", None) is not None:
        raise InputError(
            f"the config has the attention variant of a model written by termwise, and {type(module).__name__} would compute softmax: load it with AutoModelForCausalLM.from_pretrained"
        )
    if _seen is not None:
        _seen.add(module)
    elif "_termwise_hook" not in module.__dict__:
        # The model was loaded with a recorded variant: states are stored from the next sequence on.
        _install(module)
    batch, heads, time, dim = query.shape
    # Removed from the module, which keeps no state after the call.
    held = module.__dict__.pop("_held", None)
    seen = held.seen if held is not None else 0
    texts, window = _read_mask(attention_mask, batch, seen + key.shape[2], query.device)
    keys = key.shape[2] if held is not None or texts is None else texts.shape[1]
    key, value = key[:, :, :keys], value[:, :, :keys]
    if held is None and time < keys:
        # Outputs before the first query are discarded.
        query = torch.cat([query.new_zeros(batch, heads, keys - time, dim), query], 2)
    scaling = dim**-0.5 if scaling is None else float(scaling)
    if window is not None and window < 0:
        window = -window
        if any(text != _SOFTMAX for text in _recorded(module) or ()):
            raise InputError("the cache has dropped keys before the window of the model, which the variant may read: leave out cache_implementation, and decode under torch.no_grad()")
    # A state starts before the length of the text is known.
    shows = window is not None and (held is not None or window < keys)
    variants = _variant(module, scaling, dim, window if shows else None, softcap)
    extras: dict[str, Any] = {}
    if s_aux is not None:
        variants = tuple(map(_with_sink, variants))
        extras["sink"] = s_aux
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    variant = variants[0] if len(variants) == 1 else variants
    packed = texts if texts is not None and bool((texts > 1).any()) else None
    lengths = shift = None
    if texts is not None and packed is None and bool((texts == 0).any()):
        lengths, shift = _padding(texts[:, -q.shape[1] :].bool())
        q, k, v = (_moved(x, shift) for x in (q, k, v))
    if held is not None:
        if packed is not None or cu_seq_lens_q is not None:
            raise InputError("packed texts and chunked attention are not supported with a cache: set use_cache=False")
        y = held.extend(_layer(variant, heads, k.shape[2], dim, v.shape[3], None), (q, k, v), extras, lengths, texts)
        return (y if shift is None else _moved_back(y, shift)), None
    if packed is not None:
        boundaries = _boundaries(packed)
        _check_packed(cu_seq_lens_q, boundaries)
        q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
        y = attention(q, k, v, variant, output_final_state=False, cu_seqlens=boundaries, **extras)
        return y.reshape(batch, keys, *y.shape[2:])[:, keys - time :].contiguous(), None
    _check_packed(cu_seq_lens_q, range(0, (batch + 1) * keys, keys))
    lengths = None if lengths is None else lengths.clamp(min=1)
    if _meter is not None:
        layer = _layer(variant, heads, k.shape[2], dim, v.shape[3], None)
        given = [_array(x) for x in (q, k, v)]
        _meter.see(module.layer_idx, layer._core, (*given, [_array(x) for x in extras.values()], None if lengths is None else lengths.tolist(), None))
    y = attention(q, k, v, variant, output_final_state=False, lengths=lengths, **extras)
    if shift is not None:
        y = _moved_back(y, shift)
    return y[:, keys - time :].contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


class StateLayer(CacheLayerMixin):
    """A layer of a Transformers cache with a recurrent state of termwise, of constant size if the variant allows it, instead of keys and values."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True
        self.state: State | None = None
        self.seen = 0
        #: Whether positions were computed with gradients, which the state does not contain.
        self.skipped = False
        #: Whether the layer that updates the cache adds its keys to the state.
        self.is_held = False

    @classmethod
    def of(cls, cache: Any, index: int) -> StateLayer | None:
        """The state layer of a cache, created if the layer is empty; None if the layer has keys or the cache has another type."""
        if type(cache) is not DynamicCache:
            return None
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
        held: Any = cache.layers[index]
        if not isinstance(held, cls):
            if type(held) not in (DynamicLayer, DynamicSlidingWindowLayer) or held.get_seq_length() > 0:
                return None
            held = cache.layers[index] = cls()
        return held

    def extend(self, layer: Layer, x: tuple[Tensor, ...], extras: Mapping[str, Tensor], lengths: Tensor | None, texts: Tensor | None) -> Tensor:
        """Process positions [batch, time, heads, dim] and return their outputs; ``texts`` is the mask of all positions, from :func:`_read_mask`."""
        batch, time = x[0].shape[:2]
        self._refuse_skipped()
        known = [self.seen] * batch if texts is None else texts[:, : self.seen].bool().sum(1).tolist()
        if self.state is not None and self.state.positions != known:
            raise InputError(
                f"the rows of this cache have {self.state.positions} positions, and {known} according to attention_mask: give the mask of all positions, padding of earlier calls included"
            )
        if lengths is not None and time > 1 and bool((lengths == 0).any()):
            raise InputError("a row contains only padding: remove it")
        if self.state is None:
            self.state = layer.state(batch)
        arrays = [_array(t) for t in x]
        own = {name: _array(t) for name, t in extras.items()}
        y = self.state.extend(*arrays, lengths=None if lengths is None else lengths.tolist(), **own)
        self.seen += time
        return torch.from_numpy(y).to(x[0])

    def skip(self, time: int) -> None:
        """Count positions that were computed with gradients. The cache cannot be continued after them."""
        if self.seen and not self.skipped:
            raise InputError("a state has no gradients: continue a text under torch.no_grad(), or compute the whole text with use_cache=False")
        self._refuse_skipped()
        self.seen, self.skipped = self.seen + time, True

    def _refuse_skipped(self) -> None:
        if self.skipped:
            raise InputError("this cache was filled while gradients were computed, and states have no gradients: compute the earlier text under torch.no_grad()")

    def _select(self, rows: list[int]) -> None:
        if self.state is not None and rows != list(range(self.state.batch)):
            self.state = self.state.select(rows)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_held:
            raise InputError("this cache has states of termwise.hf.use: continue it under torch.no_grad() and with termwise's attention, or compute the whole text with use_cache=False")
        # Attention adds them to the state.
        self.is_held = False
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None: ...

    def prefetch(self) -> None: ...

    def reset(self) -> None:
        self.state, self.seen, self.skipped = None, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise InputError(f"a state cannot remove its last {abs(tokens_to_remove)} positions: generate without an assistant model")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self._select([row for row in range(self.state.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self._select(torch.arange(self.state.batch, device=indices.device)[indices].tolist())


def _hold(module: Any, _: Any, kwargs: dict[str, Any]) -> None:
    """Pre-forward hook of changed layers: provides the state layer of the cache during generation."""
    # Of a call that has failed.
    module.__dict__.pop("_held", None)
    # GPT-NeoX and related models call it layer_past.
    cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
    ours = module.config._attn_implementation == NAME and not torch.is_grad_enabled()
    held = StateLayer.of(cache, module.layer_idx) if cache is not None and ours else None
    if held is not None:
        held.is_held = True
        module.__dict__["_held"] = held


class TermwiseAttention:
    """Attention of a model written by termwise, as a mixin of its family's class: any variant with its gates and parameters. termwise applies RoPE and stores states."""

    #: Whether checkpoints of the family store norm weights minus one.
    less_one = False
    #: Those of the family's class.
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    layer_idx: int

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # type: ignore[call-arg]
        # The mask is then that of _mask.
        config._attn_implementation = NAME
        self.layer = Layer._of(config.to_json_string(use_diff=False), layer_idx)
        self.key = register(self.layer)
        # The variant has its own norms of q and k.
        for name in ("q_norm", "k_norm"):
            self.__dict__["_modules"].pop(name, None)
        _add_extras(self, self.layer, config.hidden_size, {})  # type: ignore[arg-type]

    def _project(self, x: Tensor) -> list[Tensor]:
        """q, k and v, [batch, time, heads, dim]."""
        heads, kv_heads, dim = self.layer.heads, self.layer.kv_heads, self.layer.dim
        if hasattr(self, "query_key_value"):
            parts = self.query_key_value(x).reshape(*x.shape[:2], heads, 3 * dim).chunk(3, -1)
        elif hasattr(self, "qkv_proj"):
            parts = self.qkv_proj(x).split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        else:
            parts = [p(x) for p in (self.q_proj, self.k_proj, self.v_proj)]
        return [part.reshape(*x.shape[:2], -1, dim) for part in parts]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        # GPT-NeoX calls it layer_past.
        past_key_values = layer_past if past_key_values is None else past_key_values
        batch, time = hidden_states.shape[:2]
        x, lengths, shift, boundaries = hidden_states, None, None, None
        held = None if past_key_values is None else StateLayer.of(past_key_values, self.layer_idx)
        if past_key_values is not None and held is None:
            raise InputError(f"a {type(past_key_values).__name__} cannot store states: leave out past_key_values and cache_implementation")
        # The window is part of the variant.
        whole, _window = _read_mask(attention_mask, batch, (0 if held is None else held.seen) + time, x.device)
        texts = None if whole is None else whole[:, -time:]
        _check_positions(position_ids, texts)
        if texts is not None and bool((texts > 1).any()):
            if held is not None:
                raise InputError("packed texts and chunked attention are not supported with a cache: set use_cache=False")
            boundaries = _boundaries(texts)
            x = x.reshape(1, batch * time, -1)
        elif texts is not None and bool((texts == 0).any()):
            lengths, shift = _padding(texts.bool())
            x = _moved(x, shift)
        _check_packed(cu_seq_lens_q, boundaries or range(0, (batch + 1) * time, time))
        q, k, v = self._project(x)
        extras = _extras_of(self, self.layer, x)  # type: ignore[arg-type]
        if self.less_one:
            extras = {name: value + 1 if name in ("q_norm", "k_norm") else value for name, value in extras.items()}
        if held is not None and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            held.skip(time)
            held = None
        if held is None:
            y = attention(q, k, v, self.key, output_final_state=False, lengths=None if lengths is None else lengths.clamp(min=1), cu_seqlens=boundaries, **extras)
        else:
            y = held.extend(self.layer, (q, k, v), extras, lengths, whole)
        y = y.reshape(batch, time, -1)
        if shift is not None:
            y = _moved_back(y, shift)
        return (self.dense if hasattr(self, "dense") else self.o_proj)(y), None

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self.key = register(self.layer)


def _check_positions(position_ids: Tensor | None, texts: Tensor | None) -> None:
    """Raise if positions do not grow by one within a text. Positions are counted by termwise, and RoPE depends on their differences only."""
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] < 2:
        return
    jumps = position_ids.diff(dim=1) != 1
    if texts is not None:
        jumps = jumps & (texts[:, 1:] == texts[:, :-1]) & (texts[:, 1:] > 0)
    if bool(jumps.any()):
        raise InputError(
            "position_ids must grow by one within a text. Transformers finds packed texts by position_ids if there is no attention_mask and use_cache=False; "
            "termwise supports no other positions"
        )


class TermwiseModel:
    """A causal model of a family with :class:`TermwiseAttention` in every layer."""

    attention_class: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        for index, layer in enumerate(self.base_model.layers):  # type: ignore[attr-defined]
            setattr(layer, "self_attn" if hasattr(layer, "self_attn") else "attention", self.attention_class(config, index))
        self.post_init()  # type: ignore[attr-defined]

    def save_pretrained(self, save_directory: Any, *args: Any, is_main_process: bool = True, **kwargs: Any) -> Any:
        """Save as Transformers does, with a module that imports termwise, or raises an error that names it, if ``termwise.hf`` is not imported."""
        config, names = self.config, {"AutoConfig": self.config_class, "AutoModelForCausalLM": type(self)}  # type: ignore[attr-defined]
        config.attn_implementation = NAME
        config.auto_map = {auto: f"{Path(_core.LOADER_FILE).stem}.{own.__name__}" for auto, own in names.items()}
        if is_main_process and not Path(save_directory).is_file():
            # Written first, so it is uploaded with the other files.
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            (Path(save_directory) / _core.LOADER_FILE).write_text(_core.LOADER_SOURCE)
        try:
            return super().save_pretrained(save_directory, *args, is_main_process=is_main_process, **kwargs)  # type: ignore[misc]
        finally:
            del config.attn_implementation, config.auto_map

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Do nothing: Transformers would write the source of this package into saved folders."""


#: The families that termwise writes: ``model_type``, module, and prefix of the class names.
FAMILIES = {
    "llama": ("llama", "Llama"),
    "mistral": ("mistral", "Mistral"),
    "qwen2": ("qwen2", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3"),
    "smollm3": ("smollm3", "SmolLM3"),
    "olmo2": ("olmo2", "Olmo2"),
    "phi3": ("phi3", "Phi3"),
    "gemma2": ("gemma2", "Gemma2"),
    "gemma3_text": ("gemma3", "Gemma3"),
    "gpt_neox": ("gpt_neox", "GPTNeoX"),
    "stablelm": ("stablelm", "StableLm"),
}


def _register_family(model_type: str, place: str, prefix: str) -> None:
    """Define and register classes for ``termwise_{model_type}`` in this module. Classes of Transformers are not changed."""
    module, config = importlib.import_module(f"transformers.models.{place}.modeling_{place}"), CONFIG_MAPPING[model_type]

    def make(name: str, bases: tuple[type, ...], **members: Any) -> Any:
        globals()[name] = made = type(name, bases, {"__module__": __name__, **members})
        return made

    # Transformers would write the source of this package into saved folders of classes registered for an auto class.
    unregistered = classmethod(lambda cls, auto_class="AutoConfig": None)
    own = make(f"Termwise{config.__name__}", (config,), model_type=f"termwise_{model_type}", register_for_auto_class=unregistered)
    attention_class = make(f"Termwise{prefix}Attention", (TermwiseAttention, getattr(module, f"{prefix}Attention")), less_one=place.startswith("gemma"))
    causal = getattr(module, f"{prefix}ForCausalLM")
    model = make(f"Termwise{prefix}ForCausalLM", (TermwiseModel, causal), config_class=own, attention_class=attention_class)
    AutoConfig.register(own.model_type, own)
    AutoModelForCausalLM.register(own, model)

    # Files of earlier versions have a variant under the model_type of the family.
    class Kind(type(config)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, config)

    class Either(config, metaclass=Kind):  # type: ignore[misc, valid-type]
        # Transformers prefers classes of other modules to the code of a folder.
        __module__ = config.__module__

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return config(*args, **kwargs)

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            if config_dict.get("attention_variant") is None:
                return config.from_dict(config_dict, **kwargs)
            return own.from_dict({**config_dict, "model_type": own.model_type}, **kwargs)

    AutoConfig.register(model_type, Either, exist_ok=True)


for _type, (_place, _prefix) in FAMILIES.items():
    _register_family(_type, _place, _prefix)


def _attentions(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """The attention of each layer."""
    found: dict[int, torch.nn.Module] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        if index is not None and any(word in type(module).__name__ for word in ("Attention", "Attn")):
            found.setdefault(index, module)
    if not found:
        raise InputError(f"no attention with a layer_idx was found in {type(model).__name__}")
    if any(isinstance(module, TermwiseAttention) for module in found.values()):
        raise InputError(
            f"this {type(model).__name__} has variants of its own, which termwise.hf does not change or measure: "
            "use with_attention, truncate and spectrum of termwise.load(folder)"
        )
    return found


def _install(module: torch.nn.Module) -> None:
    """Store states instead of keys during generation, and record the implementation in saved configs."""
    _uninstall(module)
    module.__dict__["_termwise_hook"] = module.register_forward_pre_hook(_hold, with_kwargs=True)
    config: Any = module.config
    config.attn_implementation = NAME


def _uninstall(module: torch.nn.Module) -> None:
    hook = module.__dict__.pop("_termwise_hook", None)
    if hook is not None:
        hook.remove()
    config = getattr(module, "config", None)
    if config is not None:
        config.__dict__.pop("attn_implementation", None)


def use(model: PreTrainedModel, variant: Variants | Mapping[int, Variants] | None) -> PreTrainedModel:
    """Replace the attention of a loaded model.

    The variant is recorded in the config: ``save_pretrained`` writes it, ``from_pretrained`` restores it, and loading the folder without ``import termwise.hf`` fails.
    Training and ``generate`` work. ``generate`` stores states in the cache of Transformers, of constant size if the variant allows it.

    Parameters
    ----------
    model : PreTrainedModel
        A causal model whose attention goes through the attention interface of Transformers.
    variant : str, Variant, sequence, mapping or None
        One variant for all heads, a sequence with one per head, or a mapping from layer index to either. Layers that are not named use softmax. None is softmax in all layers.
        The variant must not read inputs beyond q, k and v. q and k are used as the model has prepared them, rotated. The scale of the model applies unless the variant has one.

    Returns
    -------
    PreTrainedModel
        The same model.

    Raises
    ------
    ValueError
        If a layer does not take its attention from the interface. The model is unchanged then.
    """
    modules = _attentions(model)
    by_layer: Mapping[int, Any] = variant if isinstance(variant, Mapping) else dict.fromkeys(modules, variant)
    unknown = set(by_layer) - set(modules)
    if unknown:
        raise InputError(f"there is no layer {min(unknown)}: the model has {len(modules)}, counted from 0")
    layers: list[list[str] | None] = [None] * (max(modules) + 1)
    for index, own in by_layer.items():
        if own is None:
            continue
        each: list[VariantLike] = [own] if isinstance(own, (str, Variant)) else list(own)
        for one in each:
            if not Variant(one).has_no_extras:
                raise InputError(f"{one!r} reads inputs beyond q, k and v, and the model has no weights for them: leave out gates and parameters")
        layers[index] = [str(Variant(one)) for one in each]
    before = _record(model, modules)
    try:
        _set_layers(modules, layers)
        _switch(model, modules)
    except BaseException:
        _put_back(model, modules, before)
        raise
    for module in modules.values():
        _install(module)
    model.__dict__.setdefault("_termwise_before", before[0])
    return model


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Undo :func:`use`: restore the attention implementation that the model had before."""
    modules = _attentions(model)
    before = model.__dict__.pop("_termwise_before", None)
    if before is None or before == NAME:
        before = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    if model.config._attn_implementation == NAME:
        _put_back(model, modules, (before, None))
    return model


@contextmanager
def using(model: PreTrainedModel, variant: Variants | Mapping[int, Variants] | None) -> Iterator[PreTrainedModel]:
    """:func:`use` within a ``with`` block. The model is restored afterwards.

        with termwise.hf.using(model, "taylor=0..4"):
            loss = model(ids, labels=ids).loss
    """
    modules = _attentions(model)
    before, first = _record(model, modules), model.__dict__.get("_termwise_before")
    try:
        yield use(model, variant)
    finally:
        _put_back(model, modules, before)
        if before[0] != NAME:
            model.__dict__.pop("_termwise_before", None)
        elif first is not None:
            model.__dict__["_termwise_before"] = first


def _record(model: PreTrainedModel, modules: Mapping[int, torch.nn.Module]) -> tuple[str, Any]:
    """The implementation of a model's attention, and its recorded variants."""
    return model.config._attn_implementation, getattr(getattr(next(iter(modules.values())), "config", None), KEY, None)


def _set_layers(modules: Mapping[int, torch.nn.Module], layers: Any) -> None:
    """Record the variants of all layers, or remove the record. Modules without a config do not use the interface, and :func:`_switch` raises for them."""
    for module in modules.values():
        config = getattr(module, "config", None)
        if config is not None and layers is not None:
            setattr(config, KEY, layers)
        elif config is not None:
            config.__dict__.pop(KEY, None)


def _put_back(model: PreTrainedModel, modules: Mapping[int, torch.nn.Module], before: tuple[str, Any]) -> None:
    implementation, layers = before
    _set_layers(modules, layers)
    for module in modules.values():
        _uninstall(module)
    model.set_attn_implementation(implementation)
    if implementation == NAME:
        for module in modules.values():
            _install(module)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode within a ``with`` block; the previous modes are restored."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _switch(model: PreTrainedModel, modules: Mapping[int, torch.nn.Module]) -> None:
    """Use termwise in every layer. Computes one token, and raises if a layer did not use termwise."""
    global _seen
    model.set_attn_implementation(NAME)
    missing = {} if model.config._attn_implementation == NAME else dict(modules)
    if not missing and model.device.type != "meta":
        _seen = set()
        try:
            with torch.no_grad(), _evaluating(model):
                model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
            missing = {index: module for index, module in modules.items() if module not in _seen}
        finally:
            _seen = None
    if missing:
        classes = ", ".join(sorted({type(module).__name__ for module in missing.values()}))
        raise InputError(
            f"{len(missing)} of {len(modules)} layers of this {type(model).__name__} ({classes}) do not use the attention interface of Transformers: "
            "termwise cannot replace their attention"
        )


@contextmanager
def _switched(model: PreTrainedModel) -> Iterator[None]:
    """Compute attention with termwise within a ``with`` block. The model is restored afterwards."""
    modules = _attentions(model)
    before = _record(model, modules)
    try:
        _switch(model, modules)
        with _evaluating(model):
            yield
    finally:
        _put_back(model, modules, before)


def _windows(model: PreTrainedModel, text: Any, tokenizer: Any, length: int | None, tokens: int) -> list[Tensor]:
    for name, count in (("length", length), ("tokens", tokens)):
        if count is not None and count < 1:
            raise InputError(f"{name} must be at least 1, found {count}")
    if isinstance(text, str):
        if tokenizer is None:
            raise InputError("a string needs a tokenizer: give tokenizer=, or token ids")
        text = tokenizer(text)["input_ids"]
    ids = torch.as_tensor(text)
    if ids.is_floating_point() and ids.numel():
        raise InputError(f"token ids must be integers, found {ids.dtype}")
    ids = ids.to("cpu", torch.long).flatten()[:tokens]
    if ids.numel() == 0:
        raise InputError("the text is empty")
    most = getattr(model.config, "max_position_embeddings", None) or 1024
    return list(ids.split(length or min(1024, most)))


@torch.no_grad()
def spectrum(
    model: PreTrainedModel,
    text: str | Sequence[int] | Tensor,
    *,
    tokenizer: Any = None,
    length: int | None = None,
    tokens: int = 4096,
    queries: int | None = 256,
    seed: int = 1,
    max_order: int = 32,
) -> Result:
    """Measure how many terms of the exponential series each head of a model needs, as :meth:`termwise.Model.spectrum`.

    Parameters
    ----------
    model : PreTrainedModel
        A causal model, as for :func:`use`.
    text : str, sequence of int or Tensor
        A text with its tokenizer, or token ids.
    tokenizer : optional
        The tokenizer of the model, if ``text`` is a string.
    length : int, optional
        Tokens per context. Default: the context length of the model, at most 1024.
    tokens : int
        Largest number of tokens.
    queries : int or None
        Sampled queries per context; None for all.
    seed : int
        Seed of the sample.
    max_order : int
        Highest order.

    Returns
    -------
    Result
        ``layers.heads`` with entropies, shares of the orders and truncation errors.
    """
    global _meter
    windows = _windows(model, text, tokenizer, length, tokens)
    meter = _core.Meter(max_order, queries, seed)
    with _switched(model):
        try:
            _meter = meter
            for window in windows:
                meter.begin([len(window)])
                model(input_ids=window[None].to(model.device), use_cache=False)
        finally:
            _meter = None
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    name = (getattr(config, "_name_or_path", "") or type(model).__name__).rstrip("/").rsplit("/", 1)[-1]
    return Result(meter.finish(name, sum(p.numel() for p in model.parameters()), heads, kv_heads, dim, []))


@torch.no_grad()
def truncate(
    model: PreTrainedModel,
    text: str | Sequence[int] | Tensor,
    *,
    orders: Sequence[int] = (2, 4, 8, 16),
    tokenizer: Any = None,
    length: int | None = None,
    tokens: int = 4096,
) -> dict[int | None, float]:
    """Loss of a model whose exp is truncated to its Taylor series.

    Parameters
    ----------
    model : PreTrainedModel
        A causal model, as for :func:`use`.
    text : str, sequence of int or Tensor
        A text with its tokenizer, or token ids.
    orders : sequence of int
        Highest orders to evaluate.
    tokenizer : optional
        The tokenizer of the model, if ``text`` is a string.
    length : int, optional
        Tokens per context. Default: the context length of the model, at most 1024.
    tokens : int
        Largest number of tokens.

    Returns
    -------
    dict
        Mean loss in nats per token by order. The key None is the model without truncation.
    """
    windows = [window for window in _windows(model, text, tokenizer, length, tokens) if len(window) > 1]
    if not windows:
        raise InputError("a loss needs at least two tokens")

    def loss() -> float:
        total = count = 0.0
        for window in windows:
            logits = model(input_ids=window[None].to(model.device), use_cache=False).logits[0, :-1].double()
            total += torch.nn.functional.cross_entropy(logits, window[1:].to(logits.device), reduction="sum").item()
            count += len(window) - 1
        return total / count

    modules = _attentions(model)
    before = _record(model, modules)
    found: dict[int | None, float] = {}
    with _switched(model):
        try:
            found[None] = loss()
            for order in orders:
                _set_layers(modules, [[f"taylor=0..{order}"]] * (max(modules) + 1))
                found[order] = loss()
        finally:
            _put_back(model, modules, (NAME, before[1]))
    return found


#: Former name of :func:`truncate`.
cut = truncate
