"""The model, its gradients and its optimizer, called by the training loop in Rust.

Every rank receives all rows of a step and computes its share of them. The loss is divided by the tokens of all ranks. Parameters and moments are float32. Tensors have the names of
checkpoints, which Rust reads and writes: ``parameter``, and the ``first`` and ``second`` moments of AdamW.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ..model import Model

#: Entries of the state of AdamW by their names in checkpoints.
_MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


@dataclass(frozen=True)
class LearnerOptions:
    """Options that do not change the result beyond rounding."""

    device: torch.device = torch.device("cpu")
    #: Whether matrix products are computed in bfloat16. Parameters, sums and polynomial scores are float32.
    bfloat16: bool = False
    #: Whether the backward pass recomputes blocks.
    checkpointing: bool = False
    #: Whether blocks are compiled, except the sums of attention.
    compile: bool = False
    #: Whether parameters, gradients and moments are sharded over the ranks (FSDP).
    shard: bool = False


@dataclass
class Batch:
    """Tokens [B, T], their labels (-100: no label), and the length of each row."""

    ids: Tensor
    labels: Tensor
    lengths: Tensor | None

    @classmethod
    def of(cls, rows: int, time: int, ids: bytes, labels: bytes, lengths: list[int]) -> Batch:
        made = torch.from_numpy(np.frombuffer(ids, np.uint32).astype(np.int64)).view(rows, time)
        wanted = torch.from_numpy(np.frombuffer(labels, np.int32).astype(np.int64)).view(rows, time)
        if not lengths:
            return cls(made, wanted, None)
        counted = torch.tensor(lengths)
        wanted = torch.where(torch.arange(time)[None] < counted[:, None], wanted, -100)
        return cls(made, wanted, counted)

    def part(self, first: int, last: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Some rows on a device; if there are none, one row without labels."""
        if first == last:
            return self.ids[:1].to(device), torch.full_like(self.labels[:1], -100).to(device), None
        lengths = None if self.lengths is None else self.lengths[first:last].clamp(min=1).to(device)
        return self.ids[first:last].to(device), self.labels[first:last].to(device), lengths

    @property
    def counted(self) -> int:
        return int((self.labels >= 0).sum())


