"""Shared helpers. A test with a missing requirement is skipped with a reason; TERMWISE_REQUIRE=torch,shared (or all) turns a skip into a failure."""

import os
import warnings
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"


def required() -> set[str]:
    """The requirements whose absence is a failure."""
    return {word.strip() for word in os.environ.get("TERMWISE_REQUIRE", "").split(",")}


def need(name: str, there: bool, why: str) -> None:
    """Skip if something is missing, or fail if it is required."""
    if there:
        return
    if required() & {name, "all"}:
        pytest.fail(f"{name} is required: {why}")
    # At module level, this skips the whole file.
    pytest.skip(f"NOT RUN, {name}: {why}", allow_module_level=True)


def pytest_sessionfinish(session, exitstatus):
    """With TERMWISE_REQUIRE=all every skipped test is a failure, including those of `pytest.skip` and `importorskip`."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if "all" in required() and reporter and reporter.stats.get("skipped") and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests were skipped (TERMWISE_REQUIRE=all makes that a failure):")
    reasons = sorted({report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr) for report in skipped})
    for reason in reasons:
        terminalreporter.write_line(f"{reason}", yellow=True)


@pytest.fixture(scope="session")
def stories() -> Path:
    folder = SHARED / "data" / "stories260K"
    need("shared", folder.is_dir(), f"{folder} is not there")
    return folder


@pytest.fixture(scope="session")
def book() -> Path:
    file = SHARED / "data" / "tinystories-2MiB.txt"
    need("shared", file.is_file(), f"{file} is not there")
    return file


@pytest.fixture(scope="session")
def families() -> Path:
    folder = SHARED / "families"
    need("shared", folder.is_dir(), f"{folder} is not there")
    return folder


def rms(x, expected) -> float:
    """Relative error."""
    x, expected = np.asarray(x, np.float64), np.asarray(expected, np.float64)
    return float(np.sqrt(np.mean((x - expected) ** 2)) / max(np.sqrt(np.mean(expected**2)), 1e-30))


def gradient_error(name, found, expected) -> float:
    """RMS error relative to the RMS of the gradient, or to a tenth of that of dv if that is larger, because some gradients cancel."""
    own, usual = np.asarray(expected[name], np.float64), np.sqrt(np.mean(np.asarray(expected["v"], np.float64) ** 2))
    error = np.sqrt(np.mean((np.asarray(found, np.float64) - own) ** 2))
    return float(error / max(np.sqrt(np.mean(own**2)), 0.1 * usual))


#: Kernels of random variants.
KERNELS = ["exp", "taylor=0..2", "taylor=0..4", "taylor=1..3", "taylor=0..2,coef=learned", "power=2", "feature=elu+1", "feature=relu", "linear"]
OTHERS = [
    ["", "over=none", "over=length", "over=position", "over=sum,sink"],
    ["", "norm=l2", "norm=rms", "norm=layer"],
    ["", "in"],
    ["", "out"],
    ["", "post", "post=silu,channel"],
    ["", "decay=softplus", "decay=linear", "decay=0.9", "decay=mamba"],
    ["", "conv=3"],
    ["", "window=5", "window=4 sinks=2"],
    ["", "qk_norm=rms", "qk_norm=l2"],
    ["", "cap=5", "clamp=3"],
    ["", "scale=0.3"],
]


def random_variants(count: int, seed: int = 0) -> list[str]:
    """Valid random variant strings of any length."""
    from termwise import Layer

    rng, found = np.random.default_rng(seed), []
    while len(found) < count:
        share = rng.uniform(0.1, 0.6)
        words = [KERNELS[rng.integers(len(KERNELS))]]
        words += [choices[rng.integers(1, len(choices))] for choices in OTHERS if rng.random() < share]
        # A sum of weights of both signs can cross zero, even with a sink.
        if words[0] in ("linear", "taylor=1..3", "taylor=0..2,coef=learned") and "over=sum,sink" in words:
            continue
        text = " ".join(words)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                layer = Layer(text, heads=4, kv_heads=2, dim=16, value_dim=5, rope=100.0)
        except ValueError:
            continue
        # Outputs are not comparable if the denominator can reach zero.
        if not any("denominator" in warning for warning in layer.variants[0].warnings) and text not in found:
            found.append(text)
    return found


def inputs(layer, batch=2, time=23, dtype=np.float32, seed=0):
    """q, k, v and extras of a layer."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    q = draw(batch, time, layer.heads, layer.dim)
    k = draw(batch, time, layer.kv_heads, layer.dim)
    v = draw(batch, time, layer.kv_heads, layer.value_dim)
    extras = {}
    for extra in layer.extras:
        x = draw(*extra.full_shape(batch, time))
        if extra.name.endswith(("norm_weight", "q_norm", "k_norm", "coefficients")):
            x = np.abs(x) + dtype(0.5)
        extras[extra.name] = x
    return q, k, v, extras
