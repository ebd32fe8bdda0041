"""Shared functions of the benchmarks."""

import contextlib
import statistics
import time


def best(run, repeat):
    """The minimum and median time of `repeat` runs in seconds, after one warm-up run."""
    run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times), statistics.median(times)


def add_peer_flags(parser):
    """Adds flags for the PyTorch configuration of a training step."""
    parser.add_argument("--compile", action="store_true", help="torch.compile instead of eager mode")
    parser.add_argument("--autocast", action="store_true", help="forward pass under torch.autocast(bfloat16)")
    parser.add_argument("--matmul-precision", choices=["highest", "high", "medium"], default="highest", help="torch.set_float32_matmul_precision")


def peer(options):
    """Sets the float32 matmul precision. Returns a function that compiles a model, and one that returns the context manager of the forward pass."""
    import torch

    torch.set_float32_matmul_precision(options.matmul_precision)
    compiled = torch.compile if options.compile else lambda model: model
    context = (lambda: torch.autocast("cpu", torch.bfloat16)) if options.autocast else contextlib.nullcontext
    return compiled, context
