"""Long work: training, sweeps, the two papers, constant memory."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import _core
from ._core import Variant
from ._errors import InputError
from ._progress import Progress, dumps, watched
from ._results import Result

#: What starts this program again, for the runs of a sweep.
AGAIN = [sys.executable, "-m", "termwise"]


def _path(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, (str, int, float, np.generic, os.PathLike, Variant)) else list(value)


def _whole(value: Any) -> list[Any]:
    """Whole numbers, which may be written as 1e4."""
    return [int(x) if isinstance(x, float) and x.is_integer() else x for x in _list(value)]


def train(
    folder: str | os.PathLike[str] | None = None,
    *,
    runs: str | os.PathLike[str] = "runs",
    resume: bool = False,
    overwrite: bool = False,
    init_from: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress = True,
    **settings: Any,
) -> Result:
    """Trains a model, ``termwise train`` with its flags as keywords: ``train("first", model="tiny", attention="norm conv=3", steps=200)``.

    folder: of the run; without it one in ``runs`` with a name made from the settings.
    init_from: a model to start from, as :func:`load` takes it; the flag ``--from``.
    resume: go on from the newest checkpoint.
    overwrite: replace the run in ``folder``; it is kept until the new run has its first checkpoint.
    progress: a function that gets every line of ``metrics.jsonl`` as a dict, as it is written; or True for a bar of tqdm.

    Ctrl-C finishes the step and writes a checkpoint before it is raised; so does an exception of ``progress``. Resumed, a run goes on bit for bit.
    """
    if init_from is not None:
        settings["from"] = os.fspath(_core.find_model(os.fspath(init_from)))
    options = {
        "settings": {key: _list(value) if key == "data" else value for key, value in settings.items() if value is not None},
        "folder": _path(folder), "runs": os.fspath(runs), "resume": resume, "overwrite": overwrite, "cache": _path(cache),
    }  # fmt: skip
    with watched(progress, "steps", settings.get("steps")) as callback:
        return Result(_core.train(dumps(options), callback))


def sweep(
    plan: str | os.PathLike[str] | Mapping[str, Any],
    folder: str | os.PathLike[str] | None = None,
    *,
    parallel: int = 1,
    retry: bool = False,
    skip_equal: bool = False,
    progress: Progress = True,
) -> Result:
    """Trains every combination of some settings, each in a process of its own, and compares.

    plan: a TOML file, or what would stand in it: ``{"base": {"model": "tiny"}, "axes": {"attention": ["softmax", "norm"], "seed": [1, 2]}}``.
    folder: of the sweep; needed unless the plan is a file. Runs that are finished there are not run again.
    progress: a function that gets every event (started, finished, failed, progress) as a dict; or True for a bar.
    """
    own = isinstance(plan, Mapping)
    if folder is None:
        if own:
            raise InputError("a plan that is no file has no name: say which folder the sweep is kept in")
        folder = os.path.join("sweeps", os.path.splitext(os.path.basename(os.fspath(plan)))[0])
    options = {
        "file": None if own else os.fspath(plan), "plan": dict(plan) if own else None, "folder": os.fspath(folder), "parallel": parallel,
        "retry": retry, "skip_equal": skip_equal, "again": AGAIN,
    }  # fmt: skip
    with watched(progress, "runs") as callback:
        return Result(_core.run_sweep(dumps(options), callback))


def reproduce(
    experiments: str | Sequence[str] = "all",
    *,
    scale: str = "minute",
    data: str | Sequence[str] = (),
    seeds: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    retry: bool = False,
    progress: Progress = True,
) -> Result:
    """Runs the experiments of two papers, with a verdict for every claim: ``reproduce("e4", seeds=8)``.

    scale: ``"minute"``, five minutes on two cores for all of them, or ``"laptop"``, about an hour.
    """
    options = {
        "experiments": _list(experiments), "scale": scale, "data": _list(data), "seeds": seeds, "folder": _path(folder), "retry": retry,
        "again": AGAIN,
    }  # fmt: skip
    with watched(progress, "runs") as callback:
        return Result(_core.run_reproduce(dumps(options), callback))


def separation(
    networks: str | Sequence[str] = (),
    *,
    n: int | Sequence[int] = (),
    d: int | Sequence[int] = (),
    m: int | Sequence[int] = (),
    a1: float | Sequence[float] = (),
    cross: bool = False,
    bridge: bool = False,
    draws: int = 10_000,
    seed: int = 1,
    progress: Progress = True,
) -> Result:
    """Tells a spike from none: where softmax attention succeeds and linear attention cannot.

    Without arguments the reference figures; otherwise every combination of ``networks`` (``"softmax"``, ``"linear"``, ``"power=3"``, ``"taylor=2..8"``), rows ``n``, columns
    ``d``, readouts ``m`` and spikes ``a1``; with ``bridge`` the smallest order that succeeds, against ``n``.
    """
    options = {
        "networks": _list(networks), "n": _whole(n), "d": _whole(d), "m": _whole(m), "a1": [float(x) for x in _list(a1)],
        "cross": cross, "bridge": bridge, "draws": draws, "seed": seed,
    }  # fmt: skip
    with watched(progress, "points") as callback:
        return Result(_core.run_separation(dumps(options), callback))


def _call(command: str, model: str | os.PathLike[str] | None, flags: Mapping[str, Any], progress: Progress) -> Result:
    """A command of the program: None leaves a flag out, a list gives it several times."""
    words = [command, *([] if model is None else [os.fspath(model)]), "--quiet"]
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        for one in [value] if isinstance(value, (str, os.PathLike)) else _list(value):
            words.append(flag if one is True else f"{flag}={str(one).lower() if one is False else one}")
    with watched(progress, command) as callback:
        try:
            return Result(_core.call(words, callback))
        except ValueError as error:
            # Flags are keywords here.
            text = re.sub(r"(?<![\w-])--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), str(error))
            raise InputError(text) from None


def convert(
    model: str | os.PathLike[str] | None,
    data: str | os.PathLike[str] | Sequence[str],
    *,
    bytes: int | str | None = None,
    keys: int | None = None,
    loss: str | None = None,
    save: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress = True,
    **settings: Any,
) -> Result:
    """Replace a model's KV cache with fixed-size memory, allocated per KV head under a byte budget: ``convert("path/to/llama", "book.txt", keys=128, save="small")``, then ``load("small")``.

    model: as :func:`load` takes it.
    data: texts; the first half of each is used for calibration, the second is measured.
    bytes, keys, loss: one of them is the budget: the bytes of one text's state (``"8MB"``), which is never exceeded; the same in float32 keys and values per KV head; or the rise of the loss
    (``"+1%"``).
    save: folder for the converted model. A folder that is not empty needs ``overwrite``; folders of runs and checkpoints are refused.
    folder: for the report, and for finished measurements, from which the same call resumes.
    settings: further flags of ``termwise kv convert``: contexts, length, calibration, calibration_contexts, calibration_length, cache, and those of data.
    """
    flags = {"data": data, "bytes": bytes, "keys": keys, "loss": loss, "save": save, "overwrite": overwrite or None, "out": folder, **settings}
    return _call("convert", model, flags, progress)


def frontier(
    model: str | os.PathLike[str] | None,
    data: str | os.PathLike[str] | Sequence[str],
    *,
    keys: int | Sequence[int] = (64, 128, 256, 512),
    methods: str | Sequence[str] = (),
    contexts: int = 12,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress = True,
    **settings: Any,
) -> Result:
    """Loss and KL against bytes for every kind of constant memory, on the same contexts: ``frontier("path/to/llama", ["book.txt", "news.txt"], folder="frontier")``.

    keys: budgets, in keys and values of float32 for each kv head.
    methods: those to compare; without any, all.
    contexts: of each text, that are measured.
    folder: keeps every measurement as it comes; the same call goes on from there.
    settings: further flags of ``termwise kv frontier``: length, calibration, calibration_contexts, calibration_length, cache, and those of data.
    """
    flags = {"data": data, "keys": keys, "methods": methods, "contexts": contexts, "out": folder, **settings}
    return _call("frontier", model, flags, progress)


def audit(
    model: str | os.PathLike[str],
    against: str | os.PathLike[str],
    data: str | os.PathLike[str] | Sequence[str] | None = None,
    *,
    contexts: int = 2,
    length: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress = True,
    **settings: Any,
) -> Result:
    """Checks a converted model against its original, with a verdict for each check: ``audit("small", "path/to/llama", "book.txt")``.

    contexts, length: how many texts, and of how many tokens.
    folder: for the report.
    settings: further flags of ``termwise kv audit``: cache, and those of data.
    """
    flags = {"against": against, "data": data, "contexts": contexts, "length": length, "out": folder, **settings}
    return _call("audit", model, flags, progress)


def atlas(
    model: str | os.PathLike[str] | None,
    data: str | os.PathLike[str] | Sequence[str],
    *,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress = True,
    **settings: Any,
) -> Result:
    """What every head of a model looks back at: far keys, first keys, how far, and how their scores spread: ``atlas("path/to/llama", "book.txt")``.

    folder: for the report.
    settings: further flags of ``termwise kv atlas``: calibration_contexts, calibration_length, cache, and those of data.
    """
    return _call("atlas", model, {"data": data, "out": folder, **settings}, progress)
