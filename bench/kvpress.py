"""Compare fixed-size KV memory of termwise with the methods of NVIDIA's kvpress at equal bytes, on the same contexts.

    python3 -m venv kvp && kvp/bin/pip install "kvpress==0.5.5" "transformers<5.3" WHEEL_OF_TERMWISE
    kvp/bin/python bench/kvpress.py MODEL --text rust=code.txt --text books=valid.txt --converted 0.125=small --save kvpress.json

Each context has 2,048 tokens. The loss is that of the 511 predictions from position 1,536 on. Budgets are shares of the 16-bit cache of a
whole context. "KL 99 %" is the mean over contexts of the 99th percentile over positions.

- Protocol A, for kvpress: full attention over the first 1,536 tokens, then compression to the budget, then the remaining tokens with their
  true positions; their keys are kept in addition to the budget. The prompt is read once for all presses and budgets.
- Protocol B, for termwise: all tokens stream through the bounded cache, which never exceeds the budget.

`NAME+q8` rounds the kept keys and values to 8-bit blocks of 32 values (8.5 bits per value) and keeps 16/8.5 times as many keys.
Every finished measurement is written to the file at once, and the same command resumes.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys

# This file has the name of the package: without this line, `import kvpress` would find it instead.
sys.path[:] = [place for place in sys.path if pathlib.Path(place).resolve() != pathlib.Path(__file__).resolve().parent]

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

LENGTH, PROMPT = 2048, 1536
#: Shares of the 16-bit cache of a whole context.
RATIOS = (0.5, 0.25, 0.125, 0.0625)
#: Like `termwise kv frontier`, this program reads at most this many tokens of a text.
MOST_TOKENS = 1 << 22
#: The first one that the tokenizer has separates documents.
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
#: Bits per value of a block of 32 values with a 16-bit scale.
Q8 = 8.5


def presses(names):
    """The presses by name. Excluded: presses that mask keys instead of freeing them (AdaKV, KVzip, DMS and others), that need downloads, training or
    a question, and wrappers."""
    import kvpress as k

    known = {
        "StreamingLLM": lambda r: k.StreamingLLMPress(compression_ratio=r, n_sink=4),
        "SnapKV": lambda r: k.SnapKVPress(compression_ratio=r),
        "ObservedAttention": lambda r: k.ObservedAttentionPress(compression_ratio=r),
        "TOVA": lambda r: k.TOVAPress(compression_ratio=r),
        "ExpectedAttention": lambda r: k.ExpectedAttentionPress(compression_ratio=r),
        "PyramidKV": lambda r: k.PyramidKVPress(compression_ratio=r),
        "KeyDiff": lambda r: k.KeyDiffPress(compression_ratio=r),
        "Knorm": lambda r: k.KnormPress(compression_ratio=r),
        "LagKV": lambda r: k.LagKVPress(compression_ratio=r),
        "NonCausalAttn": lambda r: k.NonCausalAttnPress(compression_ratio=r),
        "Compactor": lambda r: k.CompactorPress(compression_ratio=r),
        "CriticalKV": lambda r: k.CriticalKVPress(k.SnapKVPress(compression_ratio=r)),
        "EntropyGatedChunkKV": lambda r: k.EntropyGatedChunkKVPress(k.SnapKVPress(compression_ratio=r)),
        "KVCompose": lambda r: k.KVComposePress(structured=True, compression_ratio=r),
    }
    for name in names or [*known, "StreamingLLM+q8", "SnapKV+q8"]:
        yield name, known[name.removesuffix("+q8")], name.endswith("+q8")


def contexts(tokenizer, path, count):
    """Contexts spread over the text, which starts with the separator of documents: the same as those of `termwise kv frontier`."""
    separator = next((token for token in map(tokenizer.token_to_id, SEPARATORS) if token is not None), None)
    ids = tokenizer.encode(pathlib.Path(path).read_text(errors="replace"), add_special_tokens=False).ids
    ids = torch.tensor(ids if separator is None else [separator, *ids])
    available = (min(len(ids), MOST_TOKENS) - 1) // LENGTH
    if available < count:
        raise SystemExit(f"error: {path} has {available} contexts of {LENGTH} tokens; {count} are required")
    return [ids[i * available // count * LENGTH :][:LENGTH] for i in range(count)]


def measures(logits, original, targets):
    """Loss, KL to the original and agreement of the most probable token; logits and the original's log-probabilities [T, V]."""
    own = torch.log_softmax(logits, -1)
    kl = (original.exp() * (original - own)).sum(-1)
    loss, before = (-x.gather(-1, targets[:, None]).double().mean().item() for x in (own, original))
    return {
        "rise": loss - before, "original": before, "kl": kl.double().mean().item(), "kl_99": kl.quantile(0.99).item(),
        "top1": (own.argmax(-1) == original.argmax(-1)).double().mean().item(),
    }  # fmt: skip


