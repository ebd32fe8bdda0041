"""Training with PyTorch equals the native engine: one process, two processes, and resuming with the other engine."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from conftest import need, rms

import termwise

try:
    import torch
except ImportError:
    torch = None
    need("torch", False, "PyTorch is not installed")

from safetensors.torch import load_file

from termwise.torch import dry_run
from termwise.torch.model import Model
from termwise.torch.train.__main__ import _flags, main
from termwise.torch.train.collective import Collective
from termwise.torch.train.learner import Batch, Learner, LearnerOptions

SETTINGS = """
layers = 2
hidden = 32
heads = 4
kv_heads = 2
mlp = 48
batch = 4
length = 128
lr = 3e-3
warmup = 5
log_every = 1
checkpoint_every = 0
eval_every = 0
threads = 1
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "settings.toml"
    # A key of `text` replaces the default: TOML does not allow duplicate keys.
    keys = {line.split("=")[0].strip() for line in text.splitlines()}
    base = "".join(line for line in SETTINGS.splitlines(keepends=True) if line.split("=")[0].strip() not in keys)
    file.write_text(base + text)
    return file


def lines(run: Path, kind: str = "train") -> list[dict]:
    return [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if line["kind"] == kind]


def losses(run: Path) -> np.ndarray:
    return np.array([line["loss"] for line in lines(run)])


