"""Train with several MPI processes. Checks that results are bit-identical for any number of processes, and that nothing is lost if one is killed.

    python3 bench/ranks.py TERMWISE [--kills 20] [--steps 50] [--ranks 1,2,3,4,8] [--seed 1]

TERMWISE is a program built with `--features mpi`. Needs mpirun (Open MPI). Everything is written into a temporary folder. The exit code is 1 if results differ.
"""

import argparse
import hashlib
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

VARIANTS = ["softmax", "norm conv=3", "taylor=0..2 norm=l2"]
FILES = ["model.safetensors", "optimizer.safetensors", "state.json"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def mpirun(ranks):
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]


def arguments(args, attention, steps, checkpoint_every=10):
    sizes = "--layers 2 --hidden 32 --heads 2 --mlp 64 --batch 8 --length 128 --warmup 5 --eval-every 20 --eval-batches 6 --log-every 5"
    return [args.program, "--threads", "1", "train", "--quiet", *sizes.split(), "--attention", attention, "--steps", str(steps),
            "--horizon", str(steps), "--checkpoint-every", str(checkpoint_every), "--keep", "3"]


def newest(run):
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def hashes(run):
    return {name: hashlib.blake2b((newest(run) / name).read_bytes()).hexdigest()[:16] for name in FILES}


def check(command, folder):
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def equal_bytes(args, folder):
    for attention in VARIANTS:
        found = {}
        for ranks in args.ranks:
            name = f"{VARIANTS.index(attention)}-{ranks}"
            begun = time.time()
            check([*mpirun(ranks), *arguments(args, attention, args.steps), "--name", name], folder)
            found[ranks] = hashes(folder / "runs" / name)
            print(f"{attention:22} {ranks} ranks  {args.steps} steps  {time.time() - begun:5.1f} s  {found[ranks]}", flush=True)
        # The same without MPI, with the number of micro-batches from the settings.
        name = f"{VARIANTS.index(attention)}-alone"
        check([*arguments(args, attention, args.steps), "--micro-batches", "8", "--name", name], folder)
        found["no MPI"] = hashes(folder / "runs" / name)
        differ = [ranks for ranks in found if found[ranks] != found[args.ranks[0]]]
        print(f"{attention:22} {'the same bytes for all' if not differ else f'DIFFER: {differ}'}", flush=True)
        if differ:
            sys.exit(1)


def children(pid):
    """Child processes of the program, from /proc."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(stat[1]) == pid:
                    found.append(int(entry.name))
            except (OSError, IndexError, ValueError):
                pass
    return found


def kills(args, folder):
    draw = random.Random(args.seed)
    steps = 400
    command = arguments(args, "norm conv=3", steps, checkpoint_every=5)
    begun = time.time()
    check([*mpirun(2), *command, "--name", "whole"], folder)
    length = time.time() - begun
    expected = hashes(folder / "runs" / "whole")
    killed, rounds, unclear, damaged = 0, 0, 0, 0
    while killed < args.kills:
        name = f"killed-{rounds}"
        run = folder / "runs" / name
        history = []
        while True:
            ranks = draw.choice([2, 3, 4])
            begin = [*command, *(["--resume", f"runs/{name}"] if (run / "settings.toml").exists() else ["--name", name])]
            process = subprocess.Popen([*mpirun(ranks), *begin], cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            wait = draw.uniform(0.3, 0.5 * length) if killed < args.kills else None
            try:
                out, err = process.communicate(timeout=wait)
                if process.returncode != 0:
                    sys.exit(f"round {rounds}, {ranks} ranks: exited with {process.returncode} before the kill\n{out}\n{err}")
                history.append(f"{ranks} to the end")
                break
            except subprocess.TimeoutExpired:
                ranks_of = children(process.pid)
                if not ranks_of:
                    process.communicate()
                    continue
                at = draw.randrange(len(ranks_of))
                os.kill(ranks_of[at], 9)
                out, err = process.communicate(timeout=60)
                killed += 1
                history.append(f"{ranks}, one killed")
                clear = "signal 9" in err or "Killed" in err
                unclear += not clear
                if process.returncode == 0:
                    sys.exit("the exit code does not report a lost rank")
                for checkpoint in sorted((run / "checkpoints").glob("step-*")) if run.exists() else []:
                    # A checkpoint under its final name is complete and can be evaluated.
                    if not (checkpoint / "manifest.json").exists():
                        damaged += 1
        found = hashes(run)
        print(f"round {rounds}: {', '.join(history)}: {'same bytes' if found == expected else f'OTHER BYTES {found}'}", flush=True)
        if found != expected:
            sys.exit(1)
        rounds += 1
    print(f"{killed} kills of a random rank in {rounds} runs: all final bytes equal those of an uninterrupted run; "
          f"{damaged} checkpoints without a manifest, {unclear} ends without a message of mpirun")
    sys.exit(1 if damaged or unclear else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=lambda text: str(pathlib.Path(text).resolve()))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 3, 4, 8])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        equal_bytes(args, pathlib.Path(folder))
        if args.kills:
            kills(args, pathlib.Path(folder))


if __name__ == "__main__":
    main()
