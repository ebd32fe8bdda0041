"""Transformers models with tiny random configurations."""

import copy
import gc
import io
import json
import os
import pickle
import subprocess
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
from conftest import ROOT, need, rms

try:
    import torch
    import transformers
    import safetensors.torch
    from safetensors.torch import load_file
except ImportError:
    torch = None
    need("torch", False, "PyTorch or transformers is not installed")

import termwise
import termwise.hf
from termwise import hf

SMALL = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 128,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS = {
    "gpt2": {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "attn_pdrop": 0.0},
    "gpt_neox": {**SMALL, "rotary_pct": 0.5},
    "opt": {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 128,
            "word_embed_proj_dim": 32, "attention_dropout": 0.0},
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 16},
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "gemma": GROUPED,
    "gemma2": {**GROUPED, "sliding_window": 16, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 0.5},
    "gemma3_text": {**GROUPED, "sliding_window": 16},
    "phi": SMALL,
    "phi3": {**GROUPED, "pad_token_id": 0},
    "olmo2": GROUPED,
    "gpt_oss": {**GROUPED, "sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip

FAMILIES = [
    "llama3-rope", "llama-yarn", "mistral-window", "qwen2", "qwen2-window", "qwen3", "smollm3", "olmo2", "phi3", "gemma2", "gemma3", "pythia", "stablelm",
]  # fmt: skip


def made(kind, **changes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**CONFIGS[kind], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def ids():
    return torch.randint(3, 100, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_architecture(kind, ids):
    model = made(kind)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        hf.use(model, None)
        assert rms(model(input_ids=ids, use_cache=False).logits, expected) < 1e-5
    found = hf.spectrum(model, ids[0], max_order=8)
    assert found.to_numpy("layers.heads.scores.max").shape == (2, 4)
    assert found["model"]["parameters"] == sum(p.numel() for p in model.parameters())
    losses = hf.truncate(model, ids[0], orders=(0, 30))
    assert abs(losses[30] - losses[None]) < 1e-3 and losses[0] != losses[None]
    # The previous attention implementation is restored.
    with torch.no_grad():
        assert rms(model(input_ids=ids, use_cache=False).logits, expected) < 1e-5


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_architecture_generates_with_our_states(kind, ids):
    """Texts longer than the window, padding and beam search."""
    model = made(kind)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    padded = ids.masked_fill(mask == 0, 0)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = [model.generate(padded, **options, **more) for more in ({}, {"num_beams": 3})]
    hf.use(model, None)
    found = [model.generate(padded, **options, **more) for more in ({}, {"num_beams": 3})]
    assert all(isinstance(layer, hf.StateLayer) and layer.get_seq_length() == 51 for layer in found[0].past_key_values.layers)
    for a, b in zip(found, expected):
        assert torch.equal(a.sequences, b.sequences)
    assert rms(torch.stack(found[0].logits), torch.stack(expected[0].logits)) < 1e-5
    # The text grows beyond the window.
    short = ids[1:, :6]
    begun = model.generate(short, max_new_tokens=30, do_sample=False)
    # After restore, the model generates as before.
    model.set_attn_implementation("eager")
    assert torch.equal(model.generate(padded, **options).sequences, expected[0].sequences)
    assert torch.equal(model.generate(short, max_new_tokens=30, do_sample=False), begun)


@pytest.mark.parametrize("text", ["taylor=0..2", "softmax window=8 sinks=2", "softmax window=6 far(taylor=0..2)", "exp decay=fixed"])
def test_states_of_variants_that_took_over(text, ids):
    """Equal to generation without a cache; recurrent states have constant size."""
    model = hf.use(made("llama"), text)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    for more in ({}, {"num_beams": 3}):
        with_states, without = (model.generate(ids, use_cache=use, **options, **more) for use in (True, False))
        assert torch.equal(with_states.sequences, without.sequences)
    assert with_states.past_key_values.layers[0].state.is_constant == ("taylor" in text or "window" in text)
    # With gradients, keys are stored instead of states.
    gradients = []
    for use in (True, False):
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=use).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(rms(a, b) < 1e-5 for a, b in zip(*gradients, strict=True))
    with torch.no_grad(), pytest.raises(ValueError, match="cannot remove its last 1 positions"):
        with_states.past_key_values.crop(-1)


def test_a_spectrum_is_the_native_one(stories):
    native = termwise.load(stories)
    model = transformers.AutoModelForCausalLM.from_pretrained(stories).eval()
    tokens = native.encode("Once upon a time, there was a little girl who liked to play in the park. " * 6)
    ours = hf.spectrum(model, tokens, length=64, max_order=8)
    text = np.asarray(tokens)
    theirs = native.spectrum(text=native.decode(text), length=64, max_order=8, progress=False)
    if native.encode(native.decode(text)) != tokens:
        pytest.fail("the text does not become the same tokens again")
    for path in ("layers.heads.scores.mean", "layers.heads.scores.sd", "layers.heads.entropy.nats", "layers.heads.cut.error"):
        assert rms(ours.to_numpy(path), theirs.to_numpy(path)) < 1e-6, path
    # Powers of scores up to the eighth multiply rounding errors of float32 by eight.
    assert rms(ours.to_numpy("layers.heads.cut.share"), theirs.to_numpy("layers.heads.cut.share")) < 1e-5
    assert ours.to_numpy("layers.heads.terms.all.dominant").tolist() == theirs.to_numpy("layers.heads.terms.all.dominant").tolist()


@pytest.mark.parametrize("change", [{"length": 0}, {"length": -1}, {"tokens": 0}, {"tokens": -3}, {"queries": -1}, {"max_order": -1}, {"seed": -1}])
def test_sizes_are_checked(change, ids):
    model = made("llama")
    with pytest.raises(ValueError, match=f"found {next(iter(change.values()))}"):
        hf.spectrum(model, ids[0], **change)
    if change.keys() & {"length", "tokens"}:
        with pytest.raises(ValueError, match="must be at least 1"):
            hf.truncate(model, ids[0], **change)
    assert model.config._attn_implementation == "eager"


def test_variants_take_over(ids):
    model = made("llama")
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        hf.use(model, "softmax window=8 sinks=2")
        near = model(input_ids=ids, use_cache=False).logits
        assert rms(near[:, :8], plain[:, :8]) < 1e-5 and rms(near[:, 20:], plain[:, 20:]) > 1e-4
        # Equal to an explicit mask in PyTorch.
        t, s = torch.arange(40)[:, None], torch.arange(40)[None]
        seen = (s <= t) & ((t - s < 8) | (s < 2))
        model.set_attn_implementation("sdpa")
        masked = model(input_ids=ids, attention_mask=seen[None, None].expand(2, 1, -1, -1), use_cache=False).logits
        assert rms(near, masked) < 1e-5
        hf.use(model, {1: ["softmax", "taylor=0..2", "taylor=0..30", "softmax"]})
        mixed = model(input_ids=ids, use_cache=False).logits
        assert rms(mixed, plain) > 1e-5
        hf.use(model, {1: ["softmax", "softmax", "taylor=0..30", "softmax"]})
        assert rms(model(input_ids=ids, use_cache=False).logits, plain) < 1e-5
    with pytest.raises(ValueError, match="no weights for them"):
        hf.use(model, "softmax out")
    with pytest.raises(ValueError, match="no layer 7"):
        hf.use(model, {7: "softmax"})


def test_padding_caches_and_beams(ids):
    model = made("llama")
    model.generation_config.pad_token_id = 0
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    padded = ids.masked_fill(mask == 0, 0)
    with torch.no_grad():
        expected = model(input_ids=padded, attention_mask=mask).logits
    options = {"max_new_tokens": 10, "do_sample": False}
    texts = [model.generate(padded, attention_mask=mask, **options, **more) for more in ({}, {"num_beams": 3}, {"use_cache": False})]
    hf.use(model, "softmax")
    with torch.no_grad():
        assert rms(model(input_ids=padded, attention_mask=mask).logits[mask.bool()], expected[mask.bool()]) < 1e-5
    for more, text in zip(({}, {"num_beams": 3}, {"use_cache": False}), texts):
        assert torch.equal(model.generate(padded, attention_mask=mask, **options, **more), text)
    holes = mask.clone()
    holes[1, 5] = 0
    with pytest.raises(ValueError, match="holes"):
        model(input_ids=ids, attention_mask=holes)


def test_training(ids):
    def gradients(model):
        model.train()
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.item(), [p.grad.clone() for p in model.parameters()]

    model = made("llama")
    expected = gradients(model)
    found = gradients(hf.use(model, "softmax"))
    assert abs(found[0] - expected[0]) < 1e-5
    for a, b in zip(found[1], expected[1], strict=True):
        assert rms(a, b) < 1e-4
    losses = []
    hf.use(model, "taylor=0..2 norm=l2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(10):
        losses.append(gradients(model)[0])
        optimizer.step()
    assert losses[-1] < losses[0]
    dropping = made("llama", attention_dropout=0.1)
    with pytest.raises(ValueError, match="dropout"):
        gradients(hf.use(dropping, "softmax"))


@pytest.mark.parametrize("text", ["softmax window=8 sinks=2 chosen=6", "softmax window=8 chosen=6,fade=16"])
def test_chosen_keys_take_over(text, ids):
    """Generation with states of constant size equals generation without them. Eviction is inference-only."""
    model = hf.use(made("llama"), text)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    for more in ({}, {"num_beams": 3}):
        with_states, without = (model.generate(ids, use_cache=use, **options, **more) for use in (True, False))
        assert torch.equal(with_states.sequences, without.sequences)
    assert with_states.past_key_values.layers[0].state.is_constant
    with pytest.raises(ValueError, match="`chosen` is inference-only"):
        model(input_ids=ids, labels=ids, use_cache=False)
    # Quantized caches need no weights.
    with torch.no_grad():
        assert hf.use(model, "softmax window=8 bits=8")(input_ids=ids, use_cache=False).logits.isfinite().all()


@pytest.fixture(scope="module")
def converted(stories, book, tmp_path_factory):
    """The folder of a model written by ``termwise convert``, and token ids of a text."""
    folder = tmp_path_factory.mktemp("converted")
    cutting = {"length": 256, "contexts": 1, "calibration_contexts": 2, "calibration_length": 256, "cache": folder, "progress": False}
    termwise.convert(stories, book, keys=48, save=folder / "small", **cutting)
    native = termwise.load(folder / "small")
    # Kinds with different bits for keys and values read `bits=8,4`.
    stored = [word.removeprefix("bits=") for layer in native.variants for variant in layer for word in str(variant).split() if word.startswith("bits=")]
    assert {bits for word in stored for bits in word.split(",")} == {"16", "8", "4"}, stored
    return folder / "small", np.array([native.encode(book.read_text()[:2000])[:200]])


def with_noise(model, scale):
    """Add noise relative to the largest coordinate to the q, k and v of a model; ``scale[0]`` can be changed later."""
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:

        def project(x, own=layer.self_attn._project):
            return [t + scale[0] * t.abs().amax(-1, keepdim=True) * torch.randn(t.shape, generator=generator) for t in own(x)]

        layer.self_attn._project = project
    return model


def test_converted_models_have_the_native_logits(converted):
    """Up to rounding of stored keys and values: noise of 3e-7 in k moves some of them to the neighboring 16-, 8- or 4-bit code, which changes logits by up to 3e-3."""
    folder, ids = converted
    native, scale = termwise.load(folder), [0.0]
    model = with_noise(transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), scale)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids), use_cache=False).logits
        assert torch.equal(model(input_ids=torch.tensor(ids), use_cache=True).logits, logits)
        # Sinks are stored in 16 bits, later keys in 8 and 4. In some of the rows every code is that of the native model.
        scale[0] = 3e-7
        short = model(input_ids=torch.tensor(ids[:, :12]).expand(128, -1), use_cache=False).logits
        expected = native.logits(ids[:, :12])[0]
        errors = [rms(row, expected) for row in short]
        assert min(errors) < 2e-6 and max(errors) > 4e-5, (min(errors), max(errors))
        # The whole text, longer than windows: no further from the native logits than noise moves them.
        noisy = model(input_ids=torch.tensor(ids).expand(8, -1), use_cache=False).logits
    assert rms(logits, native.logits(ids)) < 2 * max(rms(row, logits[0]) for row in noisy)


