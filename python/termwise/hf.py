"""Models of transformers: their spectra, and other attentions in their place.

Everything that touches transformers' internals is in this file. Tested with transformers 5.22.

    import termwise.hf
    termwise.hf.spectrum(model, text, tokenizer=tokenizer)
    termwise.hf.use(model, "softmax window=256 sinks=4")

It works with every causal model whose attention goes through transformers' attention interface (GPT-2, GPT-NeoX, OPT, Llama, Qwen, Gemma, Phi, …), by an
attention function and a mask function under one name. Models with a position bias, such as ALiBi, are refused.

Models that termwise has written load with ``AutoModelForCausalLM.from_pretrained`` once this module is imported, whatever their variants, and
``generate`` keeps their states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.models.llama import modeling_llama

from . import _core
from ._attention import Layer, VariantLike, Variants, _layer
from ._core import Variant
from ._results import Result
from .torch import attention
from .torch._attention import _add_extras, _extras_of, register

__all__ = ["cut", "spectrum", "use"]

NAME = "termwise"

#: What is being measured, while it is.
_meter: Any = None
_vocabulary = "token ids, or a text with its tokenizer"


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """Which keys are no padding, [batch, keys]; None where none is. Windows come to the attention function by themselves."""
    if use_vmap:
        raise ValueError("termwise computes causal attention with windows; this model asks for a mask of another kind (packed texts, or images)")
    if attention_mask is None:
        return None
    seen = attention_mask[:, -kv_length:].bool()
    return None if bool(seen.all()) else seen


def _padding(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of each row that count, and where each position comes from once padding before a text has gone behind it."""
    time = seen.shape[1]
    lengths, first = seen.sum(1), seen.int().argmax(1)
    last = time - seen.flip(1).int().argmax(1)
    if not bool(((last - first == lengths) | (lengths == 0)).all()):
        raise ValueError("the mask has holes: padding may stand before a text or after it, not inside")
    return lengths, (torch.arange(time)[None] + first[:, None]) % time


def _moved(x: Tensor, shift: Tensor) -> Tensor:
    return x.gather(1, shift.reshape(*shift.shape, *[1] * (x.ndim - 2)).expand_as(x))


