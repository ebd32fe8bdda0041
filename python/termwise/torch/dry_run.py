"""``python -m termwise.torch.dry_run SETTINGS…``: shapes and memory of a training step on the meta device, where tensors have no values.

For files of settings such as those of ``termwise reproduce --scale paper``. A forward and a backward pass run at full size on any machine, so errors of shapes are found before a
cluster is used. It prints the memory that a device needs: weights, gradient and two moments of AdamW; activations that autograd keeps for one batch, with and without activation
checkpointing; and the largest tensor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import _core
from .model import Model

#: Vocabulary of the paper's tokenizer, which a dry run does not need.
VOCABULARY = 32_000


@dataclass(frozen=True)
class Found:
    """Bytes on one device with the whole model."""

    settings: str
    attention: str
    parameters: int
    batch: int
    length: int
    #: Weights, gradient and moments.
    held: int
    #: Activations that autograd keeps with activation checkpointing.
    kept: int
    #: Activations without activation checkpointing.
    kept_without_checkpointing: int
    #: The largest tensor of a step.
    largest: int
    #: The largest tensor inside blocks, without weights, their gradients and logits.
    largest_of_blocks: int


class _Largest(TorchDispatchMode):
    """Records the sizes of the results of all operations."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.weights = {*shapes.values(), *(shape[::-1] for shape in shapes.values())}
        self.vocabulary = next(shape[0] for name, shape in shapes.items() if name.endswith("embed_tokens.weight"))
        self.bytes = self.bytes_of_blocks = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor):
                # Expanded views have less storage than elements.
                size = min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
                self.bytes = max(self.bytes, size)
                if tuple(x.shape) not in self.weights and self.vocabulary not in x.shape:
                    self.bytes_of_blocks = max(self.bytes_of_blocks, size)
        return found


def kept_bytes(model: Model, rows: int, length: int, bfloat16: bool = False) -> tuple[int, int, int]:
    """Bytes that autograd keeps after a forward pass, without parameters; of the largest tensor of both passes; and of the largest that is neither weight nor logits."""
    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    seen: dict[int, int] = {}
    alive = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage.nbytes()
            # A reference keeps the address from being reused.
            alive.append(storage)
        return x

    with _Largest(model) as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            losses = model(ids, ids)
        kept = sum(seen.values())
        alive.clear()
        losses.sum().backward()
    assert all(p.grad is not None or not p.requires_grad for p in model.parameters())
    return kept, largest.bytes, largest.bytes_of_blocks


def dry_run(files: Iterable[Path], vocabulary: int = VOCABULARY) -> Iterable[Found]:
    """Dry runs of these files, one after the other."""
    for file in files:
        settings, config = _core.model_of_settings(file.read_text(), vocabulary)
        words = json.loads(settings)
        made = {again: Model(config, positions=words["length"], device="meta", mode=words["mode"], checkpointing=again) for again in (True, False)}
        parameters = sum(p.numel() for p in made[True].parameters())
        with_it, largest, of_blocks = kept_bytes(made[True], words["batch"], words["length"])
        without, *_ = kept_bytes(made[False], words["batch"], words["length"])
        yield Found(file.name, words["attention"], parameters, words["batch"], words["length"], 16 * parameters, with_it, without, largest, of_blocks)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="termwise.torch.dry_run", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("settings", nargs="+", type=Path, help="TOML files with settings, or folders of them")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help=f"vocabulary, if the settings have none [default: {VOCABULARY}]")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per file")
    given = parser.parse_args(arguments)
    files = [file for place in given.settings for file in (sorted(place.rglob("*.toml")) if place.is_dir() else [place])]
    if not given.json:
        print(f"{'settings':24}{'parameters':>14}{'batch':>7}{'length':>8}{'GB held':>9}{'kept':>8}{'kept, all':>11}{'largest':>9}  attention")
    for found in dry_run(files, given.vocabulary):
        if given.json:
            print(json.dumps(asdict(found)), flush=True)
            continue
        sizes = [found.held, found.kept, found.kept_without_checkpointing, found.largest]
        numbers = [f"{size / 1e9:.1f}" for size in sizes]
        print(f"{found.settings:24}{found.parameters:>14,}{found.batch:>7}{found.length:>8}{numbers[0]:>9}{numbers[1]:>8}{numbers[2]:>11}{numbers[3]:>9}  {found.attention}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
