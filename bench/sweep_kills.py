"""Run a sweep with four processes in one folder and kill two at random. Checks that every run is done exactly once and that the table equals that of one process.

    python3 bench/sweep_kills.py TERMWISE [--rounds 20] [--seed 1]

A run was done once if exactly one process recorded its end and its folder was finished once. Everything is written into a temporary folder.
"""

import argparse
import csv
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

SWEEP = """
[base]
layers = 1
hidden = 16
heads = 2
mlp = 16
batch = 2
length = 128
steps = 60
warmup = 5
eval_every = 60
eval_batches = 2
checkpoint_every = 15
log_every = 20

[axes]
attention = ["softmax", "norm"]
lr = [1e-3, 3e-3]
seed = [1, 2, 3]
"""


def table(folder):
    """All runs with their results, without speed and build."""
    rows = list(csv.DictReader((folder / "runs.csv").open()))
    return [{key: value for key, value in row.items() if "tokens_per_second" not in key and key != "build"} for row in rows]


def start(args, folder, file, shard):
    log = (folder / f"log-{shard.replace('/', '-')}.txt").open("w")
    command = [args.program, "--threads", "1", "sweep", str(file), "--out", str(folder / "sweep"), "--shard", shard]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=log, stdin=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=lambda text: str(pathlib.Path(text).resolve()))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as base:
        base = pathlib.Path(base)
        file = base / "sweep.toml"
        file.write_text(SWEEP)
        one = base / "one"
        one.mkdir()
        begun = time.time()
        if start(args, one, file, "1/1").wait() != 0:
            sys.exit((one / "log-1-1.txt").read_text())
        length = time.time() - begun
        expected = table(one / "sweep")
        print(f"one process: {len(expected)} runs in {length:.1f} s", flush=True)
        taken_up = 0
        for round in range(args.rounds):
            folder = base / f"round-{round}"
            folder.mkdir()
            processes = [start(args, folder, file, f"{k}/4") for k in range(1, 5)]
            for victim in draw.sample(range(4), 2):
                time.sleep(draw.uniform(0.1, 0.3 * length))
                processes[victim].send_signal(signal.SIGKILL)
                processes[victim].wait()
            codes = [process.wait(timeout=600) for process in processes]
            logs = [(folder / f"log-{k}-4.txt").read_text() for k in range(1, 5)]
            found = table(folder / "sweep")
            claims = list((folder / "sweep" / "runs").glob("*.claim-*"))
            # Each run's metrics have every step once, and each ended in one record.
            records = list((folder / "sweep" / "runs").glob("*.json"))
            begun_lines = sum(log.count("started   ") for log in logs)
            taken_up += begun_lines - len(expected)
            good = found == expected and len(records) == len(expected) and not claims
            survivors = [code for code in codes if code >= 0]
            good = good and all(code == 0 for code in survivors)
            print(f"round {round}: ends {codes}, {begun_lines} starts of {len(expected)} runs, {len(claims)} claims left: {'the same table' if good else 'DIFFERS'}", flush=True)
            if not good:
                for log in logs:
                    print(log, file=sys.stderr)
                for a, b in zip(expected, found):
                    if a != b:
                        print(a, b, sep="\n", file=sys.stderr)
                sys.exit(1)
        print(f"{args.rounds} rounds: every run once, tables equal to that of one process; {taken_up} runs of killed processes were resumed")


if __name__ == "__main__":
    main()
