"""How far long work is: a function of the caller's, or a bar."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np

from ._core import Variant

#: A function that gets every event; True for a bar, False for nothing.
Progress = bool | Callable[[dict[str, Any]], None]


def dumps(value: Any) -> str:
    """JSON of arguments, with the types that Python code has: paths, variants, NumPy's numbers and arrays."""

    def plain(one: Any) -> Any:
        if isinstance(one, (np.generic, np.ndarray)):
            return one.tolist()
        if isinstance(one, os.PathLike):
            return os.fspath(one)
        if isinstance(one, Variant):
            return str(one)
        raise TypeError(f"an argument cannot be used: {one!r} is a {type(one).__name__}")

    return json.dumps(value, default=plain)


@contextmanager
def watched(progress: Progress, what: str, total: int | None = None) -> Any:
    """What is given to the extension module: it calls it with the JSON of every event."""
    if callable(progress):
        yield lambda event: progress(json.loads(event))
        return
    bar = _bar(what, total) if progress else None
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


def _bar(what: str, total: int | None) -> Any:
    """That of tqdm where it is installed and somebody looks on."""
    notebook = "ipykernel" in sys.modules
    if not notebook and not (sys.stderr and sys.stderr.isatty()):
        return None
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=what)