class Learner:
    """Called from Rust, in the same order on every rank."""

    def __init__(self, config: str, settings: str, options: LearnerOptions) -> None:
        self.options, self.settings = options, json.loads(settings)
        if self.settings["threads"] and options.device.type == "cpu":
            torch.set_num_threads(self.settings["threads"])
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        sharded = options.shard and dist.is_initialized()
        model_options: dict[str, Any] = {"positions": self.settings["length"], "mode": self.settings["mode"], "checkpointing": options.checkpointing}
        self.model = Model(config, device="meta" if sharded else options.device, **model_options)
        if options.compile:
            for block in self.model.model.layers:  # type: ignore[union-attr]
                block.compile()
        if sharded:
            for block in self.model.model.layers:  # type: ignore[union-attr]
                fully_shard(block)
            fully_shard(self.model)
            self.model.to_empty(device=options.device)
        self.sharded = sharded
        self.parameters = dict(self.model.named_parameters())
        self.module: nn.Module = self.model
        matrices = {name for name, _, matrix in self.model.outline.tensors if matrix}
        everything = not self.settings["decay_matrices_only"]
        groups = [
            {"params": [p for name, p in self.parameters.items() if (everything or name in matrices) == decays], "weight_decay": self.settings["weight_decay"] if decays else 0.0}
            for decays in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=(self.settings["beta1"], self.settings["beta2"]),
            eps=self.settings["eps"],
            fused=options.device.type in ("cpu", "cuda", "mps"),
        )
        self.updates = 0
        self.collected: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
        self._found: tuple[float, int, int] = (0.0, 0, -1)

    # Tensors, to and from checkpoints.

    def room(self, name: str) -> np.ndarray[Any, Any]:
        """An uninitialized array for a whole tensor."""
        return np.empty(self.parameters[name].shape, np.float32)

    @torch.no_grad()
    def put(self, kind: str, name: str, values: np.ndarray[Any, Any]) -> None:
        """Set a whole tensor. Each rank keeps its shard."""
        parameter = self.parameters[name]
        whole = torch.from_numpy(values).to(self.options.device)
        own = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None) if isinstance(parameter, DTensor) else whole
        if kind == "parameter":
            parameter.copy_(own)
            return
        state = self.optimizer.state[parameter]
        state[_MOMENTS[kind]] = torch.zeros_like(parameter).copy_(own)
        state["step"] = torch.tensor(float(self.updates), device=self.options.device)

    def collect(self) -> None:
        """Gather sharded tensors on rank 0 before it writes them."""
        if not self.sharded:
            return
        self.collected.clear()
        for name in self.parameters:
            for kind in ("parameter", *_MOMENTS):
                found = self._tensor(kind, name)
                whole = found.full_tensor() if isinstance(found, DTensor) else found
                if self.rank == 0:
                    self.collected[kind, name] = whole.cpu().numpy()

    def _tensor(self, kind: str, name: str) -> Tensor:
        parameter = self.parameters[name].detach()
        if kind == "parameter":
            return parameter
        found = self.optimizer.state.get(self.parameters[name], {}).get(_MOMENTS[kind])
        return torch.zeros_like(parameter) if found is None else found

    def tensor(self, kind: str, name: str) -> np.ndarray[Any, Any]:
        """A whole tensor."""
        if self.sharded:
            return self.collected.pop((kind, name))
        return self._tensor(kind, name).cpu().contiguous().numpy()

    # A step.

    def prepare(self) -> None:
        """Called before the first step, after all tensors are set."""
        if self.ranks > 1 and not self.sharded:
            self.module = DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def _run(self, part: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
        with torch.autocast(self.options.device.type, torch.bfloat16, enabled=self.options.bfloat16):
            return self.module(*part)  # type: ignore[no-any-return]

    def gradient(self, batches: list[tuple[Any, ...]]) -> None:
        """The gradient of the mean loss over all tokens of these batches, computed for the rows of this rank and summed over ranks."""
        self.optimizer.zero_grad(set_to_none=True)
        made = [Batch.of(*batch) for batch in batches]
        tokens = sum(batch.counted for batch in made)
        pieces = [(i, first, last) for i, batch in enumerate(made) for first, last in self._share(batch.ids.shape[0])]
        total, bad = 0.0, -1
        for at, (i, first, last) in enumerate(pieces):
            waits = at + 1 < len(pieces)
            with self._without_sum() if waits else nullcontext():
                if self.sharded:
                    self.module.set_requires_gradient_sync(not waits)  # type: ignore[operator]
                losses = self._run(made[i].part(first, last, self.options.device))
                # DistributedDataParallel and FSDP average over ranks.
                (losses.sum() * (self.ranks / max(tokens, 1))).backward()  # type: ignore[no-untyped-call]
            found = float(losses.detach().double().sum())
            total += found
            if bad < 0 and not np.isfinite(found):
                bad = i
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._found = (total, tokens, bad)

    def _share(self, rows: int) -> list[tuple[int, int]]:
        """The rows of this rank in micro-batches. There is at least one, possibly without labels, since every rank must take part."""
        first, last = self.rank * rows // self.ranks, (self.rank + 1) * rows // self.ranks
        most = -(-rows // self.ranks)
        pieces = max(1, self.settings["micro_batches"] // self.settings["accumulate"])
        step = min(most, max(1, rows // pieces))
        # The same number on every rank.
        return [(min(first + i, last), min(first + i + step, last)) for i in range(0, most, step)]

    def _without_sum(self) -> Any:
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()

    def reduce(self) -> tuple[float, int, int]:
        """The sum of losses over all ranks, the tokens, and the first batch whose loss is not finite, or -1."""
        total, tokens, bad = self._found
        if self.ranks > 1:
            sums = torch.tensor([total], dtype=torch.float64)
            dist.all_reduce(sums)
            first = torch.tensor([bad if bad >= 0 else 1 << 30])
            dist.all_reduce(first, op=dist.ReduceOp.MIN)
            total, bad = float(sums), int(first) if int(first) < 1 << 30 else -1
        return total, tokens, bad

    def norm(self) -> float:
        """The norm of the whole gradient."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def update(self, learning_rate: float, scale: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in self.parameters.values()], scale)  # type: ignore[misc]
        self.optimizer.step()
        self.updates += 1

    @torch.no_grad()
    def loss(self, batch: tuple[Any, ...]) -> bytes:
        """The loss of every position in nats, float64 [B, T]. With sharded parameters every rank computes the same batch."""
        made = Batch.of(*batch)
        rows = made.ids.shape[0]
        self.model.eval()
        pieces = max(1, self.settings["micro_batches"] // self.settings["accumulate"])
        found = []
        for part in range(0, rows, max(1, rows // pieces)):
            with torch.autocast(self.options.device.type, torch.bfloat16, enabled=self.options.bfloat16):
                found.append(self.model(*made.part(part, min(rows, part + max(1, rows // pieces)), self.options.device)))
        self.model.train()
        return torch.cat(found).double().cpu().numpy().tobytes()

    def first_bad(self, gradient: bool) -> str | None:
        """The name of the first parameter or gradient that is not finite."""
        for name, parameter in self.parameters.items():
            x = parameter.grad if gradient else parameter.detach()
            local = x.to_local() if isinstance(x, DTensor) else x
            if local is not None and not bool(torch.isfinite(local).all()):
                return name
        return None
