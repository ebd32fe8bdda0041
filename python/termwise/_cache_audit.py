"""Checks of any Transformers cache: bytes, positions, quantization, and agreement of chunked with token-by-token evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._errors import InputError

#: Tolerance for rounding, relative to the largest logit.
ROUNDING = 2e-3
#: Depth of the search for tensors in nested objects.
DEPTH = 6


@dataclass(frozen=True)
class CacheCheck:
    """One check: name, finding, and whether it passed; ``None`` if it does not apply."""

    name: str
    found: str
    passed: bool | None


@dataclass(frozen=True)
class CacheAudit:
    """The checks of a cache, its bytes after each chunk of the prompt, and the bytes of each attribute of its layers at the end."""

    checks: tuple[CacheCheck, ...]
    bytes: tuple[int, ...]
    parts: dict[str, int]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    def __str__(self) -> str:
        words = {True: "passed", False: "FAILED", None: "not checked"}
        return "\n".join(f"{words[check.passed]:12} {check.name}: {check.found}" for check in self.checks)


def _tensors(value: Any, depth: int = DEPTH, seen: set[int] | None = None) -> list[Tensor]:
    """All tensors in an object."""
    seen = set() if seen is None else seen
    if depth == 0 or id(value) in seen or isinstance(value, (str, bytes, int, float, bool, type(None), torch.nn.Module, type)):
        return []
    seen.add(id(value))
    found: list[Tensor] = []
    inner: list[Any] = []
    if isinstance(value, Tensor):
        # Quantized tensors of other packages store their codes in attributes, and have no storage of their own.
        inner = [own for own in vars(value).values() if isinstance(own, Tensor)] if type(value) is not Tensor else []
        found = [] if inner else [value]
    elif isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        inner = list(value)
    elif hasattr(value, "__dict__"):
        inner = list(vars(value).values())
    for own in inner:
        found += _tensors(own, depth - 1, seen)
    return found


def _bytes(value: Any) -> int:
    """Bytes of the storages of all tensors in an object, each counted once, and of states of termwise."""
    storages = {}
    for tensor in _tensors(value):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    layers = getattr(value, "layers", [value])
    states = sum(getattr(getattr(layer, "state", None), "bytes", 0) or 0 for layer in layers)
    return sum(storages.values()) + states


def _parts(cache: Any) -> dict[str, int]:
    """Bytes of each attribute, summed over layers."""
    found: dict[str, int] = {}
    for layer in getattr(cache, "layers", []):
        for name, value in vars(layer).items():
            size = (getattr(value, "bytes", 0) or 0) if name == "state" else _bytes(value)
            if size:
                found[name] = found.get(name, 0) + size
    return found


@torch.no_grad()
def audit_cache(
    model: Any, make_cache: Callable[[], Any], text: Any, *, tokenizer: Any = None, tokens: int = 256, chunk: int = 32, budget: int | None = None
) -> CacheAudit:
    """Check a Transformers cache on a text.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    make_cache : callable
        Returns a new, empty cache, such as ``lambda: DynamicCache(config=model.config)``.
    text : str or sequence of int
        Text, which needs ``tokenizer``, or token ids.
    tokenizer : optional
        Tokenizer of Transformers.
    tokens : int
        Largest number of tokens.
    chunk : int
        Tokens per chunk of the prompt.
    budget : int, optional
        Largest size of the cache in bytes, including buffers. Checked after every chunk.

    Returns
    -------
    CacheAudit
        Checks with verdicts; ``print`` shows them.

    Examples
    --------
    >>> import termwise.hf  # doctest: +SKIP
    >>> print(termwise.hf.audit_cache(model, lambda: DynamicCache(config=model.config), ids))  # doctest: +SKIP
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) and tokenizer is not None else text
    if isinstance(ids, str):
        raise InputError("text was given without a tokenizer; give tokenizer=, or token ids")
    ids = torch.as_tensor(list(ids)[:tokens], device=model.device)[None]
    length = ids.shape[1]
    if length < 4 or not 1 <= chunk < length:
        raise InputError(f"the text has {length} tokens, and chunks have {chunk}; give at least 4 tokens and a chunk that is shorter than the text")
    was_training = model.training
    model.eval()
    try:
        return _audit(model, make_cache, ids, chunk, budget)
    finally:
        model.train(was_training)


def _read(model: Any, cache: Any, ids: Tensor, chunk: int, positions: bool) -> tuple[Tensor, list[int], list[int]]:
    """Logits, bytes and the length that the cache reports after each chunk."""
    logits, sizes, lengths = [], [], []
    for start in range(0, ids.shape[1], chunk):
        part = ids[:, start : start + chunk]
        more = {"position_ids": torch.arange(start, start + part.shape[1], device=ids.device)[None]} if positions else {}
        logits.append(model(input_ids=part, past_key_values=cache, use_cache=True, **more).logits[0].float())
        sizes.append(_bytes(cache))
        lengths.append(int(cache.get_seq_length()))
    return torch.cat(logits), sizes, lengths


def _difference(expected: Tensor, found: Tensor) -> float:
    """The 90th percentile over positions of the difference relative to the largest logit of the position."""
    if not bool(found.isfinite().all()):
        return float("inf")
    relative = (expected - found).abs().amax(-1) / expected.abs().amax(-1).clamp_min(1e-30)
    return float(relative.quantile(0.9))


def _audit(model: Any, make_cache: Callable[[], Any], ids: Tensor, chunk: int, budget: int | None) -> CacheAudit:
    length = ids.shape[1]
    exact = model(input_ids=ids, use_cache=False).logits[0].float()
    cache = make_cache()
    chunked, sizes, lengths = _read(model, cache, ids, chunk, positions=False)
    own_change = _difference(exact, chunked)
    limit = max(ROUNDING, own_change)
    checks = []

    expected = [min(length, start + chunk) for start in range(0, length, chunk)]
    wrong = next((pair for pair in zip(lengths, expected, strict=True) if pair[0] != pair[1]), None)
    finding = "get_seq_length() is the number of tokens read" if wrong is None else f"get_seq_length() is {wrong[0]} after {wrong[1]} tokens"
    checks.append(CacheCheck("reported length", finding, wrong is None))

    explicit = _difference(chunked, _read(model, make_cache(), ids, chunk, positions=True)[0])
    checks.append(CacheCheck("positions", f"logits with explicit positions differ by {explicit:.1e} of the largest", explicit < ROUNDING))

    by_token = _difference(chunked, _read(model, make_cache(), ids, 1, positions=False)[0])
    finding = f"chunks of {chunk} and single tokens differ by {by_token:.1e}; the cache itself changes logits by {own_change:.1e}"
    checks.append(CacheCheck("chunks and single tokens", finding, by_token <= limit))

    peak = max(sizes)
    finding = f"at most {peak} bytes after a chunk" + ("" if budget is None else f", and the budget is {budget}")
    checks.append(CacheCheck("budget", finding, None if budget is None else peak <= budget))

    bits = next((own for owner in (cache, *getattr(cache, "layers", [])) if isinstance(own := getattr(owner, "nbits", None), int)), None)
    if bits is None:
        checks.append(CacheCheck("quantization", "the cache has no attribute nbits", None))
    else:
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        full = 2 * 2 * heads * dim * config.num_hidden_layers * length
        works = own_change > 0 and sizes[-1] < full
        finding = f"{sizes[-1]} bytes at {bits} bits, {full} at 16 bits; logits change by {own_change:.1e}"
        checks.append(CacheCheck("quantization", finding, works))
    return CacheAudit(tuple(checks), tuple(sizes), _parts(cache))
