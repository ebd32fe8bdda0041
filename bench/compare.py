"""termwise and PyTorch side by side: they take turns for several rounds, and the best of each counts.

    cargo build --release && PYTHON=python3.12 python3 bench/compare.py
    python3 bench/compare.py step --rounds 5 -- --length 512 --batch 4

What follows `--` goes to both. PYTHON names the interpreter that has PyTorch (default: python3), TERMWISE the program (default:
target/release/termwise). Ratios are PyTorch's time over ours: above 1, termwise is faster.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

WINDOW = 512
DELTA = "feature=identity over=none write=delta decay=mamba qk_norm=l2 rope=off"
DELTA_TIME, DELTA_DIM = 4096, 128
ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(command):
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        sys.exit(f"error: cannot run {command[0]}: {error.strerror}; build termwise with --release, or set TERMWISE or PYTHON")
    if found.returncode != 0:
        sys.exit(f"error: `{' '.join(map(str, command))}` failed:\n{found.stderr.strip()}")
    return json.loads(found.stdout)


def times(kind, found):
    """Milliseconds by name."""
    if kind == "step":
        return {"training step": found["ms"]}
    if kind == "decode":
        return {f"{row['variant']} d {row['head_dim']}, a token": row["us"] * 1e-3 for row in found["rows"]}
    if kind == "delta":
        names = {"chunk_forward_ms": "forward", "chunk_ms": "with backward"}
        return {
            f"gated delta rule, H {case['heads']} T {row['time']} d {case['head_dim']}  {name}": row[key]
            for case in found["cases"] for row in case["rows"] for key, name in names.items()
        }
    if kind == "gemm":
        return {f"{row['m']}x{row['k']}x{row['n']}  {row['product']}": row["ms"] for row in found["rows"]}
    wanted = "softmax rope=off" + (f" window={WINDOW}" if kind == "window" else "")
    rows = [row for row in found["rows"] if row["variant"] == wanted]
    names = {"forward": "forward", "forward_backward": "with backward"}
    return {
        f"B {row['batch']} H {row['heads']} T {row['time']} d {row['head_dim']}  {name}": row[key]["ms"]
        for row in rows for key, name in names.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="attention, window, delta, decode, gemm, step (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, rest = parser.parse_args(arguments[:split]), arguments[split + 1:]
    known = ["attention", "window", "delta", "decode", "gemm", "step"]
    if unknown := [kind for kind in options.kinds if kind not in known]:
        parser.error(f"`{unknown[0]}` is not one of {', '.join(known)}")
    termwise = os.environ.get("TERMWISE", str(ROOT / "target/release/termwise"))
    python = os.environ.get("PYTHON", "python3")

    for kind in options.kinds or known:
        threads = ["--threads", str(options.threads)]
        command = "attention" if kind == "window" else kind
        ours = [termwise, "bench", "chunk" if kind == "delta" else command, "--json", *threads, *rest]
        theirs = [python, str(ROOT / "bench/pytorch.py"), command, *threads, *rest]
        if kind == "window":
            ours += ["--variants", f"softmax rope=off window={WINDOW}"]
            theirs += ["--window", str(WINDOW)]
            if "--shapes" not in rest:
                long = ["--shapes", "1x4x16384", "--repeat", "2"]
                ours, theirs = ours + long, theirs + long
        elif kind == "delta":
            ours += ["--case", f"{DELTA}@{DELTA_DIM}", "--shortest", str(DELTA_TIME), "--longest", str(DELTA_TIME)]
            theirs += ["--head-dim", str(DELTA_DIM), "--longest", str(DELTA_TIME)]
        elif kind == "attention" and "--variants" not in rest:
            ours += ["--variants", "softmax rope=off"]
        sides = {"termwise": ours, "PyTorch": theirs}
        if kind == "step":
            sides["torch.compile"] = [*theirs, "--compile"]
        best = {side: {} for side in sides}
        for _ in range(options.rounds):
            for side, command in sides.items():
                for name, ms in times(kind, run(command)).items():
                    best[side][name] = min(ms, best[side].get(name, ms))
        print(f"{kind}, {options.threads} threads, best of {options.rounds} rounds")
        print(f"  {'':44}" + "".join(f"{side + ' ms':>18}" + ("" if side == "termwise" else f"{'ratio':>7}") for side in sides))
        for name, ms in best["termwise"].items():
            others = "".join(f"{times_of[name]:18.3f}{times_of[name] / ms:7.2f}" for side, times_of in best.items() if side != "termwise")
            print(f"  {name:44}{ms:18.3f}{others}")


if __name__ == "__main__":
    main()