def _moved_back(x: Tensor, shift: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter(1, shift.reshape(*shift.shape, *[1] * (x.ndim - 2)).expand_as(x), x)


def _variant(module: torch.nn.Module, scaling: float, dim: int, sliding: int | None, cap: float | None) -> tuple[str, ...]:
    """The variants of a layer's heads: those that were asked for, otherwise softmax; with the scale, window and cap that the model has, unless they say their own."""
    usual = dim**-0.5
    own = {
        "scale": None if abs(scaling - usual) < 1e-9 * usual else repr(scaling),
        "window": sliding,
        "cap": None if cap is None else repr(cap),
    }

    def completed(text: str) -> str:
        words = text.split()
        return " ".join(words + [f"{key}={x}" for key, x in own.items() if x and not any(word.startswith(f"{key}=") for word in words)])

    return tuple(map(completed, getattr(module, "_termwise", None) or ("softmax",)))


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """q [batch, heads, time, dim], k and v [batch, kv_heads, keys, dim], as transformers has them; y [batch, time, heads, dim]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or position_bias is not None:
        raise ValueError(f"{type(module).__name__} is not causal attention without a position bias: termwise cannot take its place")
    if dropout:
        raise ValueError(f"termwise has no dropout of weights, and {type(module).__name__} asks for {dropout}: set the config's attention dropout to 0")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError("termwise computes causal attention with windows; a mask of four dimensions cannot be given to it")
    batch, heads, time, dim = query.shape
    keys = key.shape[2]
    if time < keys:
        # Positions before were asked earlier; nothing is asked of them now.
        query = torch.cat([query.new_zeros(batch, heads, keys - time, dim), query], 2)
    scaling = dim**-0.5 if scaling is None else float(scaling)
    texts = _variant(module, scaling, dim, sliding_window if sliding_window and sliding_window < keys else None, softcap)
    extras = {}
    if s_aux is not None:
        texts = tuple(f"{text} over=sum,sink" for text in texts)
        extras["sink"] = s_aux
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    lengths = shift = None
    if attention_mask is not None:
        lengths, shift = _padding(attention_mask)
        q, k, v = (_moved(x, shift) for x in (q, k, v))
        lengths = lengths.clamp(min=1)
    variant = texts[0] if len(texts) == 1 else texts
    if _meter is not None:
        layer = _layer(variant, heads, k.shape[2], dim, v.shape[3], None)
        given = [x.detach().float().numpy() for x in (q, k, v)]
        _meter.see(module.layer_idx, layer._core, (*given, [x.detach().float().numpy() for x in extras.values()], None if lengths is None else lengths.tolist(), None))
    y = attention(q, k, v, variant, lengths=lengths, **extras)
    if shift is not None:
        y = _moved_back(y, shift)
    return y[:, keys - time :].contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


class TermwiseAttention(modeling_llama.LlamaAttention):
    """The attention of a model that termwise has written: any variant, with its gates and parameters, rotated and remembered by termwise."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        # The mask then comes as padding.
        config._attn_implementation = NAME
        self.layer = Layer._of(_core.layers_of_config(config.to_json_string(use_diff=False))[layer_idx])
        self.key = register(self.layer)
        _add_extras(self, self.layer, config.hidden_size, {})

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        batch, time = hidden_states.shape[:2]
        lengths = shift = None
        x = hidden_states
        if attention_mask is not None:
            if attention_mask.ndim != 2:
                raise ValueError("a mask of four dimensions cannot be given to an attention of termwise; give one of padding, [batch, time]")
            lengths, shift = _padding(attention_mask[:, -time:])
            x = _moved(x, shift)
        q, k, v = (p(x).view(batch, time, -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        extras = _extras_of(self, self.layer, x)
        if past_key_values is None:
            y = attention(q, k, v, self.key, lengths=None if lengths is None else lengths.clamp(min=1), **extras)
        else:
            y = self._continued(past_key_values, (q, k, v), extras, lengths)
        y = y.reshape(batch, time, -1)
        if shift is not None:
            y = _moved_back(y, shift)
        return self.o_proj(y), None

    def _continued(self, cache: Any, x: tuple[Tensor, ...], extras: dict[str, Tensor], lengths: Tensor | None) -> Tensor:
        """From the state that belongs to the cache, and into it.

        The cache itself keeps one number for each position and row, the row's place at that time: where beams have parted since, the last of them says
        which row of the state each row goes on from.
        """
        if torch.is_grad_enabled() and any(t.requires_grad for t in x):
            raise ValueError("states carry no gradients: train with use_cache=False, or generate under torch.no_grad()")
        batch, time = x[0].shape[:2]
        states = cache.__dict__.setdefault("_termwise", {})
        state = states.get(self.layer_idx)
        seen = cache.get_seq_length(self.layer_idx)
        mark = torch.arange(batch, dtype=torch.float32).reshape(batch, 1, 1, 1).expand(batch, 1, time, 1)
        marks, _ = cache.update(mark, mark, self.layer_idx)
        if state is None or seen == 0:
            state, position = self.layer.state(batch), 0
        else:
            state, position = state
            if position != seen:
                raise ValueError(f"a state cannot go back: it has read {position} positions, and the cache was set to {seen}; generate without assistance")
            rows = marks[:, 0, seen - 1, 0].long().tolist()
            if rows != list(range(state.batch)):
                state = state.select(rows)
        arrays = [t.detach().float().numpy() for t in x]
        own = {name: t.detach().float().numpy() for name, t in extras.items()}
        if lengths is None:
            y = state.extend(*arrays, **own)
        elif time > 1 and bool((lengths == 0).any()):
            raise ValueError("a row has nothing but padding: leave it out")
        else:
            y = state.extend(*arrays, lengths=lengths.tolist(), **own)
        states[self.layer_idx] = (state, position + time)
        return torch.from_numpy(y).to(x[0].dtype)


def _attention_of_llama(config: Any, layer_idx: int) -> torch.nn.Module:
    own = getattr(config, "attention_variant", None) is not None
    return (TermwiseAttention if own else _Llama)(config, layer_idx)


# Llama's layers ask for this name when they are made.
_Llama = modeling_llama.LlamaAttention
modeling_llama.LlamaAttention = _attention_of_llama  # type: ignore[assignment,misc]


def _attentions(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """The attention of each layer."""
    found = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        if index is not None and any(word in type(module).__name__ for word in ("Attention", "Attn")):
            found.setdefault(index, module)
    if not found:
        raise ValueError(f"no attention with a layer_idx was found in {type(model).__name__}")
    return found


def use(model: PreTrainedModel, variant: Variants | Mapping[int, Variants] | None) -> PreTrainedModel:
    """Lets a variant take over the attention of a loaded model: the same in all heads, one for each head, or for each layer by its index. None gives back softmax.

    Only variants that read nothing beyond q, k and v; q and k come as the model has prepared them, rotated. The model's own scale of scores stays unless the variant has one. Training
    works; so does generation, with transformers' cache of keys and values. Layers that are not named keep softmax.
    """
    modules = _attentions(model)
    by_layer: Mapping[int, Any] = variant if isinstance(variant, Mapping) else dict.fromkeys(modules, variant)
    unknown = set(by_layer) - set(modules)
    if unknown:
        raise ValueError(f"there is no layer {min(unknown)}: the model has {len(modules)}, counted from 0")
    texts = {}
    for index, own in by_layer.items():
        if own is None:
            continue
        each: list[VariantLike] = [own] if isinstance(own, (str, Variant)) else list(own)
        for one in each:
            if not Variant(one).has_no_extras:
                raise ValueError(f"{one!r} reads more than q, k and v, and the model has no weights for that: leave gates and parameters out")
        texts[index] = tuple(str(Variant(one)) for one in each)
    model.set_attn_implementation(NAME)
    for index, module in modules.items():
        module._termwise = texts.get(index)
    return model


@contextmanager
def _switched(model: PreTrainedModel) -> Iterator[None]:
    """With our attention, and afterwards as before."""
    before, training = model.config._attn_implementation, model.training
    model.set_attn_implementation(NAME)
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        model.train(training)


def _windows(model: PreTrainedModel, text: Any, tokenizer: Any, length: int | None, tokens: int) -> list[Tensor]:
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("a text needs the model's tokenizer: give tokenizer=…, or token ids")
        text = tokenizer(text)["input_ids"]
    ids = torch.as_tensor(text, dtype=torch.long).flatten()[:tokens]
    if ids.numel() == 0:
        raise ValueError("there is no text to look at")
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
    """The terms of the exponential series inside a model, as :meth:`termwise.Model.spectrum` gives them.

    text: with its tokenizer, or token ids.
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
def cut(
    model: PreTrainedModel,
    text: str | Sequence[int] | Tensor,
    *,
    orders: Sequence[int] = (2, 4, 8, 16),
    tokenizer: Any = None,
    length: int | None = None,
    tokens: int = 4096,
) -> dict[int | None, float]:
    """Mean loss in nats per token with every exp cut to its series up to each order, and under None that of the model as it is."""
    windows = [window for window in _windows(model, text, tokenizer, length, tokens) if len(window) > 1]
    if not windows:
        raise ValueError("a loss needs at least two tokens")

    def loss() -> float:
        total = count = 0.0
        for window in windows:
            logits = model(input_ids=window[None].to(model.device), use_cache=False).logits[0, :-1].double()
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
            count += len(window) - 1
        return total / count

    modules = _attentions(model)
    before = {index: getattr(module, "_termwise", None) for index, module in modules.items()}
    found: dict[int | None, float] = {}
    with _switched(model):
        try:
            found[None] = loss()
            for order in orders:
                for module in modules.values():
                    module._termwise = (f"taylor=0..{order}",)
                found[order] = loss()
        finally:
            for index, module in modules.items():
                module._termwise = before[index]
    return found
