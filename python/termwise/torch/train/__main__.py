"""``torchrun … -m termwise.torch.train SETTINGS …``: see :mod:`termwise.torch.train`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch

from ... import _core
from .collective import Collective, end, start
from .learner import Learner, LearnerOptions


def _arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="termwise.torch.train",
        description="Train a model with PyTorch. Settings, data, schedule, metrics, folder and checkpoints are those of `termwise train`.",
        usage="%(prog)s [SETTINGS …] [flags]",
        epilog="SETTINGS are TOML files; later files override earlier ones. Other flags are those of `termwise train`, such as --steps 5000 or --attention norm.",
        # Abbreviations could be flags of `termwise train`.
        allow_abbrev=False,
    )
    parser.add_argument("--folder", type=Path, help="folder of the run [default: a folder in --runs with a name made from the settings]")
    parser.add_argument("--resume", nargs="?", const="", help="resume from the newest valid checkpoint, or from this one")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in --folder; it is kept until the new run has its first checkpoint")
    parser.add_argument("--cache", type=Path, help="folder for tokenized text")
    parser.add_argument("--quiet", action="store_true", help="suppress progress and warnings")
    parser.add_argument("--device", help="cuda, cpu, mps, … [default: the accelerator that PyTorch finds, otherwise cpu]")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32", help="type of matrix products; sums, weights and polynomial scores are always float32")
    parser.add_argument("--checkpoint-activations", action="store_true", help="recompute blocks in the backward pass instead of keeping their activations")
    parser.add_argument("--compile", action="store_true", help="compile blocks with torch.compile, except the sums of attention")
    parser.add_argument("--shard", action="store_true", help="shard parameters, gradients and moments over all processes (FSDP)")
    # No positional arguments: argparse would assign the value of an unknown flag to them.
    return parser.parse_known_args(words)


def _device(named: str | None) -> torch.device:
    """The device of this process; the local rank of torchrun selects one of several."""
    # A build for an accelerator also names it on machines without one.
    usual = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    found = torch.device(named) if named else usual or torch.device("cpu")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if found.type != "cpu":
        torch.accelerator.set_device_index(found.index or 0)
    return found


def _flags(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Files, and flags of `termwise train` as settings: ``settings.toml --batch 8 --attention norm --tie``. A word after a flag is its value."""
    files: list[str] = []
    found: dict[str, Any] = {}
    while words:
        word, *words = words
        if not word.startswith("--"):
            files.append(word)
            continue
        name, given, text = word[2:].partition("=")
        if not given and words and not words[0].startswith("--"):
            text, *words = words
        try:
            value = tomllib.loads(f"x = {text if given or text else 'true'}")["x"]
        except tomllib.TOMLDecodeError:
            value = text
        if not isinstance(value, (bool, int, float, str, list, dict)):
            # TOML reads some words as dates.
            value = text
        found[name.replace("-", "_")] = value
    return files, found


class _Lines:
    """Print every line of the metrics to standard error."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown

    def __call__(self, text: str) -> None:
        line = json.loads(text)
        if not self.shown:
            return
        if line["kind"] == "train":
            print(f"step {line['step']}  loss {line['loss']:.4f}  lr {line['lr']:.2e}  {line['tokens_per_second']:.0f} tokens/s", file=sys.stderr, flush=True)
        else:
            print(f"step {line['step']}  held-out loss {line['loss']:.4f}", file=sys.stderr, flush=True)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main(words: list[str] | None = None) -> int:
    """Run with these arguments. Exit codes are those of `termwise train`: 0 finished, 130 interrupted with a checkpoint, 75 another process uses the folder, 2 invalid arguments,
    1 failed."""
    given, others = _arguments(sys.argv[1:] if words is None else words)
    device = _device(given.device)
    learner_options = LearnerOptions(device, given.precision == "bf16", given.checkpoint_activations, given.compile, given.shard)
    start(device)
    collective = Collective()
    shown = collective.rank == 0 and not given.quiet
    files, settings = _flags(others)
    options = {
        "settings": {**settings, "engine": "torch"},
        "files": files,
        "folder": None if given.folder is None else os.fspath(given.folder),
        "runs": os.fspath(given.runs),
        "resume": given.resume is not None,
        # The folder of a run is accepted as well.
        "checkpoint": given.resume or None,
        "overwrite": given.overwrite,
        "cache": None if given.cache is None else os.fspath(given.cache),
        "remarks": shown,
    }
    # An interrupt finishes the step and writes a checkpoint.
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        found = json.loads(_core.train(json.dumps(options), _Lines(shown), (lambda config, settings: Learner(config, settings, learner_options), collective)).json())
        return 0 if found["finished"] else STOPPED
    except KeyboardInterrupt:
        return STOPPED
    except BlockingIOError as error:
        return _print_error(error, 75)
    except ValueError as error:
        return _print_error(error, 2)
    except (RuntimeError, OSError) as error:
        return _print_error(error, 1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        end()


#: The exit code of a shell after an interrupt.
STOPPED = 130


def _print_error(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
