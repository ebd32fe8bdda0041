"""Threads, forks, interrupts, and import time."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import rms

import termwise
from termwise import attention


def test_ten_threads_at_once():
    rng = np.random.default_rng(0)
    cases = [(rng.standard_normal((1, 40 + i, 2, 8), dtype=np.float32), ["softmax", "taylor=0..4 norm=l2", "taylor=0..2"][i % 3]) for i in range(10)]

    def compute(x, text):
        return attention(x, x, x, text)

    expected = [compute(*case) for case in cases]
    failures = []

    def work(index):
        for _ in range(20):
            if not np.array_equal(compute(*cases[index]), expected[index]):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
    [thread.start() for thread in threads]
    [thread.join(120) for thread in threads]
    assert not failures and not any(thread.is_alive() for thread in threads)


def test_one_state_in_two_threads_is_refused_or_right():
    layer = termwise.Layer("taylor=0..2", heads=2, dim=16)
    state, x, seen = layer.state(), np.ones((1, 512, 2, 16), np.float32), []

    def work():
        for _ in range(20):
            try:
                state.extend(x, x, x)
                seen.append(True)
            except RuntimeError:
                seen.append(False)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join(120) for thread in threads]
    assert len(seen) == 80 and state.positions == [512 * sum(seen)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="NOT RUN: this system has no fork")
def test_fork_after_use():
    code = """
import os, sys, numpy as np, termwise
x = np.ones((2, 300, 4, 16), np.float32)
before = termwise.attention(x, x, x, "taylor=0..2")
child = os.fork()
if child == 0:
    same = np.array_equal(termwise.attention(x, x, x, "taylor=0..2"), before)
    os._exit(0 if same else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=120).returncode == 0


def test_import_is_cheap_and_brings_no_torch():
    code = """
import sys, time
import numpy
begin = time.perf_counter()
import termwise
print(time.perf_counter() - begin, [name for name in ("torch", "transformers", "tqdm", "json.tool") if name in sys.modules])
"""
    seconds, modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split(maxsplit=1)
    print("import termwise takes", seconds, "s")
    assert modules.strip() == "[]"


def test_number_of_threads():
    before = termwise.get_threads()
    x = np.random.default_rng(0).standard_normal((1, 70, 2, 8), dtype=np.float32)
    expected = attention(x, x, x)
    try:
        for count in (1, 3):
            termwise.set_threads(count)
            assert termwise.get_threads() == count and np.array_equal(attention(x, x, x), expected)
        with pytest.raises(ValueError, match="from 1 to 1024"):
            termwise.set_threads(0)
    finally:
        termwise.set_threads(before)


def test_the_gil_is_released():
    # A thread that only counts goes on while attention is computed.
    x = np.random.default_rng(0).standard_normal((1, 400, 2, 32))
    counted, done = [0], threading.Event()

    def count():
        while not done.is_set():
            counted[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    time.sleep(0.01)
    before = counted[0]
    attention(x, x, x)
    after = counted[0]
    done.set()
    thread.join()
    assert after > before + 1


@pytest.mark.skipif(os.name != "posix", reason="NOT RUN: needs signals")
def test_ctrl_c_writes_a_checkpoint_and_the_run_resumes(tmp_path):
    code = """
import signal, sys, json, termwise
# As in a terminal: background processes of a script ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
seen = []
try:
    termwise.train(sys.argv[1], model="tiny", steps=100000, log_every=1, progress=lambda event: (seen.append(event), print("step", flush=True)))
except KeyboardInterrupt:
    print(json.dumps({"raised": True, "events": len(seen)}), flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "step\n"
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=120)[0].splitlines()
    told = json.loads(rest[-1])
    assert told["raised"] and told["events"] >= 1 and process.returncode == 0
    checkpoints = list((tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints
    stopped = int(checkpoints[-1].name.removeprefix("step-"))
    outcome = termwise.train(tmp_path / "run", resume=True, steps=stopped + 2, progress=False)
    assert outcome["finished"] and outcome["step"] == stopped + 2


def test_an_exception_of_the_callback_is_raised(tmp_path):
    def refuse(event):
        raise ZeroDivisionError("enough")

    with pytest.raises(ZeroDivisionError, match="enough"):
        termwise.train(tmp_path / "run", model="tiny", steps=100000, log_every=1, progress=refuse)


def test_results_do_not_depend_on_the_process():
    x = np.random.default_rng(0).standard_normal((1, 33, 2, 8), dtype=np.float32)
    code = (
        "import numpy as np, termwise, sys; x = np.random.default_rng(0).standard_normal((1, 33, 2, 8), dtype=np.float32);"
        "sys.stdout.buffer.write(termwise.attention(x, x, x).tobytes())"
    )
    other = np.frombuffer(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout, np.float32)
    assert rms(other.reshape(x.shape), attention(x, x, x)) == 0


@pytest.mark.skipif(os.name != "posix", reason="NOT RUN: needs signals")
@pytest.mark.parametrize("interrupt", [False, True])
def test_a_panic_in_training_is_an_exception(tmp_path, interrupt):
    """Empty results of ranks make the training loop panic. The call raises an Exception."""
    code = """
import json, signal, sys, time, termwise
from termwise import _core
signal.signal(signal.SIGINT, signal.default_int_handler)

class Nobody:
    rank, size = 1, 2

    def gather(self, own):
        print("asked", flush=True)
        time.sleep(float(sys.argv[2]))
        return []

    def abort(self, code):
        pass

options = {"settings": {"model": "tiny", "steps": 2, "engine": "torch"}, "folder": sys.argv[1], "runs": "runs", "resume": False, "overwrite": False, "cache": None}
try:
    _core.train(json.dumps(options), None, (lambda *_: None, Nobody()))
except Exception as error:
    print(type(error).__name__, error)
except KeyboardInterrupt:
    print("KeyboardInterrupt")
"""
    words = [sys.executable, "-c", code, str(tmp_path / "run"), "1" if interrupt else "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert process.stdout.readline() == "asked\n"
        if interrupt:
            process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "panicked" in errors
    assert out.startswith("RunError internal error:" if not interrupt else ("KeyboardInterrupt", "RunError")), out


def test_counts_are_checked():
    with pytest.raises(ValueError, match="found -1"):
        termwise.set_threads(-1)
    layer = termwise.Layer("taylor=0..2", heads=np.int64(2), dim=4)
    for call in (lambda: layer.state(-1), lambda: termwise.Layer("softmax", heads=-2, dim=4), lambda: layer.state(2).select([-1])):
        with pytest.raises(ValueError, match="found -"):
            call()
