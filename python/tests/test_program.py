"""The program in the package behaves like the binary."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import termwise

SCRIPT = Path(sys.executable).with_name("termwise")


def program(*args, **options):
    return subprocess.run([sys.executable, "-m", "termwise", *args], capture_output=True, text=True, timeout=300, **options)


def test_output_and_exit_codes():
    shown = program("variants", "norm", "softmax")
    assert shown.returncode == 0 and "norm" in shown.stdout
    assert program("--version").stdout.startswith(f"termwise {termwise.__version__}")
    wrong = program("variants", "sofmax")
    assert wrong.returncode == 2 and "softmax" in wrong.stderr
    assert program("nothing").returncode == 2
    assert program("eval", "nowhere").returncode == 2


def test_the_script_is_the_program():
    if not SCRIPT.exists():
        pytest.skip("NOT RUN: the package is not installed, only importable")
    assert subprocess.run([SCRIPT, "variants", "norm"], capture_output=True, text=True).stdout == program("variants", "norm").stdout


def test_a_sweep_starts_the_package_again(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('[base]\nmodel = "tiny"\nsteps = 2\n[axes]\nseed = [1, 2]\n')
    swept = program("sweep", str(plan), "--out", str(tmp_path / "sweep"), "--quiet")
    assert swept.returncode == 0, swept.stderr
    assert len(list((tmp_path / "sweep" / "runs").glob("*/checkpoints"))) == 2


@pytest.mark.skipif(os.name != "posix", reason="NOT RUN: needs signals")
def test_interrupts(tmp_path):
    run = tmp_path / "runs" / "one"
    args = ["train", "--model", "tiny", "--steps", "100000", "--runs", str(tmp_path / "runs"), "--name", "one", "--quiet"]
    process = subprocess.Popen([sys.executable, "-m", "termwise", *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    begun = time.monotonic()
    while not (run / "metrics.jsonl").exists() and time.monotonic() - begun < 60:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 130, errors
    assert list((run / "checkpoints").iterdir())


def test_a_closed_pipe_is_no_error():
    shown = subprocess.run(f"{sys.executable} -m termwise variants | head -1", shell=True, capture_output=True, text=True)
    assert shown.returncode == 0 and "Traceback" not in shown.stderr and "error" not in shown.stderr