def test_equal_keys_have_equal_codes(converted):
    """The cache in Transformers and a native state store the same bytes for the same q, k and v."""
    folder, ids = converted
    model, projected = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), {}
    for index, layer in enumerate(model.model.layers):

        def project(x, index=index, own=layer.self_attn._project):
            projected[index] = own(x)
            return projected[index]

        layer.self_attn._project = project
    with torch.no_grad():
        cache = model(input_ids=torch.tensor(ids), use_cache=True).past_key_values
    layers = [termwise.Layer._of((folder / "config.json").read_text(), index) for index in range(len(projected))]
    for index, layer in enumerate(layers):
        state = layer.state()
        for t in range(ids.shape[1]):
            state.step(*(x[:, t : t + 1].numpy() for x in projected[index]))
        step, whole = (stored_codes(one) for one in (state, cache.layers[index].state))
        assert step.keys() == whole.keys() and len(step) > 0
        assert all(np.array_equal(step[name], whole[name]) for name in step)


def stored_codes(state):
    """The quantized keys, values and scales of a state."""
    tensors = safetensors.torch.load(state._core.to_bytes())
    return {name: x.view(torch.uint8).numpy() for name, x in tensors.items() if ".codes." in name}


def test_converted_models_load(converted, tmp_path):
    """Generation token by token, and saving again."""
    folder, ids = converted
    native, model = termwise.load(folder), transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    found = model.generate(torch.tensor(ids), max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    expected = ids[0].tolist()
    for _ in range(12):
        expected.append(int(native.logits(expected)[0, -1].argmax()))
    assert found.sequences[0].tolist() == expected
    assert all(layer.state.is_constant for layer in found.past_key_values.layers)
    # Saved by Transformers and loaded by both.
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(*(m(input_ids=torch.tensor(ids), use_cache=False).logits for m in (model, again)))
    assert np.array_equal(termwise.load(tmp_path / "again").logits(ids), native.logits(ids))


@pytest.fixture(scope="module", params=["taylor=0..2 out conv=3 norm=rms", "norm conv=3 decay=softplus", "softmax window=8 in post=silu,channel"])
def saved(request, tmp_path_factory):
    """A termwise model after a few training steps, loaded natively and in Transformers."""
    folder = tmp_path_factory.mktemp("run")
    run = termwise.train(folder / "run", model="tiny", attention=request.param, steps=3, progress=False)
    checkpoint = run["checkpoint"]
    return termwise.load(checkpoint), transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()


def test_saved_models_have_the_native_logits(saved):
    native, model = saved
    assert isinstance(model.model.layers[0].self_attn, hf.TermwiseAttention)
    ids = np.random.default_rng(0).integers(3, native.config["vocab_size"], (2, 30))
    with torch.no_grad():
        assert rms(model(input_ids=torch.tensor(ids), use_cache=False).logits, native.logits(ids)) < 1e-5
        assert rms(model(input_ids=torch.tensor(ids), use_cache=True).logits, native.logits(ids)) < 1e-5


def test_saved_models_generate_with_states(saved):
    native, model = saved
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    ids = np.random.default_rng(1).integers(3, native.config["vocab_size"], (1, 12)).tolist()
    expected = list(ids[0])
    for _ in range(12):
        expected.append(int(native.logits(expected)[0, -1].argmax()))
    options = {"max_new_tokens": 12, "do_sample": False}
    found = model.generate(torch.tensor(ids), **options)
    assert found[0].tolist() == expected
    # Left padding next to a longer text.
    longer = np.random.default_rng(2).integers(3, native.config["vocab_size"], 20).tolist()
    both, mask = torch.tensor([[0] * 8 + ids[0], longer]), torch.ones(2, 20, dtype=torch.long)
    mask[0, :8] = 0
    assert model.generate(both, attention_mask=mask, **options)[0, 8:].tolist() == expected
    # Beam search with and without states.
    beams = [model.generate(torch.tensor(ids), num_beams=4, use_cache=use, **options) for use in (True, False)]
    assert torch.equal(*beams)


@pytest.mark.parametrize("text", ["taylor=0..2", "softmax window=8 sinks=2 cap=20", "norm decay=fixed", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_models_of_every_family(family, text, families, tmp_path):
    """A variant replaces the attention of each family; termwise writes the model, Transformers reads it."""
    native = termwise.load(families / family)
    if text is not None:
        native = native.with_attention(text)
    native.save(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    attentions = [module for module in model.modules() if isinstance(module, hf.TermwiseAttention)]
    assert len(attentions) == (0 if text is None else model.config.num_hidden_layers)
    ids = np.random.default_rng(0).integers(3, native.config["vocab_size"], (2, 30))
    with torch.no_grad():
        assert rms(model(input_ids=torch.tensor(ids), use_cache=False).logits, native.logits(ids)) < 1e-5
        if text is None:
            expected = load_file(families / family / "expected.safetensors")
            assert rms(model(input_ids=expected["ids"], use_cache=False).logits, expected["logits"].numpy()) < 1e-4
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    found = model.generate(torch.tensor(ids[:1, :12]), max_new_tokens=8, do_sample=False)[0].tolist()
    expected = ids[0, :12].tolist()
    for _ in range(8):
        expected.append(int(native.logits(expected)[0, -1].argmax()))
    assert found == expected


def test_norms_of_q_and_k_are_the_variants_own(families, tmp_path):
    """QK norms are kept if the variant names them, with the family's weights; for Gemma, weights minus one."""
    for family in ("qwen3", "gemma3", "olmo2"):
        native = termwise.load(families / family)
        norm = "qk_norm=rms,all" if family == "olmo2" else "qk_norm=rms"
        native = native.with_attention(f"taylor=0..4 {norm}")
        native.save(tmp_path / family)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / family).eval()
        ids = np.random.default_rng(0).integers(3, native.config["vocab_size"], (1, 20))
        with torch.no_grad():
            assert rms(model(input_ids=torch.tensor(ids), use_cache=False).logits, native.logits(ids)) < 1e-5


def test_saved_models_train(saved):
    _, model = saved
    ids = torch.randint(3, 30, (2, 20))
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    expected = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    # With a cache, the default in Transformers: equal gradients, and a cache that cannot be continued.
    model.zero_grad()
    found = model(input_ids=ids, labels=ids)
    found.loss.backward()
    assert all(rms(p.grad, other) < 1e-5 for p, other in zip((p for p in model.parameters() if p.requires_grad), expected, strict=True))
    assert found.past_key_values.get_seq_length() == 20
    with torch.no_grad(), pytest.raises(ValueError, match="filled while gradients were computed"):
        model(input_ids=ids[:, :1], past_key_values=found.past_key_values)
    with torch.no_grad():
        cache = model(input_ids=ids).past_key_values
    with pytest.raises(ValueError, match="a state has no gradients"):
        model(input_ids=ids[:, :1], past_key_values=cache)
    model.zero_grad()


OUTSIDE = {
    "falcon": {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False},
    "gptj": {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 128},
    "bloom": {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"vocab_size": 100, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
}  # fmt: skip


@pytest.mark.parametrize("kind", OUTSIDE)
def test_models_beyond_the_interface_are_refused(kind, ids):
    """Unsupported models are rejected and remain unchanged."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **OUTSIDE[kind])).eval()
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    for call in (lambda: hf.use(model, "taylor=0..2"), lambda: hf.use(model, None), lambda: hf.truncate(model, ids[0]), lambda: hf.spectrum(model, ids[0])):
        with pytest.raises(ValueError, match="2 of 2 layers .*Attention|no attention with a layer_idx"):
            call()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)


def test_a_layer_that_does_not_use_the_interface_is_found(ids):
    model = made("llama")

    class Other(torch.nn.Module):
        layer_idx = 1

        def forward(self, hidden_states, **_):
            return hidden_states, None

    class OtherAttention(Other):
        pass

    model.model.layers[1].self_attn = OtherAttention()
    for call in (lambda: hf.use(model, "softmax"), lambda: hf.truncate(model, ids[0]), lambda: hf.spectrum(model, ids[0])):
        with pytest.raises(ValueError, match=r"1 of 2 layers of this LlamaForCausalLM \(OtherAttention\)"):
            call()
        assert model.config._attn_implementation == "eager" and not model.model.layers[0].self_attn._forward_pre_hooks


def test_models_with_variants_of_their_own_are_refused(saved, ids):
    _, model = saved
    for call in (lambda: hf.use(model, "softmax"), lambda: hf.truncate(model, ids[0]), lambda: hf.spectrum(model, ids[0])):
        with pytest.raises(ValueError, match="variants of its own"):
            call()


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("prompt", [40, 16, 6])
def test_static_caches_are_exact(kind, prompt, ids):
    """Prompts below, at and beyond the window, with padding. Unused cache slots are not attended to."""
    mask = torch.ones(2, prompt, dtype=torch.long)
    mask[0, :3] = 0
    options = {"max_new_tokens": 14, "do_sample": False, "attention_mask": mask}
    ids = ids[:, :prompt]
    model = made(kind)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)
    set_alone = copy.deepcopy(model)
    set_alone.set_attn_implementation("termwise")
    for one in (hf.use(model, None), set_alone):
        for more in ({}, {"cache_implementation": "static"}):
            assert torch.equal(one.generate(ids, **options, **more), expected)
    # With a variant the static cache and the states agree, unless the cache has dropped keys that the variant reads.
    hf.use(model, "taylor=0..2 window=5 sinks=1")
    expected = model.generate(ids, **options)
    if kind == "llama":
        assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)
    else:
        with pytest.raises(ValueError, match="dropped keys before the window"):
            model.generate(ids, cache_implementation="static", **options)


def test_a_text_beyond_a_static_cache_is_refused(ids):
    model = hf.use(made("llama"), None)
    cache = transformers.StaticCache(config=model.config, max_cache_len=8)
    with pytest.raises(ValueError, match="room for 8 positions, and the text has 12: use a larger cache"), torch.no_grad():
        model(input_ids=ids[:1, :12], past_key_values=cache)


def test_models_of_termwise_refuse_static_caches(saved, ids):
    _, model = saved
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    with pytest.raises(ValueError, match="StaticCache cannot store states"):
        model.generate(3 + ids % 27, max_new_tokens=4, do_sample=False, cache_implementation="static")


@pytest.mark.parametrize("text", [None, "taylor=0..2", "softmax window=6 sinks=2"])
def test_packed_texts_are_separate(text, ids):
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((20, 20), (7, 1, 32))])
    model = hf.use(made("mistral"), text)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        for row, bounds in ((0, (0, 20, 40)), (1, (0, 7, 8, 40))):
            for begin, end in zip(bounds, bounds[1:]):
                alone = model(input_ids=ids[row : row + 1, begin:end], use_cache=False).logits
                assert rms(packed[row : row + 1, begin:end], alone) < 1e-5
        # As returned by the collator for flash attention.
        one = {"input_ids": ids[1:], "position_ids": positions[1:], "use_cache": False}
        assert rms(model(**one, cu_seq_lens_q=torch.tensor([0, 7, 8, 40])).logits, packed[1:]) < 1e-5
        for wrong in ({"cu_seq_lens_q": torch.tensor([0, 20, 40])}, {"cu_seq_lens_q": torch.tensor([0, 7, 8, 40]), "position_ids": None}):
            with pytest.raises(ValueError, match="cu_seq_lens_q has the boundaries"):
                model(**{**one, **wrong})
        plain = model(input_ids=ids, use_cache=False).logits
        assert rms(packed, plain) > 1e-3
        assert rms(model(input_ids=ids, position_ids=torch.arange(40)[None] + 7, use_cache=False).logits, plain) < 1e-4
    gradients = []
    for own in ({"input_ids": ids[:1], "position_ids": positions[:1]}, {"input_ids": ids[:1].reshape(2, 20)}):
        model.zero_grad()
        logits = model(**own, use_cache=False).logits.reshape(1, 40, -1)
        (logits * torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert rms(*gradients) < 1e-5


def test_packed_texts_in_models_of_termwise(saved, ids):
    """Gates, decays and convolutions restart at each text."""
    own, few = saved[1], 3 + ids % 27
    positions = torch.cat([torch.arange(25), torch.arange(15)])[None].expand(2, -1)
    with torch.no_grad():
        expected = torch.cat([own(input_ids=x, use_cache=False).logits for x in (few[:, :25], few[:, 25:])], 1)
        assert rms(own(input_ids=few, position_ids=positions, use_cache=False).logits, expected) < 1e-5
        plain = own(input_ids=few, use_cache=False).logits
        assert rms(expected, plain) > 1e-4
        assert rms(own(input_ids=few, position_ids=torch.arange(40)[None] + 7, use_cache=False).logits, plain) < 1e-5
        # Transformers does not separate texts if there is a cache or a mask; positions that jump are refused then.
        mask = torch.ones_like(ids)
        for more in ({"position_ids": positions}, {"position_ids": positions, "attention_mask": mask}, {"position_ids": 2 * torch.arange(40)[None], "attention_mask": mask}):
            with pytest.raises(ValueError, match="must grow by one within a text"):
                own(input_ids=few, **more)
        with pytest.raises(ValueError, match="cu_seq_lens_q has the boundaries"):
            own(input_ids=few, cu_seq_lens_q=torch.tensor([0, 20, 40]), use_cache=False)


def test_masks_are_read_exactly_or_refused():
    """Masks equal those of sdpa, for mask functions of Transformers and for others."""
    from transformers.masking_utils import chunked_causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

    def dense(mask, queries):
        texts, window = mask[:, 0, 0], int(mask[0, 0, 1, 0]) or mask.shape[3]
        t = torch.arange(mask.shape[3])
        seen = (texts[:, :, None] == texts[:, None]) & (t <= t[:, None]) & (t > t[:, None] - window) & (texts[:, None] > 0)
        return seen[:, -queries:]

    chunks = chunked_causal_mask_function(16, torch.zeros(2, dtype=torch.long))
    padding = torch.ones(2, 37, dtype=torch.bool)
    padding[0, :5] = False
    for own in (
        {"q_length": 37, "mask_function": sliding_window_causal_mask_function(9), "local_size": 9},
        {"q_length": 37, "mask_function": sliding_window_causal_mask_function(9), "local_size": 9, "attention_mask": padding},
        {"q_length": 4, "q_offset": 33, "mask_function": sliding_window_causal_mask_function(9), "local_size": 9},
        {"q_length": 37, "mask_function": chunks, "local_size": 16},
        {"q_length": 37, "attention_mask": padding},
    ):
        found = hf._mask(2, kv_length=37, **own)
        expected = sdpa_mask(2, kv_length=37, allow_is_causal_skip=False, **own)[:, 0]
        rows = own.get("attention_mask", torch.ones(2, 37, dtype=torch.bool))[:, -own["q_length"] :]
        assert torch.equal(dense(found, own["q_length"])[rows], expected[rows])
    assert hf._mask(2, 16, 16, mask_function=chunks) is None and hf._mask(2, 40, 40) is None
    assert hf._mask(2, 3, 3, mask_function=sliding_window_causal_mask_function(9), local_size=9)[0, 0, 1, 0] == 9
    for own in (
        # A chunk that continues a text.
        {"q_length": 1, "kv_length": 18, "q_offset": 17, "mask_function": chunks},
        # A key that a later position does not see.
        {"q_length": 20, "kv_length": 20, "mask_function": lambda b, h, q, k: (k <= q) & ~((q == 12) & (k == 3))},
        {"q_length": 20, "kv_length": 20, "mask_function": lambda b, h, q, k: (k <= q) | (k < 4)},
        {"q_length": 20, "kv_length": 20, "mask_function": sliding_window_causal_mask_function(9)},
        {"q_length": 20, "kv_length": 20, "mask_function": sliding_window_causal_mask_function(9), "local_size": 8},
    ):
        with pytest.raises(ValueError, match="needs another mask"):
            hf._mask(2, **own)
    with pytest.raises(ValueError, match="room for 16 positions, and the text has 17"):
        hf._mask(2, 1, 16, q_offset=16)
    with pytest.raises(ValueError, match="attention_mask has 5 columns, and the text has 4 positions"):
        hf._mask(2, 4, 5, attention_mask=torch.ones(2, 5))


def test_a_variant_is_recorded_in_saved_models(ids, tmp_path):
    model = made("llama")
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
    hf.use(model, {0: "softmax window=4", 1: "taylor=0..2"})
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        text = model.generate(ids[:, :8], max_new_tokens=6, do_sample=False)
    assert rms(expected, plain) > 1e-3
    for one, name in ((model, "first"), (copy.deepcopy(model), "copied")):
        one.save_pretrained(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["attn_implementation"] == "termwise" and [len(layer) for layer in config["termwise_attention"]] == [1, 1]
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        with torch.no_grad():
            assert rms(loaded(input_ids=ids, use_cache=False).logits, expected) < 1e-6
            assert torch.equal(loaded.generate(ids[:, :8], max_new_tokens=6, do_sample=False), text)
        # Saved again, the record is still there.
        loaded.save_pretrained(tmp_path / f"{name} again")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{name} again").eval()
        with torch.no_grad():
            assert rms(again(input_ids=ids, use_cache=False).logits, expected) < 1e-6
    hf.restore(model).save_pretrained(tmp_path / "plain")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert not {"attn_implementation", "termwise_attention"} & set(json.loads((tmp_path / "plain" / "config.json").read_text()))
    with torch.no_grad():
        assert rms(model(input_ids=ids, use_cache=False).logits, plain) < 1e-6
        assert rms(loaded(input_ids=ids, use_cache=False).logits, plain) < 1e-5


def test_a_recorded_variant_does_not_load_without_termwise(tmp_path):
    hf.use(made("llama"), "taylor=0..2").save_pretrained(tmp_path / "model")
    code = "import sys, transformers\ntransformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model")], capture_output=True, text=True)
    assert found.returncode != 0 and "termwise" in found.stderr


def test_using_leaves_the_model_as_it_was(ids):
    model = made("llama")
    hooks = [dict(layer.self_attn._forward_pre_hooks) for layer in model.model.layers]
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        with hf.using(model, "taylor=0..2") as same:
            assert same is model
            cut = model(input_ids=ids, use_cache=False).logits
            with hf.using(model, "softmax window=4"):
                assert rms(model(input_ids=ids, use_cache=False).logits, cut) > 1e-3
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, cut)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)
        with pytest.raises(RuntimeError, match="on the way"), hf.using(model, "taylor=0..2"):
            raise RuntimeError("on the way")
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)
    assert model.config._attn_implementation == "eager" and not hasattr(model.config, "termwise_attention")
    assert hooks == [dict(layer.self_attn._forward_pre_hooks) for layer in model.model.layers]
    assert "_termwise_before" not in model.__dict__


def test_sinks_of_a_model_with_every_denominator(ids):
    model = made("gpt_oss")
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        for text in ("softmax", "exp over=sum", "exp over=sum,sink"):
            if text == "exp over=sum,sink":
                with pytest.raises(ValueError, match="no weights for them"):
                    hf.use(model, text)
                continue
            hf.use(model, text)
            assert rms(model(input_ids=ids, use_cache=False).logits, expected) < 1e-5
        before = model.config.termwise_attention
        with pytest.raises(ValueError, match="over=length.*use a variant with over=sum"):
            hf.use(model, "taylor=0..2 over=length")
        assert before == model.config.termwise_attention
        assert rms(model(input_ids=ids, use_cache=False).logits, expected) < 1e-5


def test_models_keep_nothing_after_a_text(saved, ids):
    for model in (hf.use(made("llama"), "taylor=0..2"), saved[1]):
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        few = 3 + ids % 27
        text = model.generate(few, max_new_tokens=4, do_sample=False)
        assert not any("_held" in module.__dict__ for module in model.modules())
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
            assert torch.equal(again.generate(few, max_new_tokens=4, do_sample=False), text)
    count = len(termwise.torch._attention._registered)
    del again
    gc.collect()
    assert len(termwise.torch._attention._registered) <= count


def test_caches_with_states_are_continued_by_termwise_or_refused(ids):
    """Softmax of Transformers, and layers that compute gradients, would attend to the new positions only."""
    model, new = hf.use(made("llama"), "taylor=0..2"), ids[:, :1]
    with torch.no_grad():
        cache = model(input_ids=ids).past_key_values
    with pytest.raises(ValueError, match=r"continue it under torch.no_grad\(\)"):
        model(input_ids=new, past_key_values=copy.deepcopy(cache))
    hf.restore(model)
    with torch.no_grad():
        with pytest.raises(ValueError, match="this cache has states of termwise.hf.use"):
            model(input_ids=new, past_key_values=copy.deepcopy(cache))
        hf.use(model, "taylor=0..2")
        found = model(input_ids=new, past_key_values=cache).logits
        assert rms(found, model(input_ids=torch.cat([ids, new], 1), use_cache=False).logits[:, -1:]) < 1e-5
        # A call that fails leaves nothing behind.
        expected = model(input_ids=ids, use_cache=False).logits
        with pytest.raises(RuntimeError):
            model.model.layers[0].self_attn(torch.zeros(1, 1, 3), past_key_values=cache, position_embeddings=(torch.zeros(1), torch.zeros(1)))
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)


@torch.no_grad()
def check_masks_of_earlier_positions(model, ids):
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    for first, later in ((mask, None), (mask, torch.ones_like(longer)), (None, longer)):
        cache = model(input_ids=ids, attention_mask=first).past_key_values
        with pytest.raises(ValueError, match="according to attention_mask"):
            model(input_ids=ids[:, :1], attention_mask=later, past_key_values=cache)
    cache = model(input_ids=ids, attention_mask=mask).past_key_values
    assert model(input_ids=ids[:, :1], attention_mask=longer, past_key_values=cache).logits.isfinite().all()


def test_masks_of_earlier_positions_stay(ids):
    check_masks_of_earlier_positions(hf.use(made("llama"), "taylor=0..2"), ids)


def test_masks_of_earlier_positions_stay_in_models_of_termwise(saved, ids):
    check_masks_of_earlier_positions(saved[1], 3 + ids % 27)


def test_modes_of_training_stay_as_they_were(ids):
    model = made("llama").train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    hf.use(model, "softmax")
    hf.truncate(model, ids[0], orders=(2,))
    assert [module.training for module in model.modules()] == before


def test_classes_of_transformers_stay_as_they_are(stories, tmp_path):
    """Importing termwise.hf does not change plain models: their classes, files, copies and pickles."""
    from transformers.models.llama import modeling_llama

    assert isinstance(modeling_llama.LlamaAttention, type) and modeling_llama.LlamaAttention.__module__ == modeling_llama.__name__
    model = made("llama")
    assert type(model.config) is transformers.LlamaConfig and isinstance(model.config, transformers.CONFIG_MAPPING["llama"])
    assert type(model) is transformers.LlamaForCausalLM and isinstance(model.model.layers[0].self_attn, modeling_llama.LlamaAttention)
    torch.save(model, tmp_path / "model.pt")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(stories)
    assert type(loaded) is transformers.LlamaForCausalLM and type(loaded.config) is transformers.LlamaConfig
    assert type(transformers.CONFIG_MAPPING["llama"]()) is transformers.LlamaConfig


def test_code_of_a_folder_is_preferred_to_a_family(tmp_path):
    """A folder with the ``model_type`` of a family and an ``auto_map`` loads as without termwise."""
    made("llama").save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": {"AutoConfig": "other.OtherConfig"}}))
    (tmp_path / "model" / "other.py").write_text("from transformers import LlamaConfig\n\nclass OtherConfig(LlamaConfig):\n    pass\n")
    for first in ("", "import termwise.hf\n"):
        code = f"{first}print(type(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)).__name__)"
        found, error = loading(tmp_path / "model", code, HF_MODULES_CACHE=str(tmp_path / "modules"))
        assert error is None and found.strip() == "OtherConfig"


def test_near_and_far_keys_have_the_scores_of_the_model(ids):
    """Gemma 2 sets scale and cap: an equal far kernel does not change the model."""
    model = made("gemma2", sliding_window=100, layer_types=["full_attention"] * 2, attn_logit_softcapping=5.0)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        hf.use(model, "softmax window=6 far(exp)")
        assert rms(model(input_ids=ids, use_cache=False).logits, expected) < 1e-5
        hf.use(model, "softmax window=6 far(exp scale=0.1)")
        assert rms(model(input_ids=ids, use_cache=False).logits, expected) > 1e-4


def loading(folder, code, **env):
    """The output and the error of a process in which ``folder`` is a model's folder."""
    code = f"import sys, transformers\nfolder = sys.argv[1]\n{code}"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, **env})
    return done.stdout, done.stderr if done.returncode else None


def test_without_termwise_a_variant_is_refused_and_softmax_is_read(stories, tmp_path):
    native = termwise.load(stories)
    native.save(tmp_path / "plain")
    native.with_attention("taylor=0..4 norm=l2").save(tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "termwise_llama"
    assert sorted(file.name for file in (tmp_path / "plain").glob("*.py")) == []
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own").eval()
    assert type(model).__name__ == "TermwiseLlamaForCausalLM" and type(model.config) is hf.TermwiseLlamaConfig
    # Saved by Transformers, the folder has the same keys and files, and termwise reads it.
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "modeling_termwise.py").read_text() == (tmp_path / "own" / "modeling_termwise.py").read_text()
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("own", "again")]
    for key in ("model_type", "architectures", "auto_map", "attn_implementation", "attention_variant"):
        assert configs[0][key] == configs[1][key]
    # Softmax after a variant is a plain folder.
    termwise.load(tmp_path / "again").with_attention("softmax").save(tmp_path / "softmax")
    written = json.loads((tmp_path / "softmax" / "config.json").read_text())
    assert written["model_type"] == "llama" and not {"auto_map", "attn_implementation", "attention_variant"} & set(written)
    own = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    auto, trusting = "transformers.AutoModelForCausalLM.from_pretrained(folder)", "transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)"
    for name in ("plain", "softmax"):
        assert loading(tmp_path / name, auto)[1] is None
    for name in ("own", "again"):
        # Without the import, and without the package.
        assert "trust_remote_code=True" in loading(tmp_path / name, auto, **own)[1]
        missing = loading(tmp_path / name, f"sys.modules['termwise'] = None\n{trusting}", **own)[1]
        assert "install the Python package termwise" in missing and "import termwise.hf" in missing
        found, error = loading(tmp_path / name, f"model = {trusting}\nprint(type(model).__name__)\nmodel.save_pretrained(folder + ' twice')", **own)
        assert error is None and "TermwiseLlamaForCausalLM" in found
        assert sorted(file.name for file in (tmp_path / f"{name} twice").glob("*.py")) == ["modeling_termwise.py"]
        # Classes that ignore model_type.
        assert 'attn_implementation="termwise"' in loading(tmp_path / name, "transformers.LlamaForCausalLM.from_pretrained(folder)")[1]
        with pytest.raises(ValueError, match="load it with AutoModelForCausalLM"):
            transformers.LlamaForCausalLM.from_pretrained(tmp_path / name)(torch.tensor([[1, 2]]))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "own")("Once")["input_ids"] == transformers.AutoTokenizer.from_pretrained(stories)("Once")["input_ids"]


