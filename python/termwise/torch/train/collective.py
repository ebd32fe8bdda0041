"""Ranks started by torchrun, and the data that they exchange other than gradients."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


class Collective:
    """Communication for the training loop in Rust. Gradients are reduced by DistributedDataParallel or FSDP."""

    def __init__(self) -> None:
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def gather(self, own: bytes) -> list[bytes]:
        """The bytes of each rank, in the order of ranks."""
        if self.size == 1:
            return [own]
        # In CPU memory for every device.
        length = torch.tensor([len(own)])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length)
        longest = max(int(n) for n in lengths)
        if longest == 0:
            return [b""] * self.size
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else padded[:0]
        found = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded)
        return [bytes(x[: int(n)].numpy()) for x, n in zip(found, lengths, strict=True)]

    def abort(self, code: int) -> None:
        """End this process immediately; torchrun then ends the others."""
        os._exit(code)


def start(device: torch.device) -> None:
    """Join the process group if torchrun started this process."""
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo")


def end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