def round_q8(x):
    """Blocks of 32 values with a float16 scale."""
    blocks = x.float().reshape(*x.shape[:-1], -1, 32)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).half().float()
    return (torch.where(scale > 0, (blocks / scale).round().clamp(-127, 127) * scale, 0)).reshape(x.shape).to(x.dtype)


@torch.no_grad()
def prefill(model, ids, wanted):
    """Full attention over the prompt, once for all presses: per key of `wanted` the compressed keys and values of each layer. A press compresses
    a layer after its attention, so it does not change the prefill itself."""
    import kvpress as k

    caches = {key: [] for key in wanted}
    # Presses with random sketches; a resumed run must draw the same.
    torch.manual_seed(0)

    def compress(module, _, kwargs, output):
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        for key, press in wanted.items():
            weights = None if isinstance(press, k.EntropyGatedChunkKVPress) else output[1]
            caches[key].append(press.compress(module, kwargs["hidden_states"], layer.keys, layer.values, weights, kwargs))

    hooks = []
    for press in wanted.values():
        press.post_init_from_model(model)
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(compress, with_kwargs=True))
    try:
        model(input_ids=ids[None, :PROMPT], past_key_values=DynamicCache(), logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return caches


@torch.no_grad()
def prefill_twice(model, ids, press):
    """The compressed keys and values of a press that reads the prompt twice."""
    cache = DynamicCache()
    with press(model):
        model(input_ids=ids[None, :PROMPT], past_key_values=cache, logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cache.layers]


@torch.no_grad()
def after_prompt(model, ids, layers, q8):
    """Logits of the positions after the prompt with these keys and values, and the bytes of the kept keys and values."""
    cache, elements, masks = DynamicCache(), 0, []
    positions = torch.arange(PROMPT, LENGTH - 1)[None]
    for index, (keys, values) in enumerate(layers):
        elements += keys.numel() + values.numel()
        cache.update(round_q8(keys) if q8 else keys, round_q8(values) if q8 else values, index)
        kept, count = keys.shape[2], positions.shape[1]
        masks.append(torch.full((1, 1, count, kept + count), -torch.inf).triu(kept + 1))

    # The model makes one mask for all layers, from positions: it would show later tokens behind a shortened cache.
    def masked(module, args, kwargs):
        return args, {**kwargs, "attention_mask": masks[module.layer_idx]}

    hooks = [layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True) for layer in model.model.layers]
    try:
        logits = model(input_ids=ids[None, PROMPT:-1], past_key_values=cache, position_ids=positions, cache_position=positions[0]).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return logits, math.ceil(elements * (Q8 if q8 else 16) / 8)


def check_causal(model, ids):
    """With all keys kept, the loss is that of the original, and a token changes no earlier prediction, also with half of the keys."""
    cache = DynamicCache()
    original = torch.log_softmax(model(input_ids=ids[None, :-1], logits_to_keep=LENGTH - 1 - PROMPT).logits[0], -1)
    model(input_ids=ids[None, :PROMPT], past_key_values=cache, logits_to_keep=1)
    layers = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    whole, _ = after_prompt(model, ids, layers, False)
    error = (torch.log_softmax(whole, -1) - original).abs().max().item()
    half = [(keys[:, :, ::2], values[:, :, ::2]) for keys, values in layers]
    changed = ids.clone()
    changed[-100:] = ids[:100]
    before, after = (after_prompt(model, one, half, False)[0][:-100] for one in (ids, changed))
    leak = (before - after).abs().max().item()
    if max(error, leak) > 1e-2:
        raise SystemExit(f"error: with all keys kept, log-probabilities differ by {error:.3g}; later tokens change earlier logits by {leak:.3g}")


def interval(values):
    """The mean and the half width of Student's 95 % interval."""
    if len(values) < 2:
        return statistics.fmean(values), float("nan")
    t = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 11: 2.20, 15: 2.13, 31: 2.04}
    nearest = t[max(n for n in t if n <= len(values) - 1)]
    return statistics.fmean(values), nearest * statistics.stdev(values) / math.sqrt(len(values))