def native(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "termwise", "train", "--quiet", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def with_torch(*words: str) -> None:
    assert main(["--device", "cpu", "--quiet", *map(str, words)]) == 0


def torchrun(processes: int, *words: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "termwise.torch.train"]
    done = subprocess.run([*command, "--device", "cpu", "--quiet", *map(str, words)], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]


def weights(run: Path) -> dict[str, np.ndarray]:
    core = termwise._core.load_model(str(run), None)
    found = {}
    for name, shape, _ in termwise.torch.model.Outline.read(termwise._core.model_of_config(core.config, 8)[0]).tensors:
        found[name] = np.empty(shape, np.float32)
        core.copy_tensor(name, found[name])
    return found


def apart(a: Path, b: Path) -> float:
    """The largest relative difference of a tensor of two runs."""
    first, second = weights(a), weights(b)
    assert list(first) == list(second)
    return max(rms(first[name], second[name]) if np.any(second[name]) else np.abs(first[name]).max() for name in first)


@pytest.mark.parametrize("attention", ["softmax", "gated_softmax", "taylor=0..4 decay=mamba conv=3", "gated_deltanet"])
def test_fifty_steps_are_those_of_the_native_engine(attention, tmp_path):
    file = write(tmp_path, f'attention = "{attention}"\nsteps = 50\neval_every = 25\neval_batches = 2\n')
    native("--config", file, "--runs", tmp_path, "--name", "native")
    with_torch(file, "--folder", tmp_path / "torch")
    a, b = losses(tmp_path / "native"), losses(tmp_path / "torch")
    assert len(a) == len(b) == 50 and a[-1] < 0.9 * a[0]
    # Training with the delta rule amplifies rounding: from an error of 1e-8 to 1e-3 within 50 steps.
    difference = np.abs(a - b)[: 25 if attention == "gated_deltanet" else 50]
    assert difference.max() < 1e-3, f"losses differ by {difference.max():.1e}"
    assert np.abs(a - b).max() < 1e-2
    # Also learning rates, tokens, gradient norms and evaluations.
    for one, other in zip(lines(tmp_path / "native"), lines(tmp_path / "torch"), strict=True):
        assert (one["step"], one["lr"], one["tokens"]) == (other["step"], other["lr"], other["tokens"])
        # Rounding errors grow during training, and quickly if a norm divides by small values, as after a delta rule. The next test compares gradients at equal weights.
        part = 1e-2 if attention != "gated_deltanet" or one["step"] <= 10 else 0.1
        assert abs(one["grad_norm"] - other["grad_norm"]) < part * one["grad_norm"]
    for one, other in zip(lines(tmp_path / "native", "held_out"), lines(tmp_path / "torch", "held_out"), strict=True):
        assert abs(one["loss"] - other["loss"]) < 1e-3 and one["recall"]["tokens"] == other["recall"]["tokens"]
        assert abs(one["recall"]["loss"] - other["recall"]["loss"]) < 1e-3
    # The run folder equals that of a native run, except for its provenance.
    files = [{str(p.relative_to(run)) for p in run.rglob("*") if "tfevents" not in p.name} for run in (tmp_path / "native", tmp_path / "torch")]
    assert files[0] == files[1]
    assert 'engine = "torch"' in (tmp_path / "torch" / "settings.toml").read_text()


class Watched(Learner):
    """Stores the gradients of its last step, in float32 and in float64."""

    def gradient(self, batches):
        super().gradient(batches)
        self.short = {name: p.grad.double().numpy() for name, p in self.parameters.items()}
        wide = Model(self.model.config, positions=self.settings["length"], mode=self.settings["mode"]).double()
        wide.load_state_dict(self.model.state_dict())
        made = [Batch.of(*batch) for batch in batches]
        for batch in made:
            (wide(batch.ids, batch.labels, batch.lengths).sum() / sum(one.counted for one in made)).backward()
        self.wide = {name: p.grad.numpy() for name, p in wide.named_parameters()}


def moments(run: Path, step: int) -> dict[str, np.ndarray]:
    found = load_file(run / "checkpoints" / f"step-{step:08}" / "optimizer.safetensors")
    return {name.removeprefix("first."): x.double().numpy() for name, x in found.items() if name.startswith("first.")}


@pytest.mark.parametrize("before", [0, 20])
@pytest.mark.parametrize("attention", ["gated_softmax", "gated_deltanet"])
def test_at_equal_weights_both_gradients_are_those_of_float64(attention, before, tmp_path):
    """Compares each tensor at the start and in the middle of a run. Native gradients are derived from the first moments of AdamW."""
    file = write(tmp_path, f'attention = "{attention}"\nhorizon = 30\nbeta1 = 0.5\nclip = 0.0\n')
    run, other, known = tmp_path / "run", tmp_path / "other", {}
    if before:
        native("--config", file, "--steps", before, "--runs", tmp_path, "--name", "run")
        known = moments(run, before)
        shutil.copytree(run, other)
        native("--resume", run, "--steps", before + 1)
    else:
        native("--config", file, "--steps", 1, "--runs", tmp_path, "--name", "run")
    options = {
        "settings": {"engine": "torch", "steps": before + 1}, "files": [] if before else [str(file)], "folder": str(other), "runs": str(tmp_path),
        "resume": before > 0, "overwrite": False, "cache": None,
    }  # fmt: skip
    learners = []

    def made(config, settings):
        learners.append(Watched(config, settings, LearnerOptions()))
        return learners[0]

    termwise._core.train(json.dumps(options), None, (made, Collective()))
    after = moments(run, before + 1)
    usual = np.sqrt(np.mean(np.concatenate([g.ravel() for g in learners[0].wide.values()]) ** 2))
    for name, expected in learners[0].wide.items():
        # Some gradients cancel, such as that of a gate before a norm, so their rounding error is that of the terms.
        bound = 5e-5 * max(np.sqrt(np.mean(expected**2)), 0.1 * usual)
        found = (after[name] - 0.5 * known.get(name, 0.0)) / 0.5
        for engine, gradient in (("torch", learners[0].short[name]), ("native", found)):
            error = np.sqrt(np.mean((gradient - expected) ** 2))
            assert error < bound, f"{engine}, {name}: {error:.1e}, {bound:.1e} allowed"


def test_each_engine_resumes_runs_of_the_other(tmp_path):
    file = write(tmp_path, 'attention = "gated_softmax"\nhorizon = 30\n')
    native("--config", file, "--steps", 30, "--runs", tmp_path, "--name", "whole")
    run = tmp_path / "run"
    native("--config", file, "--steps", 10, "--runs", tmp_path, "--name", "run")
    with_torch(file, "--folder", run, "--resume", "--steps", 20)
    native("--config", file, "--resume", run, "--engine", "native", "--steps", 30)
    assert len(losses(run)) == 30
    assert np.abs(losses(run) - losses(tmp_path / "whole")).max() < 1e-3
    # Weights stay close only if the moments and the step count of AdamW are restored.
    assert apart(run, tmp_path / "whole") < 2e-2
    state = json.loads(next((run / "checkpoints").glob("step-00000030")).joinpath("state.json").read_text())
    assert (state["step"], state["updates"], state["data_index"]) == (30, 30, 30)


def test_two_processes_equal_one(tmp_path):
    file = write(tmp_path, 'attention = "taylor=0..2 out"\nsteps = 10\naccumulate = 2\neval_every = 10\neval_batches = 3\n')
    with_torch(file, "--folder", tmp_path / "one")
    torchrun(2, file, "--folder", tmp_path / "two")
    assert np.abs(losses(tmp_path / "one") - losses(tmp_path / "two")).max() < 1e-5
    assert apart(tmp_path / "two", tmp_path / "one") < 1e-4
    one, two = (lines(tmp_path / run, "held_out")[0] for run in ("one", "two"))
    assert abs(one["loss"] - two["loss"]) < 1e-5 and one["tokens"] == two["tokens"]
    # One process resumes a run of two.
    with_torch(file, "--folder", tmp_path / "two", "--resume", "--steps", 12)
    assert len(losses(tmp_path / "two")) == 12


def test_parameters_spread_over_processes(tmp_path):
    """FSDP with activation checkpointing. Five rows, so one process has more rows than the other."""
    file = write(tmp_path, 'attention = "softmax norm=rms"\nsteps = 6\nbatch = 5\neval_every = 6\neval_batches = 3\n'.replace("batch = 5", ""))
    with_torch(file, "--folder", tmp_path / "one", "--batch", 5)
    torchrun(2, file, "--folder", tmp_path / "spread", "--batch", 5, "--shard", "--checkpoint-activations")
    assert np.abs(losses(tmp_path / "one") - losses(tmp_path / "spread")).max() < 1e-5
    assert apart(tmp_path / "spread", tmp_path / "one") < 1e-4
    one, two = (lines(tmp_path / run, "held_out")[0] for run in ("one", "spread"))
    assert abs(one["loss"] - two["loss"]) < 1e-5 and one["tokens"] == two["tokens"]
    with_torch(file, "--folder", tmp_path / "spread", "--resume", "--batch", 5, "--steps", 8)


def test_precision_and_activation_checkpointing(tmp_path):
    """bfloat16 products are close to float32; activation checkpointing does not change results."""
    file = write(tmp_path, 'attention = "taylor=0..2"\nsteps = 8\nmicro_batches = 2\n')
    with_torch(file, "--folder", tmp_path / "plain")
    with_torch(file, "--folder", tmp_path / "again", "--checkpoint-activations")
    with_torch(file, "--folder", tmp_path / "bf16", "--precision", "bf16")
    assert np.array_equal(losses(tmp_path / "plain"), losses(tmp_path / "again"))
    difference = np.abs(losses(tmp_path / "plain") - losses(tmp_path / "bf16")).max()
    assert 0 < difference < 0.05
    # Parameters are always float32.
    assert apart(tmp_path / "bf16", tmp_path / "plain") < 0.3


def test_invalid_runs_are_explained(tmp_path, capfd):
    file = write(tmp_path, 'attention = "softmax"\nsteps = 2\nlr = -1\n'.replace("lr = -1", ""))
    assert main(["--device", "cpu", "--quiet", str(file), "--folder", str(tmp_path / "run"), "--attention", "softmaxx"]) == 2
    assert "softmaxx" in capfd.readouterr().err and not (tmp_path / "run").exists()
    with_torch(file, "--folder", tmp_path / "run")
    assert main(["--device", "cpu", "--quiet", str(file), "--folder", str(tmp_path / "run")]) != 0


def test_flags_are_those_of_the_program(tmp_path, monkeypatch):
    """Flags as in ``--help``: the value after a space or an equals sign, before or after files."""
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, "")
    small = ["--batch", "2", "--log-every", "1"]
    for number, words in enumerate(
        [
            [str(file), "--steps", "3", "--attention", "taylor=0..4 norm=l2"],
            [str(file), "--steps=3", "--attention=taylor=0..4 norm=l2"],
            ["--steps=3", str(file), "--attention", "taylor=0..4 norm=l2"],
        ]
    ):
        run = tmp_path / f"run{number}"
        with_torch(*words, *small, "--folder", run)
        settings = tomllib.loads((run / "settings.toml").read_text())
        assert (settings["steps"], settings["batch"]) == (3, 2)
        assert termwise.Variant(settings["attention"]) == termwise.Variant("taylor=0..4 norm=l2")
    assert _flags(["a.toml", "--tie", "--steps", "3", "--name", "2024-01-01", "--lr=1e-3", "b.toml"]) == (
        ["a.toml", "b.toml"], {"tie": True, "steps": 3, "name": "2024-01-01", "lr": 1e-3},
    )  # fmt: skip


