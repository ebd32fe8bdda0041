"""``termwise.hf.use(model, None)`` against the attention of Transformers, on tiny random models of many architectures.

``python python/tests/test_hf_architectures.py`` writes the table to docs/reference/architectures.md.
"""

import os
from functools import cache

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from conftest import ROOT, need, rms

try:
    import torch
    import transformers
except ImportError:
    torch = None
    need("torch", False, "PyTorch or transformers is not installed")

from termwise import hf

PAGE = ROOT / "docs" / "reference" / "architectures.md"
TOLERANCE = 1e-5
SMALL = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
SLIDING = {**GROUPED, "sliding_window": 16}
NAMES = {key: SMALL[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
GPT2_LIKE = {**NAMES, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
#: Two layers of each architecture by ``model_type``: with a window if the architecture has one, and without dropout.
ARCHITECTURES = {
    "bloom": {**NAMES, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "codegen": {**GPT2_LIKE, "rotary_dim": 4},
    "cohere": GROUPED,
    "cohere2": {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": {**SMALL, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 24, "kv_lora_rank": 16, "q_lora_rank": 24,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1},
    "exaone4": {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
    "falcon": {**NAMES, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False},
    "gemma": GROUPED,
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 0.5},
    "gemma3_text": SLIDING,
    "glm4": GROUPED,
    "gpt2": {**GPT2_LIKE, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_neox": {**SMALL, "rotary_pct": 0.5},
    "gpt_oss": {**SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gptj": {**GPT2_LIKE, "rotary_dim": 4},
    "granite": GROUPED,
    "llama": GROUPED,
    "llama4_text": {**GROUPED, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 16},
    "mistral": SLIDING,
    "mixtral": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mpt": {**NAMES, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "olmo2": GROUPED,
    "opt": {**NAMES, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 128, "word_embed_proj_dim": 32, "dropout": 0.0},
    "phi": SMALL,
    "phi3": {**GROUPED, "sliding_window": 16},
    "qwen2": {**SLIDING, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": GROUPED,
    "qwen3_moe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "smollm3": GROUPED,
    "stablelm": {**SMALL, "num_key_value_heads": 4},
    "starcoder2": SLIDING,
}  # fmt: skip


def made(kind):
    """A model with the attention of Transformers: sdpa, or eager if the architecture has no sdpa."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **ARCHITECTURES[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert model.config._attn_implementation in ("sdpa", "eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def generated(model, ids, **more):
    """Logits of each new token, [new tokens, rows, vocabulary]; greedy by default."""
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True, **more}
    found = model.generate(ids, **options)
    return found.sequences, torch.stack(found.logits)


def padded(ids):
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return {"ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def forward(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def left_padding(model, ids):
    own = padded(ids)
    return model(input_ids=own["ids"], attention_mask=own["attention_mask"]).logits[own["attention_mask"].bool()]


def dynamic_cache(model, ids):
    return generated(model, **padded(ids))


def beam_search(model, ids):
    return generated(model, **padded(ids), num_beams=3)


def static_cache(model, ids):
    return *generated(model, **padded(ids), cache_implementation="static"), *generated(model, ids[:, :6], cache_implementation="static")


def packed_rows(model, ids):
    """Two texts in the first row, and three in the second."""
    positions = torch.stack([torch.cat([torch.arange(17), torch.arange(23)]), torch.cat([torch.arange(n) for n in (5, 25, 10)])])
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits


def sliding_window(model, ids):
    """A text that begins within the window of 16 and grows beyond it."""
    if "sliding_window" not in ARCHITECTURES[model.config.model_type]:
        return None
    return generated(model, ids[:, :6], max_new_tokens=30)


def gradients(model, ids):
    with torch.enable_grad():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


CHECKS = [forward, left_padding, dynamic_cache, static_cache, beam_search, packed_rows, sliding_window, gradients]


def outcome(check, model, ids):
    """The tensors of a check, None if it does not apply, or its error."""
    try:
        found = check(model, ids)
        return found if found is None or isinstance(found, tuple) else (found,)
    except (ValueError, TypeError, AttributeError, NotImplementedError, RuntimeError) as error:
        return error


@cache
def row(kind):
    """By check: an error relative to Transformers, None, or a string with the reason of a refusal. A single reason if the model is refused."""
    ids = torch.randint(3, 100, (2, 40), generator=torch.Generator().manual_seed(1))
    model = made(kind)
    with torch.no_grad():
        expected = [outcome(check, model, ids) for check in CHECKS]
        try:
            hf.use(model, None)
        except ValueError as error:
            return str(error)
        found = [outcome(check, model, ids) for check in CHECKS]
    cells = {}
    for check, own, other in zip(CHECKS, found, expected, strict=True):
        if other is None or isinstance(other, Exception):
            cells[check.__name__] = None if other is None else "not supported by Transformers"
        elif isinstance(own, Exception):
            assert isinstance(own, ValueError), f"{kind}, {check.__name__}: {own!r}"
            cells[check.__name__] = str(own)
        else:
            shapes = [x.shape for x in own] == [x.shape for x in other]
            cells[check.__name__] = max(rms(x, y) for x, y in zip(own, other, strict=True)) if shapes else float("inf")
    return cells


def page():
    head = ["model_type", *(check.__name__.replace("_", " ") for check in CHECKS)]
    lines, notes = [" | ".join(head), " | ".join(["---"] * len(head))], []

    def note(reason):
        if reason not in notes:
            notes.append(reason)
        return f"[{notes.index(reason) + 1}]"

    for kind in ARCHITECTURES:
        cells = row(kind)
        if isinstance(cells, str):
            lines.append(" | ".join([f"`{kind}`", f"refused {note(cells)}", *[""] * (len(CHECKS) - 1)]))
            continue
        shown = ["—" if x is None else f"refused {note(x)}" if isinstance(x, str) else "equal" if x < TOLERANCE else f"WRONG, {x:.1e}" for x in cells.values()]
        lines.append(" | ".join([f"`{kind}`", *shown]))
    table = "\n".join(f"| {line} |" for line in lines)
    reasons = "\n".join(f"{i}. {reason[0].upper()}{reason[1:]}." for i, reason in enumerate(notes, 1))
    return f"""<!-- Written by python/tests/test_hf_architectures.py. -->
# Transformers architectures

`termwise.hf.use(model, None)` computes softmax attention with termwise. This table compares it with the attention of Transformers (sdpa, or eager if an architecture has no sdpa) on
models with two layers and random weights. "Equal" means a relative error below {TOLERANCE:.0e} of logits, of generated tokens with the logits of each step, or of gradients. "Refused" means an
error that names the reason. "—" means that the architecture has no sliding window.

{table}

Reasons:

{reasons}

The checks:

- **forward**: two texts of 40 tokens.
- **left padding**: one of the two texts has 7 positions of padding in front.
- **dynamic cache**: 12 tokens by greedy decoding, with left padding. The cache holds states of termwise.
- **static cache**: the same with `cache_implementation="static"`. Termwise then reads keys and values from the cache of Transformers and recomputes all positions for each token.
- **beam search**: the same with three beams.
- **packed rows**: several texts per row, by `position_ids` that restart.
- **sliding window**: 30 tokens from a prompt of 6, with a window of 16.
- **gradients**: of the loss, with respect to all parameters.
"""


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_equals_transformers_or_is_refused(kind):
    cells = row(kind)
    print(kind, cells)
    if isinstance(cells, str):
        assert "attention" in cells
        return
    wrong = {name: x for name, x in cells.items() if isinstance(x, float) and not x < TOLERANCE}
    assert not wrong, wrong
    # States do not restart at each attention chunk of Llama 4.
    supported = {"forward", "packed_rows", "gradients"} if kind == "llama4_text" else set(cells) - {"sliding_window"}
    for name in supported:
        assert isinstance(cells[name], float), cells[name]


def test_the_page_is_current():
    assert sum(isinstance(row(kind), dict) for kind in ARCHITECTURES) >= 20
    assert PAGE.read_text() == page(), f"{PAGE.name} is outdated: run python python/tests/test_hf_architectures.py"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(page())
