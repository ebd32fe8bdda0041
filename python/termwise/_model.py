"""Models on disk."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from . import _core
from ._attention import VariantLike, _Immutable, _sizes
from ._commands import Path, Texts, _run, _texts
from ._core import Variant
from ._errors import InputError
from ._progress import Progress, dumps
from ._results import Result
from ._settings import DataSettings

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Text = str | Sequence[str]


def load(model: str | os.PathLike[str] | None = None, *, tokenizer: str | os.PathLike[str] | None = None) -> Model:
    """Load a model.

    Parameters
    ----------
    model : path, optional
        A folder in the Hugging Face format, a run, a checkpoint, or ``hf://owner/name``. Default: the newest run in ``runs/``.
    tokenizer : path, optional
        A ``tokenizer.json``, a folder that contains one, or ``"bytes"``. Default: that of the model.

    Returns
    -------
    Model

    Examples
    --------
    >>> import termwise
    >>> model = termwise.load("path/to/llama")  # doctest: +SKIP
    >>> model.generate("Once", max_tokens=20)  # doctest: +SKIP
    """
    named = None if tokenizer is None else os.fspath(tokenizer)
    return Model._loaded(None if model is None else os.fspath(model), named)


def _token_ids(values: Any) -> NDArray[np.integer[Any]]:
    ids = np.asarray(values)
    if ids.size == 0:
        ids = ids.astype(np.int64)
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or (ids < 0).any() or (ids >= 2**32).any():
        raise InputError(f"token ids are non-negative integers, [batch, time] or [time], found shape {ids.shape} of {ids.dtype}")
    return ids


class GenerationError(InputError):
    """Some prompts of :meth:`Model.generate` failed; the others are finished.

    Attributes
    ----------
    texts : list of str or None
        The text of each prompt, None for failed ones.
    errors : dict of int to str
        The message of each failed prompt by its index.
    """

    def __init__(self, texts: list[str | None], errors: dict[int, str]) -> None:
        self.texts = texts
        self.errors = errors
        first = next(iter(errors.values()))
        more = f"; {len(errors)} of {len(texts)} prompts failed: the finished ones are in the attribute texts" if len(texts) > 1 else ""
        super().__init__(first + more)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.texts, self.errors)


class Model(_Immutable):
    """A model and its tokenizer, computed in float32 on the CPU. Made by :func:`load`.

    It is immutable. A pickle contains its folder, not its weights.
    """

    def __init__(self, core: _core.Model, rebuild: tuple[Any, ...]) -> None:
        self._core, self._rebuild = core, rebuild

    @classmethod
    def _loaded(cls, name: str | None, tokenizer: str | None) -> Model:
        core = _core.load_model(name, tokenizer)
        return cls(core, (cls._loaded, (os.path.abspath(core.folder), tokenizer)))

    def _changed(self, method: str, argument: Any) -> Model:
        """The model that a method of the extension returns."""
        return Model(getattr(self._core, method)(argument), (Model._changed, (self, method, argument)))

    @property
    def folder(self) -> pathlib.Path:
        """Folder of the model."""
        return pathlib.Path(self._core.folder)

    @property
    def config(self) -> dict[str, Any]:
        """Content of its ``config.json``."""
        config: dict[str, Any] = json.loads(self._core.config)
        return config

    @property
    def variants(self) -> list[list[Variant]]:
        """The variant of each head of each layer."""
        return self._core.variants

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self._core.parameters

    def __repr__(self) -> str:
        config, name = self.config, self.folder.name
        if self.folder.parent.name == "checkpoints":
            name = f"{self.folder.parent.parent.name}, {name}"
        return f"<Model {name}: {config['num_hidden_layers']} layers, {self.parameters:,} parameters>"

    def with_attention(self, variant: VariantLike) -> Model:
        """Return this model with another variant in all heads. The variant must need no further weights."""
        return self._changed("with_attention", variant)

    def with_order(self, order: int) -> Model:
        """Return this model with every ``exp`` truncated to its series up to this order."""
        return self._changed("with_order", order)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write configuration, weights and tokenizer in the Hugging Face format."""
        self._core.save(os.fspath(folder))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text; ``special`` adds the special tokens of the tokenizer's template."""
        return self._core.encode(text, special)

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of token ids."""
        return self._core.decode(_token_ids(ids).ravel().tolist())

    def _ids(self, tokens: Text | ArrayLike, lengths: Any) -> tuple[NDArray[np.uint32], Any]:
        if isinstance(tokens, str):
            tokens = [self.encode(tokens)]
        elif isinstance(tokens, Sequence) and tokens and isinstance(tokens[0], str):
            if lengths is not None:
                raise InputError("lengths are those of the texts: leave lengths out, or give token ids")
            rows = [self.encode(str(text)) for text in tokens]
            lengths = [len(row) for row in rows]
            tokens = [row + [0] * (max(lengths) - len(row)) for row in rows]
        ids = _token_ids(tokens)
        return np.ascontiguousarray(ids[None] if ids.ndim == 1 else ids, np.uint32), _sizes("lengths", lengths)

    def logits(self, tokens: Text | ArrayLike, *, lengths: ArrayLike | None = None) -> NDArray[np.float32]:
        """Return logits [batch, time, vocabulary] of the next token at each position of a text, of texts, or of token ids."""
        ids, sizes = self._ids(tokens, lengths)
        out = np.empty((*ids.shape, self.config["vocab_size"]), np.float32)
        self._core.logits(ids, sizes, out)
        return out

    def losses(
        self, tokens: Text | ArrayLike, labels: ArrayLike | None = None, *, lengths: ArrayLike | None = None
    ) -> NDArray[np.float64]:
        """Return the cross-entropy in nats of each position, [batch, time]. Default labels: the next token. Positions without a label, or with the label -100, are NaN."""
        return self._losses(tokens, labels, lengths)[0]

    def loss(self, tokens: Text | ArrayLike, labels: ArrayLike | None = None, *, lengths: ArrayLike | None = None) -> float:
        """Return the mean cross-entropy in nats/token."""
        _, total, count = self._losses(tokens, labels, lengths)
        if not count:
            raise InputError("no token is predicted: a loss needs a text of at least two tokens, or labels other than -100")
        return total / count

    def _losses(self, tokens: Any, labels: Any, lengths: Any) -> tuple[NDArray[np.float64], float, int]:
        ids, sizes = self._ids(tokens, lengths)
        if labels is None:
            wanted = np.full(ids.shape, -100, np.int64)
            wanted[:, :-1] = ids[:, 1:]
            for row, length in enumerate(sizes or []):
                wanted[row, max(length - 1, 0) :] = -100
        else:
            wanted = np.asarray(labels)
            if wanted.dtype.kind not in "iu" or wanted.size != ids.size or ((wanted < 0) & (wanted != -100)).any() or (wanted >= 2**31).any():
                raise InputError(f"labels must be token ids or -100, of shape {ids.shape}, found shape {wanted.shape} of {wanted.dtype}")
            wanted = wanted.reshape(ids.shape)
        total, count, each = self._core.loss(ids, wanted.astype(np.int32).ravel().tolist(), sizes)
        losses = np.where(wanted == -100, np.nan, np.array(each).reshape(ids.shape))
        return losses, total, count

    def generate(
        self,
        prompt: Text = "",
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: Text = (),
        echo: bool = False,
        batch: int = 8,
        order: int | None = None,
        beyond_context: bool = False,
        ignore_end: bool = False,
        on_text: Callable[[str], None] | None = None,
    ) -> Any:
        """Generate text.

        Parameters
        ----------
        prompt : str or sequence of str
            One prompt, or several.
        max_tokens : int
            Largest number of new tokens.
        temperature : float
            0 selects the most probable token.
        top_k, top_p, min_p, repetition_penalty, seed
            Options of sampling.
        stop : str or sequence of str
            Strings at which generation ends.
        echo : bool
            Repeat the prompt in the output.
        batch : int
            Prompts per batch.
        order : int, optional
            Truncate every exp to its series up to this order. The model then has states of constant size.
        beyond_context : bool
            Continue beyond the context of the model.
        ignore_end : bool
            Do not stop at end-of-text tokens.
        on_text : callable, optional
            Receives the text in pieces while it is generated.

        Returns
        -------
        str or list of str
            The text of the prompt, or one per prompt.

        Raises
        ------
        GenerationError
            If a prompt failed. The other prompts are finished first; the exception has their texts.
        """
        options = {
            "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
            "repetition_penalty": repetition_penalty, "seed": seed, "stop": [stop] if isinstance(stop, str) else list(stop), "echo": echo,
            "batch": batch, "order": order, "beyond_context": beyond_context, "ignore_end": ignore_end,
        }  # fmt: skip
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        callback = None if on_text is None else lambda event: on_text(json.loads(event)["text"])
        written, failed = self._core.generate(prompts, dumps(options), callback)
        texts: list[str | None] = [None] * len(prompts)
        for one in map(json.loads, written):
            texts[one["index"]] = one["text"]
        if failed:
            raise GenerationError(texts, dict(failed))
        return texts[0] if isinstance(prompt, str) else texts

    def spectrum(
        self,
        data: Texts | None = None,
        *,
        text: str | None = None,
        length: int | None = None,
        tokens: int = 4096,
        queries: int | None = 256,
        seed: int = 1,
        max_order: int = 32,
        cache: Path | None = None,
        progress: Progress = True,
        **settings: Unpack[DataSettings],
    ) -> Result:
        """Measure how many terms of the exponential series each head needs.

        Parameters
        ----------
        data : path or sequence of paths, optional
            Files, folders or ``hf://datasets/…``. Default: the held-out part of the data that a checkpoint was trained on.
        text : str, optional
            A text instead of ``data``.
        length : int, optional
            Tokens per window.
        tokens : int
            Largest number of tokens.
        queries : int or None
            Sampled queries per window; None for all.
        seed : int
            Seed of the sample.
        max_order : int
            Highest order.
        progress : bool or callable
            A function that receives every event as a dict; True for a progress bar.
        cache : path, optional
            Folder for tokenized text.
        **settings
            Settings of data; :class:`DataSettings` lists them.

        Returns
        -------
        Result
            ``layers.heads`` with entropies, shares of the orders and truncation errors.
        """
        ids = None if text is None else self.encode(text)[:tokens]
        reads = self._reads(data, ids, length, cache, settings)
        options = {"tokens": tokens, "queries": queries, "seed": seed, "max_order": max_order}
        return _run(partial(self._core.spectrum, dumps(reads)), options, progress, "layers")

    def truncate(
        self,
        data: Texts | None = None,
        *,
        orders: Sequence[int] = (2, 4, 6, 8, 10, 12, 16),
        coefficients: Sequence[str] = ("taylor", "calibrated"),
        layers: bool = True,
        budget: str | float | None = "1%",
        context: int | None = None,
        queries: int = 2048,
        sequential: bool = False,
        length: int | None = None,
        batch: int = 8,
        batches: int = 0,
        save: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        cache: Path | None = None,
        progress: Progress = True,
        **settings: Unpack[DataSettings],
    ) -> Result:
        """Measure loss and cost with exp truncated to a finite order: all layers, one layer at a time, and a plan within a budget.

        Parameters
        ----------
        data : path or sequence of paths, optional
            Texts. Default: the held-out part of the data that a checkpoint was trained on.
        orders : sequence of int
            Orders to truncate to.
        coefficients : sequence of str
            ``"taylor"``, ``"calibrated"``.
        layers : bool
            Also truncate one layer at a time.
        budget : str or float, optional
            Largest relative loss increase for the plan, such as ``"1%"``; None for no plan.
        context, queries, length, batch, batches : int
            Context for costs, queries for calibration, tokens per window, windows per batch, and batches (0: all).
        sequential : bool
            Calibrate layer by layer.
        save : path, optional
            Folder for the model with the orders of the plan.
        overwrite : bool
            Replace a model in ``save``.
        progress : bool or callable
            A function that receives every event as a dict; True for a progress bar.
        cache : path, optional
            Folder for tokenized text.
        **settings
            Settings of data; :class:`DataSettings` lists them.

        Returns
        -------
        Result
            Losses by order and layer, and the plan.
        """
        options = {
            "orders": list(orders), "coefficients": list(coefficients), "draw_map": layers, "budget": None if budget is None else str(budget),
            "context": context, "queries": queries, "sequential": sequential, "batch": batch, "batches": batches,
            "save": None if save is None else os.fspath(save), "overwrite": overwrite,
        }  # fmt: skip
        reads = self._reads(data, None, length, cache, settings)
        return _run(partial(self._core.cut, dumps(reads)), options, progress, "truncate")

    #: Former name of :meth:`truncate`.
    cut = truncate

    @staticmethod
    def _reads(data: Texts | None, ids: list[int] | None, length: int | None, cache: Path | None, settings: Mapping[str, Any]) -> dict[str, Any]:
        if length is not None and length < 1:
            raise InputError(f"length must be at least 1, found {length}")
        texts = _texts(data, cache, settings)
        return {"data": texts["settings"], "ids": ids, "length": length, "cache": texts["cache"]}