def test_the_documented_command(tmp_path):
    words = ["--steps", "3", "--attention", "taylor=0..4 norm=l2", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-m", "termwise.torch.train", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (settings,) = (tmp_path / "runs").glob("*/settings.toml")
    assert tomllib.loads(settings.read_text())["steps"] == 3


def test_the_papers_models_on_the_meta_device_and_reduced(tmp_path):
    """Every model of ``reproduce --scale paper``: parameters at full size; forward and backward on the meta device with 2 of 20 equal layers and 2 of
    36 rows; and ten real steps of each attention in a small model."""
    done = subprocess.run([sys.executable, "-m", "termwise", "reproduce", "--scale", "paper", "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "runs").glob("*.toml"))
    assert len(files) > 10
    # Models with the same attention and size differ in seeds and data only.
    models, sizes = {}, set()
    for file in files:
        settings, config = termwise._core.model_of_settings(file.read_text(), dry_run.VOCABULARY)
        if config + settings not in models:
            models[config + settings] = file
            sizes.add(sum(p.numel() for p in termwise.torch.model.Model(config, device="meta").parameters()) > 1e9)
            text, changes = re.subn(r"^(layers|batch) = \d+$", r"\1 = 2", file.read_text(), flags=re.MULTILINE)
            assert changes == 2
            file.write_text(text)
    assert sizes == {True, False}
    found = list(dry_run.dry_run(models.values()))
    assert {one.length for one in found} == {1024, 4096}
    for one in found:
        assert one.kept < one.kept_without_checkpointing
        # No tensor of a step is T×T for all heads and rows; in short texts logits and weights are larger than that.
        assert 0 < one.largest_of_blocks < 16 * one.batch * one.length**2 * 4
    attentions = sorted({one.attention for one in found})
    for index, attention in enumerate(attentions):
        file = write(tmp_path, f'attention = "{attention}"\nsteps = 10\n')
        with_torch(file, "--folder", tmp_path / f"cut-{index}", "--length", 128, "--batch", 2)
        assert np.isfinite(losses(tmp_path / f"cut-{index}")).all()