def test_termwise_does_not_read_a_changed_model_as_softmax(stories, tmp_path):
    model = hf.use(transformers.AutoModelForCausalLM.from_pretrained(stories), "taylor=0..2")
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="termwise.hf.use changed this model"):
        termwise.load(tmp_path / "model")
    hf.restore(model).save_pretrained(tmp_path / "restored")
    assert termwise.load(tmp_path / "restored").variants == termwise.load(stories).variants


def test_the_trainer_checkpoints_and_resumes(stories, tmp_path):
    termwise.load(stories).with_attention("taylor=0..2").save(tmp_path / "own")

    def started(kind):
        if kind == "own":
            return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own")
        return hf.use(made("llama"), "taylor=0..2 window=6")

    rows = [{"input_ids": x, "labels": x} for x in torch.randint(3, 100, (8, 20), generator=torch.Generator().manual_seed(2)).tolist()]
    for kind in ("own", "used"):
        folder = tmp_path / f"trainer of {kind}"
        options = {"max_steps": 3, "save_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "learning_rate": 1e-2, "disable_tqdm": True, "seed": 3}

        def trainer(name):
            return transformers.Trainer(started(kind), transformers.TrainingArguments(str(folder / name), **options), train_dataset=rows)

        trained = trainer("whole")
        trained.train()
        ids = torch.tensor([rows[0]["input_ids"]])
        with torch.no_grad():
            expected = trained.model.eval()(input_ids=ids, use_cache=False).logits
            for name in ("checkpoint-2", "checkpoint-3"):
                loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "whole" / name).eval()
                assert loaded.config._attn_implementation == "termwise" and type(loaded) is type(trained.model)
                assert (rms(loaded(input_ids=ids, use_cache=False).logits, expected) < 1e-5) == (name == "checkpoint-3")
        resumed = trainer("whole")
        resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
        assert all(rms(a.detach(), b.detach()) < 1e-6 for a, b in zip(resumed.model.parameters(), trained.model.parameters(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_older_files_of_every_family_load(family, families, tmp_path):
    """Files with a variant under the family's ``model_type``."""
    native = termwise.load(families / family).with_attention("taylor=0..2")
    native.save(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["model_type"] = config["model_type"].removeprefix("termwise_")
    config["architectures"] = [name.removeprefix("Termwise") for name in config["architectures"]]
    file.write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = np.random.default_rng(0).integers(3, native.config["vocab_size"], (2, 30))
    with torch.no_grad():
        found = model(input_ids=torch.tensor(ids), use_cache=False).logits
        assert rms(found, native.logits(ids)) < 1e-5 and np.array_equal(termwise.load(tmp_path / "model").logits(ids), native.logits(ids))
        # Saved again, it has the termwise model_type.
        model.save_pretrained(tmp_path / "again")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
        assert torch.equal(again(input_ids=torch.tensor(ids), use_cache=False).logits, found)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"].startswith("termwise_")
    assert np.array_equal(termwise.load(tmp_path / "again").logits(ids), native.logits(ids))


def test_the_tutorial(tmp_path, monkeypatch, capsys):
    from test_docs import run

    monkeypatch.chdir(tmp_path)
    run((ROOT / "docs" / "python.md").read_text().split("<!-- needs transformers -->")[1], capsys)


@pytest.mark.parametrize("text", ["softmax", "exp denominator=sum", "taylor=0..2", "taylor=0..4", "power=2", "feature=elu", "softmax window=8 sinks=2", "softmax window=6 far(taylor=0..2)",
                                  "softmax cap=5", "exp decay=fixed", "softmax window=8 sinks=2 chosen=6"])  # fmt: skip
def test_sinks_work_with_every_sum(text, ids):
    """Sinks change the logits, and states agree with the computation without a cache."""
    model = made("gpt_oss")
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    with torch.no_grad():
        plain = hf.use(model, text)(input_ids=ids, use_cache=False).logits
        for layer in model.model.layers:
            layer.self_attn.sinks.add_(1.0)
        found = model(input_ids=ids, use_cache=False).logits
        assert rms(found, plain) > 1e-4 and torch.isfinite(found).all()
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-40.0)
        assert torch.isfinite(model(input_ids=ids, use_cache=False).logits).all()
        options = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(*(model.generate(ids, use_cache=use, **options) for use in (True, False)))
