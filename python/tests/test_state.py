"""Decoding with states against full-sequence calls."""

import copy
import pickle

import numpy as np
import pytest
from conftest import inputs, rms

from termwise import Layer


@pytest.mark.parametrize("text", ["softmax", "taylor=0..2", "taylor=0..2 decay=softplus out conv=3", "softmax window=4 sinks=1", "norm"])
def test_steps_files_and_rows(text, tmp_path):
    layer = Layer(text, heads=4, kv_heads=2, dim=6, value_dim=5, rope=100.0)
    q, k, v, extras = inputs(layer, batch=3, time=20)

    def part(start, stop, rows=slice(None)):
        chosen = {e.name: extras[e.name][rows, start:stop] if e.logits else extras[e.name] for e in layer.extras}
        return (q[rows, start:stop], k[rows, start:stop], v[rows, start:stop]), chosen

    expected = layer(q, k, v, **extras)
    state = layer.state(3)
    x, more = part(0, 12)
    ys = [state.extend(*x, **more)]
    for t in range(12, 16):
        x, more = part(t, t + 1)
        ys.append(state.step(*x, **more))
    assert state.positions == [16] * 3 and state.is_constant == text.startswith(("taylor", "softmax window"))
    assert rms(np.concatenate(ys, 1), expected[:, :16]) < 1e-5
    state.save(tmp_path / "state.safetensors")
    loaded = layer.load_state(tmp_path / "state.safetensors", 3)
    chosen = state.select([2, 0, 2])
    x, more = part(16, 20)
    rest = state.extend(*x, **more)
    assert rms(rest, expected[:, 16:]) < 1e-5
    assert np.array_equal(loaded.extend(*x, **more), rest)
    x, more = part(16, 20, [2, 0, 2])
    assert np.array_equal(chosen.extend(*x, **more), rest[[2, 0, 2]])
    state.clear()
    assert state.positions == [0] * 3


def test_compressed():
    softmax, series = Layer("softmax", heads=2, dim=4), Layer("taylor=0..8", heads=2, dim=4)
    q, k, v, _ = inputs(softmax, batch=1, time=30)
    q *= 0.3
    cache = softmax.state()
    cache.extend(q[:, :29], k[:, :29], v[:, :29])
    state = cache.compress(series)
    last = [x[:, 29:] for x in (q, k, v)]
    assert rms(state.step(*last), cache.step(*last)) < 1e-2
    assert state.is_constant and not cache.is_constant
    with pytest.raises(ValueError, match="no finite feature map"):
        cache.compress(Layer("taylor=0..8 cap=5", heads=2, dim=4))


def test_a_state_with_other_rotary_frequencies_is_rejected(tmp_path):
    layers = [Layer("softmax", heads=2, dim=4, rope=theta) for theta in (10000.0, 500000.0)]
    q, k, v, _ = inputs(layers[0], batch=1, time=5)
    state = layers[0].state()
    state.extend(q, k, v)
    state.save(tmp_path / "state.safetensors")
    assert layers[0].load_state(tmp_path / "state.safetensors").positions == [5]
    with pytest.raises(ValueError, match="rotary frequency 1 of layer 0 is 0.01"):
        layers[1].load_state(tmp_path / "state.safetensors")


def test_invalid_arguments_are_explained(tmp_path):
    layer = Layer("taylor=0..2", heads=2, dim=4)
    state, x = layer.state(2), np.ones((2, 1, 2, 4), np.float32)
    with pytest.raises(ValueError, match="no batch row 2"):
        state.select([2])
    with pytest.raises(ValueError, match="one position"):
        state.step(*[np.ones((2, 2, 2, 4), np.float32)] * 3)
    with pytest.raises(TypeError, match="float32"):
        state.step(*[x.astype(np.float64)] * 3)
    with pytest.raises(ValueError, match="q has 1 batch rows, expected 2 as in the state"):
        state.step(x[:1], x[:1], x[:1])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        layer.load_state(tmp_path / "nowhere")
    state.save(tmp_path / "state")
    with pytest.raises(ValueError, match="taylor=0..4"):
        Layer("taylor=0..4", heads=2, dim=4).load_state(tmp_path / "state", 2)
    assert state.positions == [0, 0]


@pytest.mark.parametrize("cache", [False, True])
def test_layers_and_states_are_copied_and_pickled(cache):
    layer = Layer(["taylor=0..2", "softmax"], heads=2, dim=4, rope=100.0)
    q, k, v, _ = inputs(layer, batch=2, time=9)
    state = layer.state(2, cache=cache)
    state.extend(q[:, :8], k[:, :8], v[:, :8])
    others = [pickle.loads(pickle.dumps(state)), copy.deepcopy(state), copy.copy(state)]
    last = [x[:, 8:] for x in (q, k, v)]
    expected = state.step(*last)
    for other in others:
        assert other.positions == [8, 8] and repr(other.layer) == repr(layer)
        assert np.array_equal(other.step(*last), expected)
    again = pickle.loads(pickle.dumps(layer))
    assert repr(again) == repr(layer) and np.array_equal(again(q, k, v), layer(q, k, v))


def test_unsupported_compression_raises():
    """Whatever goes wrong, ``except Exception`` catches it."""
    state = Layer("softmax", heads=2, dim=4).state()
    for text in ["taylor=0..2 cap=5", "taylor=0..2 clamp=3", "softmax", "norm", "taylor=0..2 window=4"]:
        layer = Layer(text, heads=2, dim=4)
        try:
            state.compress(layer)
        except Exception as error:
            assert isinstance(error, (ValueError, RuntimeError))
