"""``audit_cache`` passes the caches of Transformers and detects each injected class of fault."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, need

try:
    import torch
    import transformers
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer
except ImportError:
    need("torch", False, "PyTorch or transformers is not installed")

import termwise
from termwise import hf

LENGTH, WINDOW = 64, 24


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 61, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


def failed(audit):
    return [check.name for check in audit.checks if check.passed is False]


def cache_of(layer, model):
    """A cache with a layer of this class in every layer."""
    cache = DynamicCache(config=model.config)
    cache.layers = [layer() for _ in range(model.config.num_hidden_layers)]
    return cache


class Rounded(DynamicLayer):
    """Keys and values in 8 bits with a scale per vector, dequantized when they are read."""

    nbits = 8

    def update(self, key_states, value_states, *args, **kwargs):
        codes = [self._codes(x) for x in (key_states, value_states)]
        old = getattr(self, "codes", None)
        self.codes = codes if old is None else [tuple(torch.cat([a, b], -2) for a, b in zip(x, y)) for x, y in zip(old, codes)]
        self.is_initialized = True
        return tuple(code.to(key_states.dtype) * scale.to(key_states.dtype) for code, scale in self.codes)

    @staticmethod
    def _codes(x):
        scale = (x.abs().amax(-1, keepdim=True) / 127).half()
        return (x / scale).round().clamp(-127, 127).to(torch.int8), scale

    def get_seq_length(self):
        return self.codes[0][0].shape[-2] if hasattr(self, "codes") else 0

    def get_mask_sizes(self, query_length):
        if not isinstance(query_length, int):
            query_length = query_length.shape[0]
        return self.get_seq_length() + query_length, 0


class Unpacked(DynamicLayer):
    """Rounds to 8 bits, and stores the rounded values in float32."""

    nbits = 8

    def update(self, key_states, value_states, *args, **kwargs):
        rounded = [code.to(x.dtype) * scale.to(x.dtype) for x in (key_states, value_states) for code, scale in [Rounded._codes(x)]]
        return super().update(*rounded, *args, **kwargs)


class NoOp(DynamicLayer):
    """Claims 4 bits and stores values unchanged."""

    nbits = 4


class Short(DynamicLayer):
    """Reports the keys that remain after eviction instead of the tokens that were read."""

    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.keys, self.values = self.keys[..., -WINDOW:, :], self.values[..., -WINDOW:, :]
        return keys, values


class Hoarding(DynamicLayer):
    """Keeps a second copy of all keys in a buffer."""

    def update(self, key_states, value_states, *args, **kwargs):
        self.buffer = [*getattr(self, "buffer", []), key_states.clone(), value_states.clone()]
        return super().update(key_states, value_states, *args, **kwargs)


class Late(DynamicLayer):
    """Evicts at the end of the prompt: until then it has all keys."""

    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.tokens = getattr(self, "tokens", 0) + key_states.shape[-2]
        if self.tokens >= LENGTH:
            self.keys, self.values = self.keys[..., -WINDOW:, :].clone(), self.values[..., -WINDOW:, :].clone()
        return keys, values

    def get_seq_length(self):
        return getattr(self, "tokens", 0)


class Careless(DynamicLayer):
    """Stores the keys of each chunk in another order: single tokens are correct, chunks are not."""

    def update(self, key_states, value_states, *args, **kwargs):
        if key_states.shape[-2] > 1:
            key_states = key_states.roll(1, -2)
        return super().update(key_states, value_states, *args, **kwargs)


def test_healthy_caches_pass(model, ids):
    exact = hf.audit_cache(model, lambda: DynamicCache(config=model.config), ids, tokens=LENGTH, chunk=16)
    assert exact.passed and len(exact.bytes) == LENGTH // 16, str(exact)
    # Two layers, two KV heads of 32 values, keys and values in float32.
    assert exact.bytes[-1] == 2 * 2 * 2 * 32 * 4 * LENGTH and sum(exact.parts.values()) == exact.bytes[-1]
    rounded = hf.audit_cache(model, lambda: cache_of(Rounded, model), ids, tokens=LENGTH, chunk=16, budget=2 * 2 * 2 * 34 * LENGTH)
    assert rounded.passed and {check.name: check.passed for check in rounded.checks}["quantization"], str(rounded)


def test_states_of_termwise_pass(model, ids):
    with hf.using(model, "softmax window=8 sinks=2 bits=8"):
        found = hf.audit_cache(model, lambda: DynamicCache(config=model.config), ids, tokens=LENGTH, chunk=16)
    assert not failed(found), str(found)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (NoOp, "quantization"),
        (Unpacked, "quantization"),
        (Short, "reported length"),
        (Short, "positions"),
        (Hoarding, "budget"),
        (Careless, "chunks and single tokens"),
    ],
)
def test_faults_are_found(model, ids, layer, name):
    budget = 2 * 2 * 2 * 32 * 4 * LENGTH
    found = hf.audit_cache(model, lambda: cache_of(layer, model), ids, tokens=LENGTH, chunk=16, budget=budget)
    assert name in failed(found), str(found)
    assert "FAILED" in str(found)


def test_a_budget_that_is_exceeded_during_the_prompt_is_found(model, ids):
    budget = 2 * 2 * 2 * 32 * 4 * WINDOW
    found = hf.audit_cache(model, lambda: cache_of(Late, model), ids, tokens=LENGTH, chunk=16, budget=budget)
    assert found.bytes[-1] <= budget < max(found.bytes)
    assert failed(found) == ["budget"], str(found)


def test_bad_arguments_are_refused(model, ids):
    make = lambda: DynamicCache(config=model.config)  # noqa: E731
    with pytest.raises(ValueError, match="without a tokenizer"):
        hf.audit_cache(model, make, "a text")
    with pytest.raises(ValueError, match="at least 4 tokens"):
        hf.audit_cache(model, make, ids[:2])
    assert issubclass(termwise.InputError, ValueError)


def test_bench_kvpress_imports_the_package_and_not_itself(tmp_path):
    """`python bench/kvpress.py` puts its folder first on the path, and the file has the name of the package."""
    (tmp_path / "kvpress.py").write_text("def SnapKVPress(compression_ratio):\n    return compression_ratio\n")
    script = ROOT / "bench" / "kvpress.py"
    code = f"import runpy; [(_, make, _)] = runpy.run_path({str(script)!r})['presses'](['SnapKV']); print(make(0.25))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), str(tmp_path)])}
    found = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "0.25"
