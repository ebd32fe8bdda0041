"""Kill trainings and sweeps at random times and resume them. Checks that nothing is lost and that results equal those of uninterrupted runs.

    python3 bench/kills.py TERMWISE [--runs 50] [--kills 4] [--sweeps 8] [--sweep-kills 5] [--seed 1]

A training is compared byte by byte: every file of its last checkpoint except provenance, and every metric except time and speed. The step of the
newest checkpoint never decreases between kills. A sweep is compared by its table and the last checkpoints of its runs, and must leave no process.
Everything is written into a temporary folder.
"""

import argparse
import hashlib
import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from sweep_kills import SWEEP, table

SIZES = "--layers 1 --hidden 16 --heads 2 --mlp 16 --batch 2 --length 128 --log-every 20".split()
VARIANTS = ["softmax", "norm", "taylor=0..2", "gate", "taylor=0..2,coef=learned decay=softplus conv=3", "power=1 write=delta over=none qk_norm=l2 norm=rms"]
# Long enough to be killed in the middle.
LONG = SWEEP.replace("steps = 60", "steps = 200").replace("eval_every = 60", "eval_every = 100")


def killed(command, folder, seconds):
    """Run a command and kill it after some seconds. Returns whether it was killed before it ended."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return True
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)}: {process.returncode}\n{said.decode()}")
    return False


def checkpoints(run):
    """Steps of the complete checkpoints."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*/manifest.json"))


def end(run):
    """The files of a run without paths, times and speed. Older checkpoints are not compared: a run whose sweep was killed stops with an additional one."""
    last = run / "checkpoints" / f"step-{checkpoints(run)[-1]:08}"
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(last.iterdir()) if path.name != "provenance.json"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return last.name, files, [{key: value for key, value in line.items() if key not in ("time", "tokens_per_second")} for line in lines]


def compare(what, expected, found):
    if expected == found:
        return
    print(f"{what}: another end", file=sys.stderr)
    for a, b in zip(expected or (), found or ()):
        if a != b:
            print(f"expected {a}\nfound    {b}", file=sys.stderr)
    sys.exit(1)


def trainings(args, base, draw):
    kills = 0
    for number in range(args.runs):
        variant, steps = VARIANTS[number % len(VARIANTS)], draw.randrange(600, 1400)
        settings = ["--attention", variant, "--seed", str(number), "--steps", str(steps), *SIZES]
        settings += ["--checkpoint-every", str(draw.choice([7, 20, 50])), "--eval-every", "200", "--eval-batches", "2", "--quiet"]
        command = [args.program, "--threads", "1", "train", "--name", "run"]
        whole, folder = base / f"whole-{number}", base / f"killed-{number}"
        whole.mkdir()
        folder.mkdir()
        begun = time.time()
        if killed(command + settings, whole, 600):
            sys.exit(f"run {number} does not end")
        length, run = time.time() - begun, folder / "runs" / "run"
        begin, newest, own = command + settings, 0, 0
        for _ in range(10 * args.kills):
            if own == args.kills:
                break
            # Includes kills at the start, while files are opened and the newest checkpoint is read.
            pause = draw.choice([draw.uniform(0.005, 0.05), draw.uniform(0.05, 0.8 * length / args.kills + 0.1)])
            if not killed(begin, folder, pause):
                break
            own += 1
            now = (checkpoints(run) or [0])[-1] if run.exists() else 0
            if now < newest:
                sys.exit(f"run {number}, kill {own}: checkpoint {newest} is lost, the newest is {now}")
            newest = now
            if (run / "settings.toml").exists():
                begin = [args.program, "--threads", "1", "train", "--resume", "runs/run", "--quiet"]
        if killed(begin, folder, 600):
            sys.exit(f"run {number} does not end")
        kills += own
        compare(f"run {number} ({variant}) after {own} kills", end(whole / "runs" / "run"), end(run))
        print(f"run {number}: {steps} steps of {variant}, {own} kills, equal result", flush=True)
    print(f"{kills} kills over {args.runs} trainings: no checkpoint lost, final bytes equal")


def processes_of(folder):
    """Running processes that were started for this folder."""
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if str(folder) in line]


def sweeps(args, base, draw):
    file = base / "sweep.toml"
    file.write_text(LONG)
    one = base / "one"
    command = lambda folder: [args.program, "--threads", "2", "sweep", str(file), "--out", str(folder)]
    begun = time.time()
    if killed(command(one), base, 600):
        sys.exit("the sweep does not end")
    length, kills = time.time() - begun, 0
    ends = {run.name: end(run) for run in (one / "runs").iterdir() if run.is_dir()}
    for number in range(args.sweeps):
        folder, own = base / f"sweep-{number}", 0
        for _ in range(10 * args.sweep_kills):
            if own == args.sweep_kills or not killed(command(folder), base, draw.uniform(0.02, 0.8 * length / args.sweep_kills + 0.1)):
                break
            own += 1
            # They finish their step and write a checkpoint, which takes longer on a busy machine.
            patience = time.time() + 30
            while (left := processes_of(folder)) and time.time() < patience:
                time.sleep(0.1)
            if left:
                sys.exit(f"sweep {number}, kill {own}: remaining processes: {left}")
        if killed(command(folder), base, 600):
            sys.exit(f"sweep {number} does not end")
        kills += own
        found = {run.name: end(run) for run in (folder / "runs").iterdir() if run.is_dir()}
        for name in sorted(ends.keys() | found.keys()):
            compare(f"sweep {number}, {name}, after {own} kills", ends.get(name), found.get(name))
        compare(f"table of sweep {number} after {own} kills", table(one), table(folder))
        print(f"sweep {number}: {len(ends)} runs, {own} kills, equal table and results", flush=True)
    print(f"{kills} kills over {args.sweeps} sweeps: equal tables, final bytes equal, no process left")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=lambda text: str(pathlib.Path(text).resolve()))
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--kills", type=int, default=4, help="of each training")
    parser.add_argument("--sweeps", type=int, default=8)
    parser.add_argument("--sweep-kills", type=int, default=5, help="of each sweep")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as base:
        trainings(args, pathlib.Path(base), draw)
        sweeps(args, pathlib.Path(base), draw)


if __name__ == "__main__":
    main()
