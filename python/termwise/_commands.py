"""Training, sweeps, the experiments of the papers, and fixed-size memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import numpy as np

from . import _core
from ._core import Variant
from ._errors import InputError
from ._progress import Progress, dumps, watched
from ._results import Result
from ._settings import DataSettings, Settings

#: A file, a folder, or a name that :func:`termwise.load` accepts.
Path = str | os.PathLike[str]
#: Texts by path: one or several.
Texts = Path | Sequence[Path]
#: The command that starts the runs of a sweep, each in its own process.
RESPAWN_ARGV = [sys.executable, "-m", "termwise"]


def _path(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, (str, int, float, np.generic, os.PathLike, Variant)) else list(value)


def _integers(value: Any) -> list[Any]:
    """Integers, which may be given as floats such as 1e4."""
    return [int(x) if isinstance(x, float) and x.is_integer() else x for x in _list(value)]


def _strings(value: Any) -> list[str]:
    return [os.fspath(one) if isinstance(one, os.PathLike) else str(one) for one in _list(value)]


def _run(entry: Callable[..., _core.Found], options: Mapping[str, Any], progress: Progress, unit: str, total: int | None = None) -> Result:
    """Call an entry point of the extension module; ``unit`` labels the progress bar."""
    with watched(progress, unit, total) as callback:
        return Result(entry(dumps(options), callback))


def train(
    folder: Path | None = None,
    *,
    runs: Path = "runs",
    resume: bool = False,
    overwrite: bool = False,
    init_from: Path | None = None,
    cache: Path | None = None,
    progress: Progress = True,
    **settings: Unpack[Settings],
) -> Result:
    """Train a model.

    Ctrl-C and an exception of ``progress`` finish the step and write a checkpoint before they are raised. A resumed run is bit-identical to an uninterrupted one.

    Parameters
    ----------
    folder : path, optional
        Folder of the run. Default: a folder in ``runs`` with a name made from the settings.
    runs : path
        Folder of runs.
    resume : bool
        Resume from the newest checkpoint.
    overwrite : bool
        Replace the run in ``folder``. The old run is kept until the new one has its first checkpoint.
    init_from : path, optional
        Model to start from, as :func:`load` accepts it; the flag ``--from``.
    cache : path, optional
        Folder for tokenized text. Default: ``termwise`` in the user's cache.
    progress : bool or callable
        A function that receives every line of ``metrics.jsonl`` as a dict; True for a progress bar (tqdm).
    **settings
        Settings of training, such as ``steps=200``; :class:`Settings` lists them.

    Returns
    -------
    Result
        ``finished``, ``step``, the losses and the path of the last ``checkpoint``.

    Examples
    --------
    >>> import tempfile, termwise
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = termwise.train(f"{folder}/first", model="tiny", attention="norm conv=3", steps=2, batch=2, progress=False)
    >>> run.finished, run.step
    (True, 2)
    """
    given: dict[str, Any] = {key: value for key, value in settings.items() if value is not None}
    if "data" in given:
        given["data"] = _strings(given["data"])
    if init_from is not None:
        given["from"] = os.fspath(_core.find_model(os.fspath(init_from)))
    options = {
        "settings": given, "folder": _path(folder), "runs": os.fspath(runs), "resume": resume, "overwrite": overwrite, "cache": _path(cache),
    }  # fmt: skip
    return _run(_core.train, options, progress, "steps", settings.get("steps"))


def sweep(
    plan: Path | Mapping[str, Any],
    folder: Path | None = None,
    *,
    parallel: int = 1,
    retry: bool = False,
    skip_equal: bool = False,
    progress: Progress = True,
) -> Result:
    """Train every combination of some settings, each in its own process, and compare the runs.

    Parameters
    ----------
    plan : path or mapping
        A TOML file, or its content: ``{"base": {"model": "tiny"}, "axes": {"attention": ["softmax", "norm"], "seed": [1, 2]}}``.
    folder : path, optional
        Folder of the sweep; required unless the plan is a file. Finished runs in it are not repeated.
    parallel : int
        Runs at a time.
    retry : bool
        Repeat runs that failed.
    skip_equal : bool
        Skip runs whose attention is mathematically equal to that of an earlier run.
    progress : bool or callable
        A function that receives every event (started, finished, failed, progress) as a dict; True for a progress bar.

    Returns
    -------
    Result
        The runs with their metrics, and comparisons along the axes.

    Examples
    --------
    >>> import termwise
    >>> plan = {"base": {"model": "tiny", "steps": 200}, "axes": {"attention": ["softmax", "norm"], "seed": [1, 2]}}
    >>> result = termwise.sweep(plan, "sweeps/first", parallel=2)  # doctest: +SKIP
    """
    file = None if isinstance(plan, Mapping) else os.fspath(plan)
    if folder is None:
        if file is None:
            raise InputError("a sweep whose plan is not a file needs a folder: give folder")
        folder = os.path.join("sweeps", os.path.splitext(os.path.basename(file))[0])
    options = {
        "file": file, "plan": dict(plan) if isinstance(plan, Mapping) else None, "folder": os.fspath(folder), "parallel": parallel,
        "retry": retry, "skip_equal": skip_equal, "again": RESPAWN_ARGV,
    }  # fmt: skip
    return _run(_core.run_sweep, options, progress, "runs")


def reproduce(
    experiments: str | Sequence[str] = "all",
    *,
    scale: Literal["minute", "laptop", "text", "mini"] = "minute",
    data: Texts = (),
    seeds: int | None = None,
    folder: Path | None = None,
    retry: bool = False,
    progress: Progress = True,
) -> Result:
    """Run the experiments of two papers, with a verdict for every claim.

    Parameters
    ----------
    experiments : str or sequence of str
        Experiments such as ``"e4"``, or ``"all"``.
    scale : {"minute", "laptop", "text", "mini"}
        ``"minute"`` takes about five minutes on two cores for all experiments, ``"laptop"`` about an hour. ``"text"`` trains on ``data`` for hours. ``"mini"`` is
        multi-query associative recall.
    data : path or sequence of paths
        Texts to train on. Default: synthetic associative recall.
    seeds : int, optional
        Seeds per run. Default: those of the scale.
    folder : path, optional
        Folder of the runs and the report. Finished runs in it are not repeated.
    retry : bool
        Repeat runs that failed.
    progress : bool or callable
        A function that receives every event as a dict; True for a progress bar.

    Returns
    -------
    Result
        Runs, figures, and the verdict of each claim.

    Examples
    --------
    >>> import termwise
    >>> result = termwise.reproduce("e4", seeds=8)  # doctest: +SKIP
    """
    options = {
        "experiments": _list(experiments), "scale": scale, "data": _strings(data), "seeds": seeds, "folder": _path(folder), "retry": retry,
        "again": RESPAWN_ARGV,
    }  # fmt: skip
    return _run(_core.run_reproduce, options, progress, "runs")


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
    """Reproduce the softmax/linear separation theorem.

    Without arguments: the reference figures. Otherwise: every combination of ``networks``, ``n``, ``d``, ``m`` and ``a1``.

    Parameters
    ----------
    networks : str or sequence of str
        ``"softmax"``, ``"linear"``, ``"power=3"``, ``"taylor=2..8"``.
    n, d, m : int or sequence of int
        Rows, columns and readouts.
    a1 : float or sequence of float
        Size of the spike.
    cross : bool
        Cross-attention: the row sums of the queries are all √ln n.
    bridge : bool
        Measure the smallest order that succeeds as a function of ``n``.
    draws, seed : int
        Random draws per point, and their seed.
    progress : bool or callable
        A function that receives every event as a dict; True for a progress bar.

    Returns
    -------
    Result
        ``points``, ``reference`` or ``bridge``.

    Examples
    --------
    >>> import termwise
    >>> termwise.separation("softmax", n=[100, 1000], draws=50, progress=False).to_numpy("points.n")
    array([ 100., 1000.])
    """
    options = {
        "networks": _list(networks), "n": _integers(n), "d": _integers(d), "m": _integers(m), "a1": [float(x) for x in _list(a1)],
        "cross": cross, "bridge": bridge, "draws": draws, "seed": seed,
    }  # fmt: skip
    return _run(_core.run_separation, options, progress, "points")


def _texts(data: Texts | None, cache: Path | None, settings: Mapping[str, Any], calibration: Texts = (), **sizes: int | None) -> dict[str, Any]:
    """The arguments of texts in the form that the extension reads."""
    own = {key: value for key, value in settings.items() if value is not None}
    if data is not None:
        own["data"] = _strings(data)
    return {"settings": own, "cache": _path(cache), "calibration": _strings(calibration), **sizes}


def convert(
    model: Path | None,
    data: Texts,
    *,
    bytes: int | str | None = None,
    keys: int | None = None,
    loss: str | float | None = None,
    contexts: int = 2,
    length: int | None = None,
    calibration: Texts = (),
    calibration_contexts: int = 4,
    calibration_length: int | None = None,
    granularity: Literal["head", "layer"] = "head",
    save: Path | None = None,
    overwrite: bool = False,
    cache: Path | None = None,
    progress: Progress = True,
    **settings: Unpack[DataSettings],
) -> Result:
    """Replace a model's KV cache with fixed-size memory, allocated per KV head under a byte budget.

    Exactly one of ``bytes``, ``keys`` and ``loss`` is the budget.

    Parameters
    ----------
    model : path or None
        Model, as :func:`load` accepts it; None for the newest run.
    data : path or sequence of paths
        Texts. The first half of each is used for calibration, the second half is evaluated.
    bytes : int or str, optional
        Bytes of the state of one sequence, such as ``"8MB"``. It is never exceeded.
    keys : int, optional
        The same in 16-bit key/value pairs per KV head, on average.
    loss : str or float, optional
        The largest relative loss increase, such as ``"+1%"`` or 0.01.
    contexts, length : int
        Evaluated contexts per text, and their tokens. Default length: 2048 or the context of the model.
    calibration : path or sequence of paths
        Texts for calibration. Default: all of ``data``.
    calibration_contexts, calibration_length : int
        Calibration contexts over all texts, and their tokens.
    granularity : {"head", "layer"}
        Unit of allocation: one kind of memory per KV head or per layer.
    save : path, optional
        Folder of the converted model, its report and finished measurements, from which the same call resumes.
    overwrite : bool
        Replace another model in ``save``. Folders of runs and checkpoints are refused.
    cache : path, optional
        Folder for tokenized text.
    progress : bool or callable
        A function that receives every event as a dict; True for a progress bar.
    **settings
        Settings of data; :class:`DataSettings` lists them.

    Returns
    -------
    Result
        The memory of each KV head, its bytes, and the measured loss.

    Examples
    --------
    >>> import termwise
    >>> result = termwise.convert("path/to/llama", "book.txt", keys=128, save="small")  # doctest: +SKIP
    >>> model = termwise.load("small")  # doctest: +SKIP
    """
    texts = _texts(
        data, cache, settings, calibration, length=length, calibration_contexts=calibration_contexts, calibration_length=calibration_length
    )
    options = {
        "model": _path(model), "bytes": None if bytes is None else str(bytes), "keys": keys, "loss": None if loss is None else str(loss),
        "contexts": contexts, "texts": texts, "granularity": granularity, "save": _path(save), "overwrite": overwrite,
    }  # fmt: skip
    return _run(_core.run_convert, options, progress, "convert")


def frontier(
    model: Path | None,
    data: Texts,
    *,
    keys: int | Sequence[int] = (64, 128, 256, 512),
    methods: str | Sequence[str] = (),
    contexts: int = 12,
    length: int | None = None,
    calibration: Texts = (),
    calibration_contexts: int = 4,
    calibration_length: int | None = None,
    folder: Path | None = None,
    cache: Path | None = None,
    progress: Progress = True,
    **settings: Unpack[DataSettings],
) -> Result:
    """Compare loss and KL of fixed-size memories at equal bytes.

    Parameters
    ----------
    model : path or None
        Model, as :func:`load` accepts it; None for the newest run.
    data : path or sequence of paths
        Texts.
    keys : int or sequence of int
        Budgets, in 16-bit key/value pairs per KV head.
    methods : str or sequence of str
        Methods to compare. Default: all.
    contexts, length : int
        Evaluated contexts per text, and their tokens.
    calibration, calibration_contexts, calibration_length
        As for :func:`convert`.
    folder : path, optional
        Folder for the report. Every measurement is written immediately, and the same call resumes.
    cache : path, optional
        Folder for tokenized text.
    progress : bool or callable
        A function that receives every event as a dict; True for a progress bar.
    **settings
        Settings of data; :class:`DataSettings` lists them.

    Returns
    -------
    Result
        ``points`` of each method and budget, and ``comparisons`` with verdicts.

    Examples
    --------
    >>> import termwise
    >>> result = termwise.frontier("path/to/llama", "book.txt", keys=[64, 128], folder="frontier")  # doctest: +SKIP
    """
    texts = _texts(
        data, cache, settings, calibration, length=length, calibration_contexts=calibration_contexts, calibration_length=calibration_length
    )
    options = {
        "model": _path(model), "keys": _integers(keys), "methods": _list(methods), "contexts": contexts, "texts": texts, "folder": _path(folder),
    }  # fmt: skip
    return _run(_core.run_frontier, options, progress, "frontier")


def audit(
    model: Path,
    against: Path,
    data: Texts | None = None,
    *,
    contexts: int = 2,
    length: int | None = None,
    facts: int = 4,
    tokens: int = 48,
    folder: Path | None = None,
    cache: Path | None = None,
    progress: Progress = True,
    **settings: Unpack[DataSettings],
) -> Result:
    """Check a converted model against its original.

    Parameters
    ----------
    model, against : path
        The converted model and its original, as :func:`load` accepts them.
    data : path or sequence of paths, optional
        Texts. Default: the held-out part of the data that the original was trained on.
    contexts, length : int
        Contexts, and their tokens. Default length: 1024 or the context of the original.
    facts : int
        Recall queries per task and distance.
    tokens : int
        Tokens per continuation.
    folder : path, optional
        Folder for the report.
    cache : path, optional
        Folder for tokenized text.
    progress : bool or callable
        A function that receives every event as a dict; True for a progress bar.
    **settings
        Settings of data; :class:`DataSettings` lists them.

    Returns
    -------
    Result
        ``checks``, each with its rule and verdict.

    Examples
    --------
    >>> import termwise
    >>> checked = termwise.audit("small", "path/to/llama", "book.txt")  # doctest: +SKIP
    """
    options = {
        "model": os.fspath(model), "against": os.fspath(against), "contexts": contexts, "facts": facts, "tokens": tokens,
        "texts": _texts(data, cache, settings, length=length), "folder": _path(folder),
    }  # fmt: skip
    return _run(_core.run_audit, options, progress, "audit")


def atlas(
    model: Path | None,
    data: Texts,
    *,
    removal: bool = False,
    facts: int | None = None,
    heads: int = 16,
    calibration_contexts: int = 4,
    calibration_length: int | None = None,
    folder: Path | None = None,
    cache: Path | None = None,
    progress: Progress = True,
    **settings: Unpack[DataSettings],
) -> Result:
    """Measure how far back each attention head attends.

    Parameters
    ----------
    model : path or None
        Model, as :func:`load` accepts it; None for the newest run.
    data : path or sequence of paths
        Texts.
    removal : bool
        Also measure the effect of removing the memory of each KV head.
    facts : int, optional
        With ``removal``: recall queries per KV head.
    heads : int
        With ``facts``: number of KV heads, those with the largest effect.
    calibration_contexts, calibration_length : int
        Contexts over all texts, and their tokens.
    folder : path, optional
        Folder for the report.
    cache : path, optional
        Folder for tokenized text.
    progress : bool or callable
        A function that receives every event as a dict; True for a progress bar.
    **settings
        Settings of data; :class:`DataSettings` lists them.

    Returns
    -------
    Result
        ``heads`` with the attention mass on far and first keys, distances and scores.

    Examples
    --------
    >>> import termwise
    >>> seen = termwise.atlas("path/to/llama", "book.txt")  # doctest: +SKIP
    """
    options = {
        "model": _path(model), "removal": removal, "facts": facts, "heads": heads, "folder": _path(folder),
        "texts": _texts(data, cache, settings, calibration_contexts=calibration_contexts, calibration_length=calibration_length),
    }  # fmt: skip
    return _run(_core.run_atlas, options, progress, "atlas")
