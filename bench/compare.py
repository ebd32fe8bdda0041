"""Compare the speed of termwise and PyTorch in alternating rounds. The best round of each counts.

    cargo build --release && PYTHON=python3.12 python3 bench/compare.py
    python3 bench/compare.py step --rounds 5 --save step.json
    python3 bench/compare.py step -- --length 512 --batch 4

Arguments after `--` are passed to both. PYTHON names the interpreter that has PyTorch (default: python3), and TERMWISE the program (default:
target/release/termwise). Ratios are PyTorch's time over that of termwise in the first column: above 1, termwise is faster.

The training step is measured at two model sizes unless sizes follow `--`. Its peers are eager mode and torch.compile, each in float32, with
set_float32_matmul_precision("medium"), and under torch.autocast(bfloat16). The column "termwise bf16" is omitted if the program has no --precision.

--save writes all times with the machine, the instruction set, the versions and the commands to a JSON file.
"""

import argparse
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys

WINDOW = 512
DELTA = "feature=identity over=none write=delta decay=mamba qk_norm=l2 rope=off"
DELTA_TIME, DELTA_DIM = 4096, 128
ROOT = pathlib.Path(__file__).resolve().parent.parent
#: Model sizes of the training step.
SIZES = {
    "width 256": {"vocab": 4096, "hidden": 256, "heads": 4, "layers": 4, "mlp": 512, "batch": 8, "length": 256},
    "width 512": {"vocab": 8192, "hidden": 512, "heads": 8, "layers": 6, "mlp": 1408, "batch": 4, "length": 512},
}
#: PyTorch configurations of the training step.
PEERS = {
    "torch eager": [],
    "torch medium": ["--matmul-precision", "medium"],
    "torch bf16": ["--autocast"],
    "compile": ["--compile"],
    "compile medium": ["--compile", "--matmul-precision", "medium"],
    "compile bf16": ["--compile", "--autocast"],
}


def flags(sizes):
    return [word for name, size in sizes.items() for word in (f"--{name}", str(size))]


def has_precision(termwise):
    """Whether the program trains in bf16."""
    try:
        found = subprocess.run([termwise, "bench", "step", "--help"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return "--precision" in found.stdout


def processor():
    """The name of the processor and its relevant instruction sets."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {"processor": platform.processor()}
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    words = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")
    # Models of one name differ in speed: an "AMD EPYC" of family 25 is a Zen 3 or 4, of family 26 a Zen 5.
    numbers = {"family": values.get("cpu family"), "model": values.get("model")}
    instructions = [word for word in words if word in values.get("flags", "").split()]
    return {"processor": values.get("model name", platform.processor()), **numbers, "instructions": instructions}


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
        return {f"{row['variant']} d {row['head_dim']}, per token": row["us"] * 1e-3 for row in found["rows"]}
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
    parser.add_argument("--save", type=pathlib.Path, metavar="FILE", help="write all times to a JSON file")
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, rest = parser.parse_args(arguments[:split]), arguments[split + 1:]
    known = ["attention", "window", "delta", "decode", "gemm", "step"]
    if unknown := [kind for kind in options.kinds if kind not in known]:
        parser.error(f"`{unknown[0]}` is not one of {', '.join(known)}")
    termwise = os.environ.get("TERMWISE", str(ROOT / "target/release/termwise"))
    python = os.environ.get("PYTHON", "python3")
    saved = {
        "command": shlex.join(["python3", "bench/compare.py", *arguments]),
        "machine": {"system": platform.platform(), "threads": options.threads, "rounds": options.rounds, **processor()},
        "versions": {},
        "tables": [],
    }

    for kind, title, sides in measurements(options, rest, termwise, python, known):
        table = compare(kind, title, sides, options, saved["versions"])
        saved["tables"].append(table)
        show(table, options)
    if options.save:
        options.save.write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n")


def measurements(options, rest, termwise, python, known):
    """Kind, title and the command of each side."""
    for kind in options.kinds or known:
        threads = ["--threads", str(options.threads)]
        command = "attention" if kind == "window" else kind
        ours = [termwise, "bench", "chunk" if kind == "delta" else command, "--json", *threads, *rest]
        theirs = [python, str(ROOT / "bench/pytorch.py"), command, *threads, *rest]
        if kind == "step":
            given = any(word.partition("=")[0] in {f"--{name}" for name in SIZES["width 256"]} for word in rest)
            bf16 = has_precision(termwise)
            for size, words in {"": []}.items() if given else {name: flags(sizes) for name, sizes in SIZES.items()}.items():
                sides = {"termwise f32": [*ours, *words]}
                if bf16:
                    sides["termwise bf16"] = [*ours, *words, "--precision", "bf16"]
                sides |= {peer: [*theirs, *words, *how] for peer, how in PEERS.items()}
                yield kind, f"step, {size}" if size else kind, sides
            continue
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
        yield kind, kind, {"termwise": ours, "PyTorch": theirs}


def compare(kind, title, sides, options, versions):
    """The best time of each side. All sides run in every round."""
    best = {side: {} for side in sides}
    for _ in range(options.rounds):
        for side, command in sides.items():
            found = run(command)
            versions.setdefault("termwise" if side.startswith("termwise") else "pytorch", found.get("made_by") or found["engine"])
            for name, ms in times(kind, found).items():
                best[side][name] = min(ms, best[side].get(name, ms))
    return {"title": title, "ms": best, "commands": {side: shlex.join(map(str, command)).replace(f"{ROOT}/", "") for side, command in sides.items()}}


def show(table, options):
    first, *others = table["ms"]
    print(f"{table['title']}, {options.threads} threads, best of {options.rounds} rounds")
    print(f"  {'':44}{first + ' ms':>18}" + "".join(f"{side + ' ms':>18}{'ratio':>7}" for side in others))
    for name, ms in table["ms"][first].items():
        cells = "".join(f"{table['ms'][side][name]:18.3f}{table['ms'][side][name] / ms:7.2f}" for side in others)
        print(f"  {name:44}{ms:18.3f}{cells}")


if __name__ == "__main__":
    main()
