"""Measure PyTorch at the sizes of `termwise bench`, with the same options and JSON keys.

    python3 bench/pytorch.py attention --shapes 8x4x256,1x8x2048
    python3 bench/pytorch.py gemm --shapes 2048x256x512
    python3 bench/pytorch.py step --layers 4 --hidden 256 --compile --autocast
    python3 bench/pytorch.py decode --case taylor=0..2@64 --case taylor=0..4@16
    python3 bench/pytorch.py delta --heads 4 --longest 4096

float32 on the CPU. Attention is scaled_dot_product_attention on contiguous [B, H, T, d], causal, without RoPE (compare it with
`softmax rope=off`); the step is a Llama with AdamW, in eager mode or with torch.compile, in float32, under torch.autocast(bfloat16), or with another
float32 matmul precision; decoding keeps the packed monomials of orders 0..p with
their values and gathers the coordinates of each monomial by index; the gated delta rule is that of transformers' Qwen3-Next, in chunks of 64. Times are the best
of several.
"""

import argparse
import collections
import itertools
import json
import math
import os

import torch
import torch.nn.functional as F
from timing import add_peer_flags, best, peer


def speed(seconds, flops, tokens=None):
    found = {"ms": seconds * 1e3, "gflops": flops / seconds / 1e9}
    if tokens is not None:
        found["tokens_per_s"] = tokens / seconds
    return found


def shapes(text):
    return [tuple(int(n) for n in shape.split("x")) for shape in text.split(",")]


def attention_flops(batch, heads, length, head_dim):
    return 4 * batch * heads * head_dim * length * (length + 1) / 2


def attention(options):
    rows = []
    for batch, heads, length in shapes(options.shapes):
        kv_heads, d = options.kv_heads or heads, options.head_dim
        q = torch.randn(batch, heads, length, d, requires_grad=True)
        k, v = (torch.randn(batch, kv_heads, length, d, requires_grad=True) for _ in range(2))
        dy = torch.randn(batch, heads, length, d)
        how = {"enable_gqa": True} if kv_heads != heads else {}
        if options.window:
            distance = torch.arange(length)[:, None] - torch.arange(length)
            how["attn_mask"] = (distance >= 0) & (distance < options.window)
        else:
            how["is_causal"] = True

        def forward():
            with torch.no_grad():
                F.scaled_dot_product_attention(q, k, v, **how)

        def both():
            y = F.scaled_dot_product_attention(q, k, v, **how)
            torch.autograd.grad(y, (q, k, v), dy)

        flops, tokens = attention_flops(batch, heads, length, d), batch * length
        rows.append({
            "variant": "softmax rope=off" + (f" window={options.window}" if options.window else ""), "batch": batch, "heads": heads, "kv_heads": kv_heads, "time": length, "head_dim": d,
            "forward": speed(best(forward, options.repeat)[0], flops, tokens),
            "forward_backward": speed(best(both, options.repeat)[0], 3.5 * flops, tokens),
        })
    return {"rows": rows}


def gemm(options):
    rows = []
    for m, k, n in shapes(options.shapes):
        x, w, dy = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
        y, dx, dw = torch.empty(m, n), torch.empty(m, k), torch.empty(n, k)
        products = [
            ("y = x·Wᵀ", lambda: torch.mm(x, w.t(), out=y)),
            ("dx = dy·W", lambda: torch.mm(dy, w, out=dx)),
            ("dW = dyᵀ·x", lambda: torch.mm(dy.t(), x, out=dw)),
        ]
        for name, product in products:
            rows.append({"product": name, "m": m, "k": k, "n": n, **speed(best(product, options.repeat)[0], 2 * m * k * n)})
    return {"rows": rows}


class Monomials:
    """Φ(x) of orders 0..p: coordinates gathered by index, their products, and on the query's side 1/α!."""

    def __init__(self, d, highest):
        self.indices, factorials = [], [1.0]
        for order in range(1, highest + 1):
            alphas = list(itertools.combinations_with_replacement(range(d), order))
            self.indices.append(torch.tensor(alphas))
            factorials += [math.prod(math.factorial(n) for n in collections.Counter(alpha).values()) for alpha in alphas]
        self.weights = 1.0 / torch.tensor(factorials)

    def __call__(self, x):
        return torch.cat([torch.ones(1)] + [x[index].prod(dim=1) for index in self.indices])