def show(found):
    """One table per budget: loss increase with intervals over contexts and over means of texts, KL, agreement, and the paired difference from
    termwise."""
    key = lambda row: (row["text"], row["context"])
    for ratio in sorted({row["ratio"] for row in found}, reverse=True):
        rows = {}
        for row in found:
            if row["ratio"] == ratio:
                rows.setdefault(row["method"], {})[key(row)] = row
        own = rows.get("termwise", {})
        print(f"\n{100 * ratio:.2f} % of the 16-bit cache, last {LENGTH - 1 - PROMPT} of {LENGTH} tokens, 95 % intervals")
        print(f"{'method':20}{'MB':>7}{'loss increase':>18}{'over texts':>18}{'KL':>8}{'KL 99 %':>9}{'top-1':>8}{'minus termwise':>24}")
        for method, measured in rows.items():
            mean = lambda name: statistics.fmean(row[name] for row in measured.values()) if name in next(iter(measured.values())) else math.nan
            texts = sorted({text for text, _ in measured})
            means = [statistics.fmean(row["rise"] for row in measured.values() if row["text"] == text) for text in texts]
            paired = [row["rise"] - own[place]["rise"] for place, row in measured.items() if place in own] if method != "termwise" else []
            center, half = interval(paired) if paired else (math.nan, math.nan)
            cells = ["{:.3f} ± {:.3f}".format(*interval(values)) for values in ([row["rise"] for row in measured.values()], means)]
            difference = f"{center - half:+.3f} to {center + half:+.3f}" if paired else ""
            print(f"{method:20}{mean('bytes') / 1e6:7.2f}{cells[0]:>18}{cells[1]:>18}{mean('kl'):8.3f}{mean('kl_99'):9.2f}{mean('top1'):8.3f}{difference:>24}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder of the original")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE", help="text that was not used for calibration; may be repeated")
    parser.add_argument("--converted", action="append", default=[], metavar="RATIO=DIR", help="converted model of that budget; may be repeated")
    parser.add_argument("--contexts", type=int, default=8, help="of each text (default: 8)")
    parser.add_argument("--methods", nargs="*", help="presses (default: all)")
    parser.add_argument("--ratios", nargs="*", type=float, default=RATIOS)
    parser.add_argument("--save", type=pathlib.Path, required=True, metavar="FILE")
    options = parser.parse_args()
    disable_progress_bar()
    width = AutoConfig.from_pretrained(options.model).head_dim
    if width % 32:
        options.methods = [name for name, _, q8 in presses(options.methods) if not q8]
        print(f"left out: methods with +q8, because blocks of 32 values do not divide the head dimension {width}")
    found = json.loads(options.save.read_text())["rows"] if options.save.exists() else []
    done = {(row["method"], row["ratio"], row["text"], row["context"]) for row in found}
    tokenizer = Tokenizer.from_file(f"{options.model}/tokenizer.json")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="eager").eval()

    def keep(method, ratio, text, index, size, values):
        found.append({"method": method, "ratio": ratio, "text": text, "context": index, "bytes": size, **values})
        options.save.write_text(json.dumps({"model": options.model, "length": LENGTH, "prompt": PROMPT, "rows": found}, indent=1))
        print(f"{method:20} {ratio:7.4f} {text} {index}: {values['rise']:+.4f}", flush=True)

    ours = {}
    texts = {name: contexts(tokenizer, path, options.contexts) for name, path in (text.split("=", 1) for text in options.text)}
    with torch.no_grad():
        check_causal(model, next(iter(texts.values()))[0])
    for index in range(options.contexts):
        for name, all_ids in texts.items():
            ids = all_ids[index]
            targets = ids[PROMPT + 1 :]
            wanted = {
                (method, ratio): (make(1 - min(1.0, ratio * LENGTH / PROMPT * (16 / Q8 if q8 else 1))), q8)
                for method, make, q8 in presses(options.methods)
                for ratio in options.ratios
                if (method, ratio, name, index) not in done
            }
            converted = [pair.split("=", 1) for pair in options.converted]
            converted = [(float(ratio), folder) for ratio, folder in converted if ("termwise", float(ratio), name, index) not in done]
            if not wanted and not converted:
                continue
            with torch.no_grad():
                reference = torch.log_softmax(model(input_ids=ids[None, :-1], logits_to_keep=LENGTH - 1 - PROMPT).logits[0], -1)
            for ratio, folder in converted:
                import termwise

                own = ours.setdefault(folder, termwise.load(folder))
                logits = torch.from_numpy(own.logits(ids[:-1].tolist())[0, PROMPT:].copy())
                size = json.loads((pathlib.Path(folder) / "kv_memory.json").read_text())["bytes"]
                keep("termwise", ratio, name, index, size, measures(logits, reference, targets))
            twice = [key for key in wanted if key[0] == "KVCompose"]
            once = {key: press for key, (press, _) in wanted.items() if key not in twice}
            caches = prefill(model, ids, once) if once else {}
            caches |= {key: prefill_twice(model, ids, wanted[key][0]) for key in twice}
            for key, (_, q8) in wanted.items():
                logits, size = after_prompt(model, ids, caches.pop(key), q8)
                keep(*key, name, index, size, measures(logits, reference, targets))
    show(found)


if __name__ == "__main__":
    main()
