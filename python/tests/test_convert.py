"""Fixed-size KV memory: its parts against formulas in NumPy, states, converted models, and the commands."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from conftest import inputs, rms

import termwise
from termwise import Layer

HEADS, KV_HEADS, DIM, TIME = 4, 2, 8, 40
FAR = "far(taylor=0..2,coef=learned scale=1 dim=3)"
VARIANTS = {
    "chosen": "softmax window=6 sinks=2 chosen=5",
    "fading": "softmax window=6 sinks=2 chosen=5,fade=8",
    "bits": "softmax window=6 sinks=2 bits=8",
    "few bits": "softmax window=6 bits=4",
    "bf16": "softmax window=6 sinks=2 bits=16",
    "far": f"softmax window=6 sinks=2 {FAR}",
    "all": "softmax window=6 sinks=2 chosen=5 bits=8,4",
}


def bf16(x):
    """Round to bfloat16, to nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32)).view(np.float32).astype(np.float64)


def hadamard(n):
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / math.sqrt(n)


def rounded(x, bits, rotated):
    """Rows [T, n] as the cache restores them: a scale per 32 values, at 4 bits of the rotated row."""
    n = x.shape[-1]
    block = n & -n
    h = np.kron(np.eye(n // block), hadamard(block)) if rotated else np.eye(n)
    stored = x @ h
    for first in range(0, n, 32):
        part = stored[:, first : first + 32]
        if bits == 16:
            part[:] = bf16(part)
            continue
        largest = np.take_along_axis(part, np.abs(part).argmax(-1)[:, None], -1)
        scale = bf16(np.abs(largest) / 127 if bits == 8 else -largest / 8)
        low, high = (-127, 127) if bits == 8 else (-8, 7)
        part[:] = scale * np.clip(np.round(part / scale), low, high)
    return stored @ h


def held(scores, window, sinks, chosen, fade):
    """The near keys of each position, for scores [query heads of the KV head, T, T]."""
    time = scores.shape[-1]
    received, kept, near = np.zeros(time), [], []
    for t in range(time):
        leaving = t - window
        if chosen and leaving >= sinks:
            kept.append(leaving)
            if len(kept) > chosen:
                # The key with the lowest sum is evicted, and the key that left the window takes its slot.
                least = min(range(len(kept)), key=lambda i: received[kept[i]])
                kept[least] = kept[-1]
                kept.pop()
        own = sorted({s for s in range(t + 1) if s < sinks or t - s < window} | set(kept))
        received[own] *= fade
        for head in scores:
            w = np.exp(head[t, own] - head[t, own].max())
            received[own] += w / w.sum()
        near.append(own)
    return near


def formula(q, k, v, extras, window=6, sinks=0, chosen=0, fade=1.0, bits=None, far=False):
    """The formula in plain loops, for one batch row."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    extras = {name: x.astype(np.float64) for name, x in extras.items()}
    y = np.zeros((TIME, HEADS, v.shape[-1]))
    each = HEADS // KV_HEADS
    for g in range(KV_HEADS):
        own_k, own_v = k[:, g].copy(), v[:, g].copy()
        if bits:
            # Sinks have 16 bits.
            for own, width in ((own_k, bits[0]), (own_v, bits[1])):
                own[:sinks], own[sinks:] = rounded(own[:sinks], 16, width == 4), rounded(own[sinks:], width, width == 4)
        heads = range(g * each, (g + 1) * each)
        scores = np.stack([q[:, h] @ own_k.T / math.sqrt(DIM) for h in heads])
        near = held(scores, window, sinks, chosen, fade)
        for x, h in zip(scores, heads):
            for t in range(TIME):
                weights = np.zeros(TIME)
                weights[near[t]] = np.exp(x[t, near[t]])
                others = [s for s in range(t + 1) if s not in near[t]]
                if far and others:
                    z = own_k[others] @ extras["far_dim_k"][g].T @ (extras["far_dim_q"][h] @ q[t, h])
                    weights[others] = sum(a * z**i / math.factorial(i) for i, a in enumerate(extras["far_coefficients"][h]))
                y[t, h] = weights @ own_v / weights.sum()
    return y


OPTIONS = {
    "chosen": {"sinks": 2, "chosen": 5},
    "fading": {"sinks": 2, "chosen": 5, "fade": math.exp(-1 / 8)},
    "bits": {"sinks": 2, "bits": (8, 8)},
    "few bits": {"bits": (4, 4)},
    "bf16": {"sinks": 2, "bits": (16, 16)},
    "far": {"sinks": 2, "far": True},
    "all": {"sinks": 2, "chosen": 5, "bits": (8, 4)},
}


def drawn(name, dtype=np.float32):
    layer = Layer(VARIANTS[name], heads=HEADS, kv_heads=KV_HEADS, dim=DIM, value_dim=5)
    q, k, v, extras = inputs(layer, batch=2, time=TIME, dtype=dtype)
    if "far_coefficients" in extras:
        # 1 + x + x²: weights stay above zero.
        extras["far_coefficients"] = np.broadcast_to(np.array([1, 1, 2], dtype), extras["far_coefficients"].shape).copy()
    return layer, q, k, v, extras


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_is_the_formula(name):
    for dtype, bound in ((np.float32, 2e-5), (np.float64, 1e-5)):
        layer, q, k, v, extras = drawn(name, dtype)
        expected = np.stack([formula(q[b], k[b], v[b], extras, **OPTIONS[name]) for b in range(2)])
        assert rms(layer(q, k, v, **extras), expected) < bound
        assert rms(termwise.attention(q, k, v, VARIANTS[name], **extras), expected) < bound
    # Each part has an effect.
    plain = termwise.attention(q, k, v, "softmax window=6 sinks=2")
    assert rms(plain, expected) > 1e-4


@pytest.mark.parametrize("name", VARIANTS)
def test_states_are_of_constant_size_and_agree(name, tmp_path):
    layer, q, k, v, extras = drawn(name)
    expected = layer(q, k, v, **extras)
    state = layer.state(2)
    ys = [state.extend(q[:, :17], k[:, :17], v[:, :17], **extras)]
    size = state.bytes
    ys += [state.step(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], **extras) for t in range(17, 30)]
    assert state.is_constant and state.bytes == size
    state.save(tmp_path / "state.safetensors")
    rest = [x[:, 30:] for x in (q, k, v)]
    swapped = state.select([1, 0]).extend(*(x[::-1].copy() for x in rest), **extras)
    ys.append(layer.load_state(tmp_path / "state.safetensors", 2).extend(*rest, **extras))
    assert rms(np.concatenate(ys, 1), expected) < 1e-5
    assert np.array_equal(swapped[::-1], ys[-1])


def test_gradients_are_those_of_the_reference():
    layer, q, k, v, extras = drawn("far")
    dy = np.ones((2, TIME, HEADS, 5), np.float32)
    assert layer.variants[0].inference_only is None
    fused, reference = (layer.grad(q, k, v, dy, engine=engine, **extras) for engine in ("fused", "reference"))
    assert fused.keys() == reference.keys()
    for key, expected in reference.items():
        assert rms(fused[key], expected) < 1e-3, key


@pytest.mark.parametrize(("name", "part"), [("chosen", "chosen"), ("bits", "bits"), ("all", "chosen")])
def test_eviction_and_quantization_are_inference_only(name, part):
    layer, q, k, v, extras = drawn(name)
    assert layer.variants[0].inference_only == part
    for engine in ("fused", "reference"):
        with pytest.raises(ValueError, match=f"`{part}` is inference-only"):
            layer.grad(q, k, v, np.ones((2, TIME, HEADS, 5), np.float32), engine=engine, **extras)


def test_variants_without_a_module_are_refused():
    for text in (text for name, text in VARIANTS.items() if name != "far"):
        with pytest.raises(ValueError, match="needs the KV store of the native engine"):
            termwise.Variant(text).to_torch()
    for text, why in (("softmax chosen=4", "window"), ("softmax window=4 bits=3", "8 or 4"), ("softmax window=4 chosen=x", "chosen=32")):
        with pytest.raises(ValueError, match=why):
            termwise.Variant(text)


@pytest.fixture(scope="module")
def converted(stories, book, tmp_path_factory):
    """A model with all kinds of memory, and the result of the conversion."""
    folder = tmp_path_factory.mktemp("convert")
    events = []
    found = termwise.convert(
        stories, book, keys=48, save=folder / "small", contexts=2, length=256, calibration_contexts=2, calibration_length=256,
        cache=folder / "cache", progress=events.append,
    )  # fmt: skip
    return folder / "small", found, events, folder


def test_a_converted_model(converted, stories, book):
    folder, found, events, place = converted
    assert found.kind == "conversion" and events and events[-1]["done"] <= events[-1]["of"]
    heads = found["layers"] * found["kv_heads"]
    assert len(found["kinds"]) == heads and found["keys"] <= 48 and {kind["key_bits"] for kind in found["kinds"]} <= {16, 8, 4}
    assert [text["contexts"] for text in found["measured"]] == [2] and found["measured"][0]["kl"] > 0
    assert (folder / "conversion.json").is_file() and (folder / "index.html").is_file() and found["made_by"]["version"] == termwise.__version__
    model, original = termwise.load(folder), termwise.load(stories)
    texts = {str(variant) for layer in model.variants for variant in layer}
    assert any("window=" in text for text in texts)
    text = book.read_text()[:1500]
    ids = model.encode(text)[:300]
    assert abs(model.loss(ids) - original.loss(ids)) < 0.5 and model.loss(ids) != original.loss(ids)
    # Generated token by token from a state of constant size: each token has the largest logit.
    prompt = text[:600]
    written = model.generate(prompt, max_tokens=8)
    ids = model.encode(prompt)
    for _ in range(8):
        ids.append(int(model.logits(ids)[0, -1].argmax()))
    assert model.decode(ids) == model.decode(model.encode(prompt)) + written
    # Saved and read again.
    model.save(place / "again")
    assert np.array_equal(termwise.load(place / "again").logits(ids), model.logits(ids))


def test_functions_return_the_results_of_the_program(converted, stories, book):
    folder, _, _, place = converted
    shared = {"length": 256, "contexts": 2, "cache": place / "cache", "progress": False}
    checked = termwise.audit(folder, stories, book, **shared)
    passed = {check["name"]: check["passed"] for check in checked["checks"]}
    held = ("weights", "memory is the recorded one", "bytes are those of the record", "token by token", "memory is constant")
    assert checked.kind == "audit" and all(passed[name] for name in held), passed
    cutting = {"calibration_contexts": 2, "calibration_length": 256}
    seen = termwise.atlas(stories, [str(book)], cache=place / "cache", progress=False, **cutting)
    flags = ["--data", str(book), "--calibration-contexts", "2", "--calibration-length", "256", "--cache", str(place / "cache"), "--json", "--quiet"]
    printed = subprocess.run([sys.executable, "-m", "termwise", "atlas", str(stories), *flags], capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    theirs = json.loads(printed.stdout)
    assert theirs["heads"] == seen["heads"] and theirs["kind"] == seen.kind
    compared = termwise.frontier(stories, book, keys=64, methods=["window", "chosen"], **shared, **cutting)
    assert compared.kind == "frontier" and compared["finished"] and compared.figures()
    # The name of earlier builds is accepted.
    assert {point["method"] for point in compared["points"]} == {"window", "heavy hitters"}
    budget = 64 * compared["key_bytes"] * compared["kv_heads"]
    assert all(len(point["contexts"]) == 2 and 0.8 * budget < point["bytes"] <= budget for point in compared["points"])


def test_arguments_are_those_of_python_code(stories, book, tmp_path):
    """NumPy numbers, paths and data settings are accepted; messages contain no flags."""
    counts = {"calibration_contexts": np.int64(1), "calibration_length": np.int32(64)}
    seen = termwise.atlas(stories, (book,), removal=np.False_, cache=tmp_path, documents="blank-line", progress=False, **counts)
    assert seen["contexts"] == 1 and seen["length"] == 64
    with pytest.raises(ValueError, match="exactly one of bytes, keys and loss"):
        termwise.convert(stories, book, keys=48, bytes="1MB", progress=False)
    with pytest.raises(ValueError, match=r"did you mean `documents`\?"):
        termwise.atlas(stories, book, document="line", progress=False)
    with pytest.raises(ValueError, match="facts needs removal=True"):
        termwise.atlas(stories, book, facts=2, progress=False)
    with pytest.raises(ValueError, match="contexts must be at least 1"):
        termwise.frontier(stories, book, contexts=0, progress=False)
    with pytest.raises(ValueError, match="no text was given; name some with data"):
        termwise.atlas(stories, [], progress=False)


def test_invalid_arguments_of_commands_are_explained(stories, book, tmp_path):
    with pytest.raises(ValueError, match="keys"):
        termwise.convert(stories, book, progress=False)
    with pytest.raises(ValueError, match="nonsense"):
        termwise.atlas(stories, book, nonsense=3, progress=False)
    with pytest.raises(ValueError, match="keys 1 is too small"):
        termwise.frontier(stories, book, keys=1, progress=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.toml").write_text("mine")
    with pytest.raises((ValueError, RuntimeError), match="directory of a run"):
        termwise.convert(stories, book, keys=48, save=tmp_path / "run", overwrite=True, progress=False)
    assert (tmp_path / "run" / "settings.toml").read_text() == "mine"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        termwise.atlas(tmp_path / "nowhere", book, progress=False)

    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        termwise.atlas(stories, book, calibration_contexts=4, calibration_length=256, cache=tmp_path, progress=stop)