def decode(options):
    rows = []
    for case in options.case or ["taylor=0..2@64", "taylor=0..3@32", "taylor=0..4@16"]:
        orders, d = case.removeprefix("taylor=0..").split("@")
        d = int(d)
        phi = Monomials(d, int(orders))
        h, z = torch.zeros(len(phi.weights), d), torch.zeros(len(phi.weights))
        q, k, v = 0.1 * torch.randn(d), torch.randn(d), torch.randn(d)
        y = torch.empty(d)

        @torch.no_grad()
        def token():
            key, query = phi(k), phi(q * d**-0.5) * phi.weights
            h.addr_(key, v)
            z.add_(key)
            torch.mv(h.t(), query, out=y)
            y.div_(query @ z)

        tokens = max(1, 2**22 // h.numel())
        seconds = best(lambda: [token() for _ in range(tokens)], options.repeat)[0] / tokens
        rows.append({"variant": f"taylor=0..{orders} over=sum", "head_dim": d, "state_bytes": 4 * (h.numel() + z.numel()), "us": seconds * 1e6})
    return {"rows": rows}


def delta(options):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule

    shape = (1, options.longest, options.heads)
    q, k, v = (torch.randn(*shape, options.head_dim, requires_grad=True) for _ in range(3))
    decay, beta = (-0.5 * torch.rand(shape)).requires_grad_(), torch.rand(shape).requires_grad_()
    dy = torch.randn(*shape, options.head_dim)

    def run():
        return rule(q, k, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    def forward():
        with torch.no_grad():
            run()

    def both():
        torch.autograd.grad(run(), (q, k, v, decay, beta), dy)

    row = {"time": options.longest, "chunk_forward_ms": best(forward, options.repeat)[0] * 1e3, "chunk_ms": best(both, options.repeat)[0] * 1e3}
    return {"cases": [{"head_dim": options.head_dim, "heads": options.heads, "rows": [row]}]}


class RmsNorm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


def linear(inputs, outputs):
    layer = torch.nn.Linear(inputs, outputs, bias=False)
    torch.nn.init.normal_(layer.weight, std=0.02)
    return layer


class Layer(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        c, self.heads, self.d = options.hidden, options.heads, options.hidden // options.heads
        self.kv_heads = options.kv_heads or options.heads
        self.input_norm, self.mlp_norm = RmsNorm(c), RmsNorm(c)
        self.q, self.o = linear(c, c), linear(c, c)
        self.k, self.v = (linear(c, self.kv_heads * self.d) for _ in range(2))
        self.gate, self.up, self.down = linear(c, options.mlp), linear(c, options.mlp), linear(options.mlp, c)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        h = self.input_norm(x)

        def split(y, heads):
            return y.view(batch, length, heads, self.d).transpose(1, 2)

        def rotate(y):
            low, high = y.chunk(2, dim=-1)
            return y * cos + torch.cat((-high, low), dim=-1) * sin

        q, k, v = rotate(split(self.q(h), self.heads)), rotate(split(self.k(h), self.kv_heads)), split(self.v(h), self.kv_heads)
        grouped = {"enable_gqa": True} if self.kv_heads != self.heads else {}
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.embedding = torch.nn.Embedding(options.vocab, options.hidden)
        torch.nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = torch.nn.ModuleList(Layer(options) for _ in range(options.layers))
        self.norm, self.head = RmsNorm(options.hidden), linear(options.hidden, options.vocab)
        d = options.hidden // options.heads
        frequencies = 10_000.0 ** -(torch.arange(0, d, 2) / d)
        angles = torch.outer(torch.arange(options.length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def step(options):
    torch.manual_seed(1)
    model = Llama(options)
    compiled, precision = peer(options)
    forward = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids, labels = (torch.randint(options.vocab, (options.batch, options.length)) for _ in range(2))
    losses = []

    def run():
        optimizer.zero_grad(set_to_none=True)
        with precision():
            logits = forward(ids)
        # float32, as in autocast on GPUs.
        loss = F.cross_entropy(logits.view(-1, options.vocab).float(), labels.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())

    run()
    shortest, median = best(run, options.repeat)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith("embedding")]
    numbers, tokens = sum(p.numel() for p in matrices), options.batch * options.length
    attention = options.layers * attention_flops(options.batch, options.heads, options.length, options.hidden // options.heads)
    return {
        "attention": "exp over=sum", "vocab": options.vocab, "hidden": options.hidden, "heads": options.heads,
        "kv_heads": options.kv_heads or options.heads, "layers": options.layers, "mlp": options.mlp, "batch": options.batch,
        "length": options.length, "parameters": sum(p.numel() for p in model.parameters()), "matrix_parameters": numbers,
        **speed(shortest, 6 * tokens * numbers + 3.5 * attention, tokens), "median_ms": median * 1e3, "losses": [losses[0], losses[-1]],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, run, repeat):
        sub = commands.add_parser(name)
        sub.set_defaults(run=run)
        sub.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
        sub.add_argument("--repeat", type=int, default=repeat)
        return sub

    sub = command("attention", attention, 10)
    sub.add_argument("--shapes", default="8x4x256,2x4x1024,1x8x2048", help="batch x heads x time")
    sub.add_argument("--head-dim", type=int, default=64)
    sub.add_argument("--kv-heads", type=int)
    sub.add_argument("--window", type=int, help="sliding window: number of keys, applied as a mask")
    sub = command("gemm", gemm, 20)
    sub.add_argument("--shapes", default="2048x256x256,2048x256x512,2048x512x256,2048x256x4096,1024x1024x1024", help="M x K x N")
    sub = command("decode", decode, 10)
    sub.add_argument("--case", action="append", help="taylor=0..P@D")
    sub = command("delta", delta, 10)
    sub.add_argument("--heads", type=int, default=4)
    sub.add_argument("--longest", type=int, default=4096, help="time")
    sub.add_argument("--head-dim", type=int, default=128)
    sub = command("step", step, 10)
    sizes = {"vocab": 4096, "hidden": 256, "heads": 4, "layers": 4, "mlp": 512, "batch": 8, "length": 256}
    for name, default in sizes.items():
        sub.add_argument(f"--{name}", type=int, default=default)
    sub.add_argument("--kv-heads", type=int)
    add_peer_flags(sub)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = {"engine": f"pytorch {torch.__version__}", "machine": {"threads": options.threads}, **options.run(options)}
    print(json.dumps(found, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
