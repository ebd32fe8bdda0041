"""Measure the live page under load in a browser: time to the first view, delay of a new point, and time of a pointer move.

    python3 bench/serve.py TERMWISE [--runs 200] [--points 1000] [--rounds 20]

Runs are synthetic, in a temporary folder. Chromium is driven over its debugging pipe; the first view counts from the request to the first drawn curves, a new
point from the append to its file to the frame that shows it, a move from its event to the end of its handler.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import tempfile
import time

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]


class Browser:
    """A headless Chromium with one tab; messages of JSON, each ended by a zero byte."""

    def __init__(self, folder):
        program = next(filter(None, map(shutil.which, NAMES)))
        to_read, self.to = os.pipe()
        self.come, to_write = os.pipe()

        def pipes():
            # Duplicated first, because each descriptor may have the target number of the other.
            to_read_copy, to_write_copy = os.dup(to_read), os.dup(to_write)
            os.dup2(to_read_copy, 3)
            os.dup2(to_write_copy, 4)

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking"]
        self.process = subprocess.Popen([program, *flags, "--remote-debugging-pipe", f"--user-data-dir={folder}"], preexec_fn=pipes, close_fds=False,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.rest, self.number, self.session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters} | ({"sessionId": self.session} if self.session else {})
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                self.rest += os.read(self.come, 1 << 20)
            text, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")


def line(step, loss):
    return json.dumps({"kind": "train", "step": step, "time": 1.0, "loss": loss, "lr": 0.1, "tokens": step, "tokens_per_second": 1.0}) + "\n"


def make(folder, runs, points, draw):
    for number in range(runs):
        run = folder / f"run-{number:03}"
        run.mkdir(parents=True)
        (run / "settings.toml").write_text(f'attention = "taylor=0..{number % 5}"\nseed = {number}\nlr = {1e-3 * (1 + number % 3)}\nsteps = {10 * points}\n')
        with (run / "metrics.jsonl").open("w") as file:
            file.writelines(line(step, 2.0 + 3.0 / (1 + step / 50) + draw.uniform(-0.05, 0.05)) for step in range(1, points + 1))


def memory(pid):
    return next(int(text.split()[1]) for text in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines() if text.startswith("VmHWM")) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=lambda text: str(pathlib.Path(text).resolve()))
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as base:
        base = pathlib.Path(base)
        make(base / "runs", args.runs, args.points, draw)
        begun = time.perf_counter()
        server = subprocess.Popen([args.program, "serve", str(base / "runs")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        browser = None
        try:
            address = server.stdout.readline().strip()
            print(f"server ready after {1000 * (time.perf_counter() - begun):.0f} ms")
            browser = Browser(base / "profile")
            first = []
            for _ in range(5):
                begun = time.perf_counter()
                browser.call("Page.navigate", url=address)
                while browser.evaluate("document.body?.dataset.drawn ?? ''") == "":
                    time.sleep(0.005)
                first.append(1000 * (time.perf_counter() - begun))
            print(f"first view: {min(first):.0f} to {max(first):.0f} ms, the first time {first[0]:.0f} ms")
            for chosen in ("the first twelve", "all"):
                if chosen == "all":
                    browser.evaluate("document.getElementById('all').click()")
                browser.evaluate("document.getElementById('curve').value = 'train'; document.getElementById('curve').dispatchEvent(new Event('input'))")
                moves = browser.evaluate("""(async () => {
                    const over = document.querySelector('#plot canvas:last-of-type'), box = over.getBoundingClientRect(), took = [];
                    for (let i = 0; i < 200; i++) {
                        const began = performance.now();
                        over.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + 70 + (box.width - 100) * i / 200, clientY: box.top + 100, bubbles: true }));
                        took.push(performance.now() - began);
                        if (i % 10 === 9) await new Promise(requestAnimationFrame);
                    }
                    return took;
                })()""")
                print(f"pointer move, {chosen} curves shown: median {statistics.median(moves):.2f} ms, largest {max(moves):.1f} ms")
            last, delays = args.points, []
            for _ in range(args.rounds):
                last += 1
                # At a random time within the polling interval.
                time.sleep(draw.uniform(0.1, 0.7))
                wanted = f"[...document.querySelectorAll('#runs tbody tr')].some((row) => row.dataset.run === 'run-{last % args.runs:03}' && row.textContent.includes('{last} of'))"
                begun = time.perf_counter()
                with (base / "runs" / f"run-{last % args.runs:03}" / "metrics.jsonl").open("a") as file:
                    file.write(line(last, 2.0))
                while not browser.evaluate(f"new Promise((done) => requestAnimationFrame(() => done({wanted})))"):
                    pass
                delays.append(1000 * (time.perf_counter() - begun))
            print(f"delay of a new point: {statistics.median(delays):.0f} ms (median of {args.rounds}), at most {max(delays):.0f} ms, all {args.runs} runs shown")
            print(f"memory of the server at most {memory(server.pid):.0f} MB; the page's script {browser.evaluate('performance.memory.usedJSHeapSize') / 1e6:.0f} MB")
        finally:
            server.terminate()
            server.wait()
            if browser:
                browser.process.terminate()
                browser.process.wait()


if __name__ == "__main__":
    main()
