"""Write tiny models of all supported families with reference outputs of Transformers, as test cases.

    python bench/families.py FOLDER
    TERMWISE_FAMILIES=FOLDER cargo test -p termwise-model --test all other_families
    cargo run -p termwise-model --example copy -- FOLDER COPIES
    python bench/families.py FOLDER --written COPIES     # check the models that termwise wrote

Each case is a folder with `config.json`, `model.safetensors` and `expected.safetensors`: `ids` [B, T], `logits`, `loss` (mean cross-entropy of the
next token) and `grad:<name>` for every parameter, from float64 with eager attention. Weights are random, including norms and biases.
The cases vary the options of a configuration: heads, windows, kinds of layers, tied embeddings, RoPE in old and new keys.
"""

import argparse
import json
import pathlib

import torch
import transformers
from safetensors.torch import load_file, save_file

SMALL = dict(vocab_size=61, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=None, rms_norm_eps=1e-5, tie_word_embeddings=False)
ROPE = {"rope_theta": 5000.0, "rope_type": "default"}
S, F = "sliding_attention", "full_attention"
NEOX = dict(num_key_value_heads=4, hidden_act="gelu", layer_norm_eps=1e-4, attention_dropout=0.0, hidden_dropout=0.0)
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 5000.0}

CASES = {
    "llama-wide-heads": ("llama", dict(head_dim=12, rope_parameters=ROPE)),
    "llama-biases-tied": ("llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=ROPE)),
    "llama-gelu": ("llama", dict(hidden_act="gelu_pytorch_tanh", num_key_value_heads=4, rope_parameters=ROPE)),
    "llama-linear": ("llama", dict(rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0})),
    "llama-dynamic": ("llama", dict(rope_parameters={"rope_type": "dynamic", "factor": 3.0, "rope_theta": 5000.0})),
    "llama-dynamic-long": ("llama", dict(max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "factor": 3.0, "rope_theta": 5000.0})),
    "llama-yarn-truncate": ("llama", dict(rope_parameters=YARN | {"truncate": False, "beta_fast": 4.0, "beta_slow": 0.5})),
    "llama-yarn-factor": ("llama", dict(rope_parameters=YARN | {"attention_factor": 0.8})),
    "llama-yarn-mscale": ("llama", dict(rope_parameters=YARN | {"mscale": 1.3, "mscale_all_dim": 0.7})),
    "mistral-none": ("mistral", dict(sliding_window=None, head_dim=10, rope_parameters=ROPE)),
    "mistral-one": ("mistral", dict(sliding_window=1, num_key_value_heads=1, rope_parameters=ROPE)),
    "mistral-wide": ("mistral", dict(sliding_window=64, tie_word_embeddings=True, rope_parameters=ROPE)),
    "qwen2-from-layer": ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1, rope_parameters=ROPE)),
    "qwen3-biases-window": ("qwen3", dict(head_dim=10, attention_bias=True, use_sliding_window=True, sliding_window=3, layer_types=[S, F, S],
                                          tie_word_embeddings=True, rope_parameters=ROPE)),
    "qwen3-yarn": ("qwen3", dict(head_dim=8, rope_parameters=YARN)),
    "smollm3-interval": ("smollm3", dict(no_rope_layer_interval=2, tie_word_embeddings=True, rope_parameters=ROPE)),
    "smollm3-window": ("smollm3", dict(no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=4, attention_bias=True, mlp_bias=True,
                                       rope_parameters=ROPE)),
    "olmo2-biases": ("olmo2", dict(attention_bias=True, num_key_value_heads=4, tie_word_embeddings=True, rope_parameters=ROPE)),
    "olmo2-one": ("olmo2", dict(num_key_value_heads=1, num_hidden_layers=2, rope_parameters=ROPE)),
    "phi3-none": ("phi3", dict(sliding_window=None, num_key_value_heads=4, tie_word_embeddings=True, rope_parameters=ROPE)),
    "phi3-long-short": ("phi3", dict(original_max_position_embeddings=64, rope_parameters={
        "rope_type": "longrope", "rope_theta": 5000.0, "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 4.0, 8.0]})),
    "phi3-long-long": ("phi3", dict(original_max_position_embeddings=16, rope_parameters={
        "rope_type": "longrope", "rope_theta": 5000.0, "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 4.0, 8.0]})),
    "gemma2-tied": ("gemma2", dict(head_dim=10, query_pre_attn_scalar=20, sliding_window=3, tie_word_embeddings=True, rope_parameters=ROPE)),
    "gemma2-no-caps": ("gemma2", dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=9, attn_logit_softcapping=None,
                                      final_logit_softcapping=None, layer_types=[F, F, S], attention_bias=True, rope_parameters=ROPE)),
    "gemma3-pattern": ("gemma3_text", dict(head_dim=10, query_pre_attn_scalar=7, sliding_window=4, sliding_window_pattern=2,
                                           final_logit_softcapping=4.0, tie_word_embeddings=True, rope_parameters={
                                               F: {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
                                               S: {"rope_type": "default", "rope_theta": 300.0}})),
    "neox-quarter": ("gpt_neox", NEOX | dict(hidden_size=64, rope_parameters=ROPE | {"partial_rotary_factor": 0.25})),
    "neox-sequential": ("gpt_neox", NEOX | dict(use_parallel_residual=False, hidden_act="gelu_new", tie_word_embeddings=True,
                                                rope_parameters=ROPE | {"partial_rotary_factor": 1.0})),
    "neox-no-bias": ("gpt_neox", NEOX | dict(attention_bias=False, rope_parameters=ROPE | {"partial_rotary_factor": 0.5})),
    "stablelm-biases": ("stablelm", dict(use_qkv_bias=True, layer_norm_eps=1e-4, tie_word_embeddings=True,
                                         rope_parameters=ROPE | {"partial_rotary_factor": 0.25})),
    "stablelm-parallel": ("stablelm", dict(use_parallel_residual=True, num_key_value_heads=4, rope_parameters=ROPE | {"partial_rotary_factor": 0.5})),
    "phi3-partial": ("phi3", dict(sliding_window=6, rope_parameters=ROPE | {"partial_rotary_factor": 0.5})),
    "gemma3-full": ("gemma3_text", dict(head_dim=8, query_pre_attn_scalar=8, layer_types=[F, F, F], rope_parameters={
        F: ROPE, S: {"rope_type": "default", "rope_theta": 300.0}})),
}
# Renames the keys that Transformers writes to those of older files on the hub.
OLD = {"llama-linear": ("llama-linear-old", None), "llama-yarn-mscale": ("llama-yarn-old", None), "qwen2-from-layer": ("qwen2-old", "layer_types"),
       "gemma2-tied": ("gemma2-old", "layer_types"), "gemma3-pattern": ("gemma3-old", "layer_types"), "phi3-long-short": ("phi3-old", None), "neox-quarter": ("pythia-old", None), "stablelm-biases": ("stablelm-old", None)}


def make(folder, kind, choices):
    torch.manual_seed(sum(map(ord, folder.name)))
    config = transformers.AutoConfig.for_model(kind, **SMALL | choices)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            matrix = parameter.dim() == 2
            parameter.copy_(torch.randn_like(parameter) * (0.25 if matrix else 0.3) + (1.0 if not matrix and "norm" in name and parameter.mean() > 0.5 else 0.0))
    model.save_pretrained(folder)
    ids = torch.randint(0, config.vocab_size, (2, 29))
    save_file(run(folder, ids), folder / "expected.safetensors")


def run(folder, ids):
    """The outputs of Transformers in float64."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True)
    problems = {name: keys for name, keys in info.items() if keys}
    assert not problems, f"{folder}: {problems}"
    model = model.double().train()
    logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    grads = {f"grad:{name}": parameter.grad for name, parameter in model.named_parameters()}
    return {name: value.detach().clone().contiguous() for name, value in ({"ids": ids, "logits": logits, "loss": loss.reshape(1)} | grads).items()}


def old_keys(source, target, without):
    """Copy a model with its configuration in older keys."""
    target.mkdir()
    for name in ["model.safetensors", "expected.safetensors"]:
        (target / name).write_bytes((source / name).read_bytes())
    config = json.loads((source / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config.pop(without, None)
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
        rope = rope["full_attention"]
    partial = rope.pop("partial_rotary_factor", None)
    if config["model_type"] == "gpt_neox":
        config.pop("rope_theta", None)
        config |= {"rotary_emb_base": rope.pop("rope_theta"), "rotary_pct": partial}
    else:
        config |= {"rope_theta": rope.pop("rope_theta")} | ({} if partial is None else {"partial_rotary_factor": partial})
    kind = rope.pop("rope_type")
    config["rope_scaling"] = {"type": kind} | rope if kind != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    (target / "config.json").write_text(json.dumps(config, indent=2))


def compare(folder, written):
    """Check that Transformers loads the models that termwise wrote with equal outputs."""
    for case in sorted(path for path in folder.iterdir() if (path / "expected.safetensors").is_file()):
        expected = load_file(case / "expected.safetensors")
        found = run(written / case.name, expected["ids"])
        worst = max((found[name] - value).double().norm().item() / max(value.double().norm().item(), 1e-12) for name, value in expected.items() if name != "ids")
        print(f"{case.name}: {worst:.1e}")
        assert worst < 1e-6, f"{case.name}: transformers reads another model"


arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("folder", type=pathlib.Path)
arguments.add_argument("--written", type=pathlib.Path)
arguments = arguments.parse_args()
if arguments.written:
    compare(arguments.folder, arguments.written)
else:
    for name, (kind, choices) in CASES.items():
        make(arguments.folder / name, kind, choices)
        if name in OLD:
            old_keys(arguments.folder / name, arguments.folder / OLD[name][0], OLD[name][1])
        print(name)
