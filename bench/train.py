"""Repeat a training run of termwise with PyTorch: same initial weights, batches and schedule.

    RUN="tinyshakespeare.txt --held-out 0.1"
    termwise data show $RUN --batch 16 --length 256 --count 2000 --json > batches.jsonl
    termwise data show $RUN --batch 16 --length 256 --count 1000000 --held-out-batch --json > held-out.jsonl
    python3 bench/train.py FIRST batches.jsonl held-out.jsonl --lr 2e-3 --warmup 100 --beta2 0.99 --clip 1 > pytorch.jsonl
    python3 bench/train.py --compare runs/NAME/metrics.jsonl pytorch.jsonl

FIRST is a checkpoint with the initial weights (a run of one step with `--lr 1e-30` does not change them). Transformers loads it.
AdamW is PyTorch's, with weight decay on matrices only. The output lines are {"step", "loss"} and, every
--eval-every steps, {"step", "held_out"}.
"""

import argparse
import json
import math
import sys
import time

from timing import add_peer_flags, peer


def rate(step, options, steps):
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    share = min(1.0, (step - options.warmup) / (steps - options.warmup))
    height = {"cosine": (1 + math.cos(math.pi * share)) / 2, "linear": 1 - share, "constant": 1.0}[options.decay]
    return options.lr * (options.final_lr + (1 - options.final_lr) * height)


def train(options):
    import torch
    import torch.nn.functional as F
    from transformers import LlamaForCausalLM

    if options.threads:
        torch.set_num_threads(options.threads)
    model = LlamaForCausalLM.from_pretrained(options.first, dtype=torch.float32, attn_implementation="sdpa")
    compiled, precision = peer(options)
    forward = compiled(model)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.adam_eps)

    def read(path):
        with open(path) as lines:
            return [(torch.tensor(b["ids"]), torch.tensor(b["labels"])) for b in map(json.loads, lines)]

    def loss_sum(ids, labels):
        with precision():
            logits = forward(ids, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"), (labels != -100).sum()

    def evaluate():
        with torch.no_grad():
            sums = [loss_sum(*batch) for batch in held_out]
        return float(sum(s for s, _ in sums) / sum(n for _, n in sums))

    batches, held_out = read(options.batches), read(options.held_out)
    seconds = 0.0
    for step, (ids, labels) in enumerate(batches):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, options, options.horizon or len(batches))
        optimizer.zero_grad(set_to_none=True)
        total, count = loss_sum(ids, labels)
        loss = total / count
        loss.backward()
        if options.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        seconds += time.perf_counter() - start
        print(json.dumps({"step": step + 1, "loss": loss.item(), "tokens_per_s": (step + 1) * ids.numel() / seconds}), flush=True)
        if (step + 1) % options.eval_every == 0 or step + 1 == len(batches):
            print(json.dumps({"step": step + 1, "held_out": evaluate()}), flush=True)


def compare(ours, theirs):
    """Print the held-out losses of both, and the differences of the training losses."""
    def lines(path):
        with open(path) as text:
            return [json.loads(line) for line in text]

    peer = lines(theirs)
    peer_loss = {line["step"]: line["loss"] for line in peer if "loss" in line}
    peer_held_out = {line["step"]: line["held_out"] for line in peer if "held_out" in line}
    mine = lines(ours)
    print("step     termwise  PyTorch   difference   (held out)")
    for line in mine:
        if line["kind"] == "held_out" and line["step"] in peer_held_out:
            a, b = line["loss"], peer_held_out[line["step"]]
            print(f"{line['step']:<8} {a:.4f}    {b:.4f}    {a - b:+.4f}")
    apart, last = [], 0
    for line in mine:
        if line["kind"] == "train":
            span = [peer_loss[step] for step in range(last + 1, line["step"] + 1) if step in peer_loss]
            whole, last = len(span) == line["step"] - last, line["step"]
            if whole:
                apart.append((last, line["loss"] - sum(span) / len(span)))
    for low, high in [(0, 50), (50, 200), (200, 1000), (1000, 10**9)]:
        part = [d for step, d in apart if low < step <= high]
        if part:
            mean, rms = sum(part) / len(part), math.sqrt(sum(d * d for d in part) / len(part))
            print(f"training loss, steps {low + 1} to {min(high, apart[-1][0])}: mean difference {mean:+.5f}, root mean square {rms:.5f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first")
    parser.add_argument("batches")
    parser.add_argument("held_out")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--decay", choices=["cosine", "linear", "constant"], default="cosine")
    parser.add_argument("--horizon", type=int, default=0)
    parser.add_argument("--final-lr", type=float, default=0.1)
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--adam-eps", type=float, default=1e-8)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--eval-every", type=int, default=500)
    parser.add_argument("--threads", type=int, default=0)
    add_peer_flags(parser)
    if sys.argv[1:2] == ["--compare"] and len(sys.argv) == 4:
        return compare(*sys.argv[2:])
    train(parser.parse_args())


if __name__ == "__main__":
    main()
