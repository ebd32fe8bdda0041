"""The model, its gradients and its optimizer, as Rust's training loop drives them.

Every rank is given all rows of a step and computes its share of them; the loss is divided by the tokens of all. Parameters and moments are float32. Names of tensors are those
of checkpoints, which Rust reads and writes: ``parameter``, and AdamW's ``first`` and ``second`` moments.
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

#: Of an AdamW's state, by the words of checkpoints.
_MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


@dataclass(frozen=True)
class How:
    """What is computed stays the same; these say by which means."""

    device: torch.device = torch.device("cpu")
    #: Whether products are of bfloat16; parameters, sums and scores of polynomials stay float32.
    bfloat16: bool = False
    #: Whether blocks are computed again in the backward pass instead of kept.
    checkpointing: bool = False
    #: Whether blocks are compiled; attention's sums are not.
    compile: bool = False
    #: Whether parameters, gradients and moments are spread over the ranks (FSDP), for models beyond one device.
    shard: bool = False


@dataclass
class Batch:
    """Rows of tokens [B, T], their labels, -100 where none is asked for, and the positions that count in each row."""

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
        """Some rows on a device; where there are none, one that asks for nothing."""
        if first == last:
            return self.ids[:1].to(device), torch.full_like(self.labels[:1], -100).to(device), None
        lengths = None if self.lengths is None else self.lengths[first:last].clamp(min=1).to(device)
        return self.ids[first:last].to(device), self.labels[first:last].to(device), lengths

    @property
    def counted(self) -> int:
        return int((self.labels >= 0).sum())


class Learner:
    """See the module; Rust calls these methods, each in the same order on every rank."""

    def __init__(self, config: str, settings: str, how: How) -> None:
        self.how, self.settings = how, json.loads(settings)
        if self.settings["threads"] and how.device.type == "cpu":
            torch.set_num_threads(self.settings["threads"])
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        spread = how.shard and dist.is_initialized()
        options: dict[str, Any] = {"positions": self.settings["length"], "mode": self.settings["mode"], "checkpointing": how.checkpointing}
        self.model = Model(config, device="meta" if spread else how.device, **options)
        if how.compile:
            for block in self.model.model.layers:  # type: ignore[union-attr]
                block.compile()
        if spread:
            for block in self.model.model.layers:  # type: ignore[union-attr]
                fully_shard(block)
            fully_shard(self.model)
            self.model.to_empty(device=how.device)
        self.spread = spread
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
            fused=how.device.type in ("cpu", "cuda", "mps"),
        )
        self.updates = 0
        self.collected: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
        self._found: tuple[float, int, int] = (0.0, 0, -1)

    # Tensors, to and from checkpoints.

    def room(self, name: str) -> np.ndarray[Any, Any]:
        """Room for a whole tensor."""
        return np.empty(self.parameters[name].shape, np.float32)

    @torch.no_grad()
    def put(self, kind: str, name: str, values: np.ndarray[Any, Any]) -> None:
        """Takes a whole tensor in; each rank keeps its part where they are spread."""
        parameter = self.parameters[name]
        whole = torch.from_numpy(values).to(self.how.device)
        own = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None) if isinstance(parameter, DTensor) else whole
        if kind == "parameter":
            parameter.copy_(own)
            return
        state = self.optimizer.state[parameter]
        state[_MOMENTS[kind]] = torch.zeros_like(parameter).copy_(own)
        state["step"] = torch.tensor(float(self.updates), device=self.how.device)

    def collect(self) -> None:
        """Before rank 0 writes: brings together what is spread over the ranks."""
        if not self.spread:
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
        if self.spread:
            return self.collected.pop((kind, name))
        return self._tensor(kind, name).cpu().contiguous().numpy()

    # A step.

    def prepare(self) -> None:
        """Before the first step, with all tensors in place."""
        if self.ranks > 1 and not self.spread:
            self.module = DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def _run(self, part: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
        with torch.autocast(self.how.device.type, torch.bfloat16, enabled=self.how.bfloat16):
            return self.module(*part)  # type: ignore[no-any-return]

    def gradient(self, batches: list[tuple[Any, ...]]) -> None:
        """Of the mean loss over all tokens of these batches: this rank's rows, and the sum over all ranks."""
        self.optimizer.zero_grad(set_to_none=True)
        made = [Batch.of(*batch) for batch in batches]
        tokens = sum(batch.counted for batch in made)
        pieces = [(i, first, last) for i, batch in enumerate(made) for first, last in self._share(batch.ids.shape[0])]
        total, bad = 0.0, -1
        for at, (i, first, last) in enumerate(pieces):
            waits = at + 1 < len(pieces)
            with self._without_sum() if waits else nullcontext():
                if self.spread:
                    self.module.set_requires_gradient_sync(not waits)  # type: ignore[operator]
                losses = self._run(made[i].part(first, last, self.how.device))
                # Both ways to sum over ranks take the mean.
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
        """This rank's rows of a batch, as many at a time as the settings say; at least one piece, which may be empty of labels, since every rank must take part."""
        first, last = self.rank * rows // self.ranks, (self.rank + 1) * rows // self.ranks
        most = -(-rows // self.ranks)
        pieces = max(1, self.settings["micro_batches"] // self.settings["accumulate"])
        step = min(most, max(1, rows // pieces))
        # As many pieces on every rank.
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
        """Of the whole gradient."""
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
        """The loss of every position in nats, float64 [B, T]. Where parameters are spread every rank is asked for the same batch."""
        made = Batch.of(*batch)
        rows = made.ids.shape[0]
        self.model.eval()
        pieces = max(1, self.settings["micro_batches"] // self.settings["accumulate"])
        found = []
        for part in range(0, rows, max(1, rows // pieces)):
            with torch.autocast(self.how.device.type, torch.bfloat16, enabled=self.how.bfloat16):
                found.append(self.model(*made.part(part, min(rows, part + max(1, rows // pieces)), self.how.device)))
        self.model.train()
        return torch.cat(found).double().cpu().numpy().tobytes()

    def first_bad(self, gradient: bool) -> str | None:
        """The first parameter, or gradient, that is not finite."""
        for name, parameter in self.parameters.items():
            x = parameter.grad if gradient else parameter.detach()
            local = x.to_local() if isinstance(x, DTensor) else x
            if local is not None and not bool(torch.isfinite(local).all()):
                return name
        return None
