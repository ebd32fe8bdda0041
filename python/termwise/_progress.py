"""Progress of long calls: a callback or a progress bar."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ._core import Variant

#: A function that receives every event; True for a progress bar, False for nothing.
Progress = bool | Callable[[dict[str, Any]], None]


def dumps(value: Any) -> str:
    """JSON of arguments, including paths, variants, NumPy scalars and arrays."""

    def plain(one: Any) -> Any:
        if isinstance(one, (np.generic, np.ndarray)):
            return one.tolist()
        if isinstance(one, os.PathLike):
            return os.fspath(one)
        if isinstance(one, Variant):
            return str(one)
        raise TypeError(f"arguments of type {type(one).__name__} are not supported, found {one!r}")

    return json.dumps(value, default=plain)


@contextmanager
def watched(progress: Progress, unit: str, total: int | None = None) -> Iterator[Callable[[str], object] | None]:
    """The callback for the extension module, which receives every event as JSON."""
    if callable(progress):
        yield lambda event: progress(json.loads(event))
        return
    bar = _bar(unit, total) if progress else None
    if bar is None:
        yield None
        return

    def show(event: str) -> None:
        values = json.loads(event)
        done, of = values.get("done", values.get("step")), values.get("of")
        if of is not None:
            bar.total = of
        if done is not None:
            bar.n = done
            bar.refresh()
        if "loss" in values and values["loss"] is not None:
            bar.set_postfix_str(f"{values.get('kind', 'loss').replace('_', '-')} {values['loss']:.4f}")

    try:
        yield show
    finally:
        bar.close()


def _bar(unit: str, total: int | None) -> Any:
    """A tqdm progress bar; None without tqdm, or outside of a terminal or notebook."""
    notebook = "ipykernel" in sys.modules
    if not notebook and not (sys.stderr and sys.stderr.isatty()):
        return None
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=unit)
