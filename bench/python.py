"""Measure the overhead of Python and the speed against PyTorch: attention in the program, on arrays, on tensors, and PyTorch's attention, in alternating rounds.

    python3 bench/python.py --shape 2x4x1024 --head-dim 64 --rounds 5 --save python.json

Softmax without RoPE in float32 on the CPU, batch x heads x time. Times are the best of all rounds. The program is `python -m termwise bench attention`,
which calls the engine with its own arrays. `call` is the time of a call on a single position. --save also writes the times of every round.
"""

import argparse
import json
import pathlib
import platform
import shlex
import subprocess
import sys

import numpy as np
from compare import processor
from timing import best

import termwise


def ms(run, repeat):
    return best(run, repeat)[0] * 1e3


def native(shape, head_dim, threads, repeat):
    """Milliseconds of the forward pass, and with the backward pass, in the program; and its build."""
    words = ["bench", "attention", "--shapes", shape, "--head-dim", str(head_dim), "--variants", "softmax rope=off", "--repeat", str(repeat)]
    command = [sys.executable, "-m", "termwise", "--threads", str(threads), *words, "--json", "--quiet"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    row = next(row for row in found["rows"] if "rope=off" in row["variant"])
    return row["forward"]["ms"], row["forward_backward"]["ms"], found["made_by"]


def arrays(batch, heads, length, dim, repeat):
    layer = termwise.Layer("softmax", heads=heads, dim=dim)
    q, k, v = np.random.default_rng(0).standard_normal((3, batch, length, heads, dim), dtype=np.float32)
    out = np.empty_like(q)
    tiny = [x[:1, :1].copy() for x in (q, k, v)]
    tiny_out = np.empty_like(tiny[0])
    return ms(lambda: layer(q, k, v, out=out), repeat), ms(lambda: layer(*tiny, out=tiny_out), 50 * repeat)


def tensors(batch, heads, length, dim, threads, repeat):
    """Milliseconds of the forward pass and with the backward pass: termwise [batch, time, heads, dim], and PyTorch [batch, heads, time, dim]."""
    import torch
    from termwise.torch import attention

    torch.set_num_threads(threads)

    def measured(function, shape):
        q, k, v = (torch.randn(*shape, requires_grad=True) for _ in range(3))
        dy = torch.randn(*shape)

        def both():
            q.grad = k.grad = v.grad = None
            function(q, k, v).backward(dy)

        with torch.no_grad():
            forward = ms(lambda: function(q, k, v), repeat)
        return forward, ms(both, repeat)

    own = measured(attention, (batch, length, heads, dim))
    theirs = measured(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), (batch, heads, length, dim))
    return own, theirs


def checkout():
    """The commit of the Python files, and whether they were modified."""
    git = [["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"]]
    commit, changes = (subprocess.run(words, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip() for words in git)
    return {"commit": commit, "modified": bool(changes)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2x4x1024")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=termwise.get_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--save", type=pathlib.Path, metavar="FILE", help="write all times to a JSON file")
    options = parser.parse_args()
    termwise.set_threads(options.threads)
    sizes = [int(n) for n in options.shape.split("x")]
    rounds = []
    for _ in range(options.rounds):
        forward, both, build = native(options.shape, options.head_dim, options.threads, options.repeat)
        array, call = arrays(*sizes, options.head_dim, options.repeat)
        own, theirs = tensors(*sizes, options.head_dim, options.threads, options.repeat)
        rounds.append((forward, both, array, call, *own, *theirs))
    import torch

    forward, both, array, call, own, own_both, theirs, theirs_both = (min(times) for times in zip(*rounds))
    found = {
        "command": shlex.join(["python3", "bench/python.py", *sys.argv[1:]]),
        "machine": {"system": platform.platform(), "threads": options.threads, "rounds": options.rounds, **processor()},
        "versions": {"termwise": build, "python_files": checkout(), "pytorch": torch.__version__},
        "shape": options.shape, "head_dim": options.head_dim,
        "program_ms": {"forward": forward, "with_backward": both},
        "arrays_ms": {"forward": array, "call": call, "over_program": array / forward, "call_share": call / array},
        "tensors_ms": {"forward": own, "with_backward": own_both},
        "pytorch_ms": {"forward": theirs, "with_backward": theirs_both},
        "against_pytorch": {"forward": theirs / own, "with_backward": theirs_both / own_both},
        "rounds_ms": {
            "tensors_with_backward": [times[5] for times in rounds],
            "pytorch_with_backward": [times[7] for times in rounds],
        },
    }  # fmt: skip
    text = json.dumps(found, indent=2)
    print(text)
    if options.save:
        options.save.write_text(text + "\n")


if __name__ == "__main__":
    main()
