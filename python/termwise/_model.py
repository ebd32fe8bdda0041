"""Models on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from ._attention import VariantLike, _sizes
from ._core import Variant
from ._errors import InputError
from ._progress import Progress, dumps, watched
from ._results import Result

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Text = str | Sequence[str]


def load(model: str | os.PathLike[str] | None = None, *, tokenizer: str | os.PathLike[str] | None = None) -> Model:
    """The model of this name: a folder in Hugging Face's form, a run, a checkpoint, or ``hf://owner/name``; without a name the newest run in ``runs/``.

    ``model = termwise.load("path/to/llama")``, then ``model.generate("Once")``, ``model.spectrum("book.txt")``.
    """
    named = None if tokenizer is None else os.fspath(tokenizer)
    return Model(_core.load_model(None if model is None else os.fspath(model), named))


class GenerationError(InputError):
    """Some prompts of :meth:`Model.generate` failed; the others were finished.

    texts: the text of each prompt, None for those that failed.
    errors: the message of each failed prompt, by its index.
    """

    def __init__(self, texts: list[str | None], errors: dict[int, str]) -> None:
        self.texts = texts
        self.errors = errors
        first = next(iter(errors.values()))
        more = f"; {len(errors)} of {len(texts)} prompts failed: the finished ones are in the attribute texts" if len(texts) > 1 else ""
        super().__init__(first + more)


class Model:
    """A model and its tokenizer, computed in float32 on the processor. Made by :func:`load`."""

    def __init__(self, core: Any) -> None:
        self._core = core

    @property
    def folder(self) -> Path:
        """Where it was read from."""
        return Path(self._core.folder)

    @property
    def config(self) -> dict[str, Any]:
        """Its ``config.json``."""
        return json.loads(self._core.config)

    @property
    def variants(self) -> list[list[Variant]]:
        """The variant of each head of each layer."""
        return self._core.variants

    @property
    def parameters(self) -> int:
        """How many numbers it has."""
        return self._core.parameters

    def __repr__(self) -> str:
        config, name = self.config, self.folder.name
        if self.folder.parent.name == "checkpoints":
            name = f"{self.folder.parent.parent.name}, {name}"
        return f"<Model {name}: {config['num_hidden_layers']} layers, {self.parameters:,} parameters>"

    def with_attention(self, variant: VariantLike) -> Model:
        """This model with another attention in all heads, where its weights suffice."""
        return Model(self._core.with_attention(variant))

    def with_order(self, order: int) -> Model:
        """This model with every ``exp`` cut to its series up to this order."""
        return Model(self._core.with_order(order))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes configuration, weights and tokenizer in Hugging Face's form."""
        self._core.save(os.fspath(folder))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; with special tokens, such as the one that begins it, unless told otherwise."""
        return self._core.encode(text, special)

    def decode(self, ids: ArrayLike) -> str:
        """The text of token ids."""
        return self._core.decode(np.asarray(ids).tolist())

    def _ids(self, tokens: Text | ArrayLike, lengths: Any) -> tuple[NDArray[np.uint32], Any]:
        if isinstance(tokens, str):
            tokens = [self.encode(tokens)]
        elif isinstance(tokens, Sequence) and tokens and isinstance(tokens[0], str):
            rows = [self.encode(text) for text in tokens]
            lengths = [len(row) for row in rows]
            tokens = [row + [0] * (max(lengths) - len(row)) for row in rows]
        ids = np.asarray(tokens)
        if ids.ndim == 1:
            ids = ids[None]
        if ids.dtype.kind not in "iu" or ids.ndim != 2 or (ids < 0).any() or (ids >= 2**32).any():
            raise InputError(f"token ids are whole numbers from 0 on, [batch, time] or [time], found shape {ids.shape} of {ids.dtype}")
        return np.ascontiguousarray(ids, np.uint32), _sizes("lengths", lengths)

    def logits(self, tokens: Text | ArrayLike, *, lengths: ArrayLike | None = None) -> NDArray[np.float32]:
        """Logits [batch, time, vocabulary] of the token that follows each position of a text, of texts, or of token ids."""
        ids, sizes = self._ids(tokens, lengths)
        out = np.empty((*ids.shape, self.config["vocab_size"]), np.float32)
        self._core.logits(ids, sizes, out)
        return out

    def losses(
        self, tokens: Text | ArrayLike, labels: ArrayLike | None = None, *, lengths: ArrayLike | None = None
    ) -> NDArray[np.float64]:
        """Cross-entropy in nats of each position, [batch, time]. Without labels that of the next token, and NaN where there is none; labels of -100 are NaN, too."""
        return self._losses(tokens, labels, lengths)[0]

    def loss(self, tokens: Text | ArrayLike, labels: ArrayLike | None = None, *, lengths: ArrayLike | None = None) -> float:
        """Mean cross-entropy in nats per token."""
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
            wanted = np.asarray(labels).reshape(ids.shape)
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
        """The text that follows a prompt; for a list of prompts a list of texts.

        At temperature 0, the default, the most probable token is taken. With ``order`` every exp is cut to its series up to that order, and the model
        remembers with states of constant size. ``on_text`` gets the text piece by piece, while it is written.

        A prompt that fails does not stop the others: :class:`GenerationError` is raised after they are finished, and has their texts.
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
        data: Text | None = None,
        *,
        text: str | None = None,
        length: int | None = None,
        tokens: int = 4096,
        queries: int | None = 256,
        seed: int = 1,
        max_order: int = 32,
        progress: Progress = True,
        **settings: Any,
    ) -> Result:
        """The terms of the exponential series inside the model, and how many of them each head needs.

        data: files, folders or ``hf://datasets/…``; or ``text`` itself; without both, the held-out part of what a checkpoint was trained on.
        queries: of each window, that are looked at; None for all.
        settings: of data, as ``termwise train`` has them: tokenizer, field, documents, ….
        """
        ids = None if text is None else self.encode(text)[:tokens]
        reads = self._reads(data, ids, length, settings)
        options = {"tokens": tokens, "queries": queries, "seed": seed, "max_order": max_order}
        with watched(progress, "layers") as callback:
            return Result(self._core.spectrum(dumps(reads), dumps(options), callback))

    def cut(
        self,
        data: Text | None = None,
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
        progress: Progress = True,
        **settings: Any,
    ) -> Result:
        """What cutting exp to a finite order costs and saves: all layers at each order, one layer at a time, and a plan within a budget of loss.

        With ``save`` the model with the plan's cuts is written into that folder.
        """
        options = {
            "orders": list(orders), "coefficients": list(coefficients), "draw_map": layers, "budget": None if budget is None else str(budget),
            "context": context, "queries": queries, "sequential": sequential, "batch": batch, "batches": batches,
            "save": None if save is None else os.fspath(save), "overwrite": overwrite,
        }  # fmt: skip
        reads = self._reads(data, None, length, settings)
        with watched(progress, "cut") as callback:
            return Result(self._core.cut(dumps(reads), dumps(options), callback))

    @staticmethod
    def _reads(data: Text | None, ids: list[int] | None, length: int | None, settings: dict[str, Any]) -> dict[str, Any]:
        cache = settings.pop("cache", None)
        if data is not None:
            settings["data"] = [os.fspath(data)] if isinstance(data, (str, os.PathLike)) else [os.fspath(one) for one in data]
        return {"data": settings, "ids": ids, "length": length, "cache": None if cache is None else os.fspath(cache)}
