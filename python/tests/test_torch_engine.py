"""The PyTorch engine against the float64 reference of the extension: all presets, parts, modes and gradients."""

import numpy as np
import pytest
from conftest import SHARED, gradient_error, inputs, need, random_variants, rms

import termwise
from termwise import Layer

try:
    import torch
except ImportError:
    torch = None
    need("torch", False, "PyTorch is not installed")

import termwise.torch
from termwise.torch.engine import attend, blocked, naive, states

SIZES = {"heads": 4, "kv_heads": 2, "dim": 6, "value_dim": 5, "rope": 100.0}

#: Parts and interacting combinations that no preset contains.
MORE = [
    "softmax window=5 sinks=2 far(taylor=0..2 dim=4)",
    "softmax window=5 sinks=2 far(taylor=0..2) decay=softplus",
    "exp window=4 far(feature=hedgehog dim=3) over=sum,sink post=silu,channel decay=mamba qk_norm=rms,all",
    "feature=hedgehog dim=4 post=sigmoid,channel",
    "taylor=0..2 write=delta,2,scale=0.5 over=none decay=mamba,channel qk_norm=l2",
    "taylor=0..2,coef=learned write=delta,scale=0.3 over=length qk_norm=l2",
    "exp write=delta,scale=0.2 over=none qk_norm=l2 decay=softplus norm=rms",
    "power=2 decay=sigmoid,16,channel window=7 over=length",
    "exp decay=sigmoid window=5 far(taylor=0..2) cap=3",
    "taylor=0..3 norm=layer over=none",
    "taylor=0..12 norm=l2 over=none",
    "taylor=0..2,5,coef=1:0.5:0.2:0.1 clamp=2 over=length",
    "power=9 norm=rms over=none",
    "taylor=0..9,coef=learned over=none norm=l2",
    "feature=relu window=6 far(taylor=0..2,coef=learned) over=sum,sink",
    "softmax in out=cumulative post=out decay=linear conv=3 qk_norm=rms",
    "taylor=0..2 over=position decay=fixed conv=4 in",
    "taylor=0..2 rope=off over=sum,floor=1,eps=0.1",
]
MIXED = [
    ["softmax", "taylor=0..2 out norm=rms", "softmax", "taylor=0..2 out norm=rms"],
    ["softmax", "softmax", "taylor=0..2 window=5 sinks=2 far(feature=elu) conv=3", "softmax qk_norm=rms,all"],
    ["taylor=0..2 write=delta,scale=0.3 over=none post decay=softplus", "softmax", "power=2 over=position", "softmax decay=softplus over=sum,sink"],
]


def tensors(layer, dtype, **sizes):
    q, k, v, extras = inputs(layer, dtype=np.float64, **sizes)
    if any("write=delta" in str(v) for v in layer.variants):
        # Keys have a norm of about one: otherwise the delta rule diverges.
        k = 0.5 * k
    return {name: torch.tensor(x, dtype=dtype, requires_grad=True) for name, x in {"q": q, "k": k, "v": v, **extras}.items()}


def run(layer, given, dy, mode, lengths=None):
    """y and all gradients."""
    q, k, v, *extras = given.values()
    extras = dict(zip(list(given)[3:], extras, strict=True))
    y = attend(layer, q, k, v, extras, mode=mode, lengths=lengths)
    wanted = [x for x in given.values() if x.requires_grad]
    grads = torch.autograd.grad(y, wanted, dy.to(y.dtype), allow_unused=True)
    named = dict(zip([name for name, x in given.items() if x.requires_grad], grads, strict=True))
    return y.detach().numpy(), {name: np.zeros(given[name].shape) if g is None else g.numpy() for name, g in named.items()}


def expected(layer, given, dy, lengths=None):
    arrays = {name: x.detach().double().numpy() for name, x in given.items()}
    q, k, v = (arrays.pop(name) for name in "qkv")
    own = {"lengths": lengths, "engine": "reference"}
    return layer(q, k, v, **own, **arrays), layer.grad(q, k, v, dy.double().numpy(), **own, **arrays)


def modes(layer):
    variants = termwise.torch.engine.parts.read(layer._core.parts).variants
    small = all(v.remembered is not None and v.remembered.state is not None and states.monomial_count(2 * layer.dim + 1, [n for n, _ in v.remembered.state]) < 1000 for v, _ in variants)
    return ["parallel", "chunk=7", "chunk=1"] if small else ["parallel"]


@pytest.fixture
def small_blocks(monkeypatch):
    """16 queries at a time, so that short texts have many blocks."""
    monkeypatch.setitem(blocked._BUDGET, "cpu", 1)


@pytest.mark.parametrize("text", [*termwise.presets(), *MORE, *random_variants(60, seed=5), *map(tuple, MIXED)], ids=str)
def test_engine_is_the_reference(text, small_blocks):
    # One preset projects to 16 dimensions, so heads have at least 16.
    layer = Layer(text if isinstance(text, str) else list(text), **{**SIZES, "dim": 16 if text == "based" else 6})
    dy = torch.tensor(np.random.default_rng(3).standard_normal((2, 37, 4, 5)))
    given = tensors(layer, torch.float64, time=37)
    y, grads = expected(layer, given, dy)
    for mode in ["naive", *modes(layer)]:
        found, found_grads = run(layer, given, dy, mode)
        assert rms(found, y) < 1e-9, f"{mode}: y is off by {rms(found, y):.1e}"
        for name, g in found_grads.items():
            assert gradient_error(name, g, grads) < 1e-8, f"{mode}: the gradient of {name} is off by {gradient_error(name, g, grads):.1e}"
    # float32, the type in use.
    narrow = {name: x.detach().float().requires_grad_(x.requires_grad) for name, x in given.items()}
    for mode in modes(layer)[:2]:
        found, found_grads = run(layer, narrow, dy, mode)
        assert rms(found, y) < 1e-4, f"{mode}: y is off by {rms(found, y):.1e}"
        for name, g in found_grads.items():
            assert gradient_error(name, g, grads) < 1e-4, f"{mode}: the gradient of {name} is off by {gradient_error(name, g, grads):.1e}"


@pytest.mark.parametrize("text", ["softmax window=4 sinks=1 far(taylor=0..2)", "taylor=0..2 decay=softplus", "power=2 write=delta,scale=0.3 over=none norm=rms"])
def test_padding_changes_nothing(text, small_blocks):
    layer = Layer(text, **SIZES)
    given = tensors(layer, torch.float64, time=21)
    dy = torch.tensor(np.random.default_rng(3).standard_normal((2, 21, 4, 5)))
    lengths = torch.tensor([9, 21])
    y, grads = expected(layer, given, dy, lengths.tolist())
    found, found_grads = run(layer, given, dy, "parallel", lengths)
    assert rms(found, y) < 1e-9 and not found[0, 9:].any()
    assert all(gradient_error(name, g, grads) < 1e-8 for name, g in found_grads.items())


def test_large_scores_do_not_overflow(small_blocks):
    """If a later stage cancels it, the log scale ρ is removed from a row, so scores of hundreds are computed accurately."""
    for text in ["softmax", "softmax over=none norm=l2", "taylor=0..20", "power=10 norm=rms over=none", "softmax window=6 far(taylor=0..2) over=sum,sink"]:
        layer = Layer(text, **{**SIZES, "rope": None})
        given = tensors(layer, torch.float64, time=37)
        with torch.no_grad():
            given["q"] *= 40
            given["k"] *= 10
        dy = torch.ones(2, 37, 4, 5, dtype=torch.float64)
        y, grads = expected(layer, given, dy)
        narrow = {name: x.detach().float().requires_grad_(x.requires_grad) for name, x in given.items()}
        found, found_grads = run(layer, narrow, dy, "parallel")
        # Scores of 400 are rounded to 3e-5, and weights with them.
        assert np.isfinite(found).all() and rms(found, y) < 2e-3, f"{text}: {rms(found, y):.1e}"
        assert all(np.isfinite(g).all() for g in found_grads.values()), text


def test_gradients_by_differences(small_blocks):
    """Independent of any engine: central differences in float64."""
    for text in ["softmax out post=silu,channel norm=rms decay=mamba", "taylor=0..2,coef=learned write=delta,scale=0.3 over=none", "taylor=0..2 window=3 far(taylor=0..1 dim=2) over=length"]:
        layer = Layer(text, heads=2, kv_heads=1, dim=4, value_dim=3)
        given = tensors(layer, torch.float64, batch=1, time=18)
        names = list(given)
        torch.autograd.gradcheck(lambda *x: attend(layer, *x[:3], dict(zip(names[3:], x[3:], strict=True)), mode="parallel"), tuple(given.values()), fast_mode=True)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the number of values of the largest result of an operation."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(found):
            if isinstance(x, torch.Tensor):
                self.values = max(self.values, min(x.numel(), x.untyped_storage().nbytes() // x.element_size()))
        return found


@pytest.mark.parametrize("text, mode", [("softmax", "parallel"), ("softmax window=64 far(taylor=0..2 dim=4)", "chunk"), ("taylor=0..2 write=delta,scale=0.2 over=none", "parallel")])
def test_memory_is_linear_in_time(text, mode, monkeypatch):
    """Saved memory is linear in T, and no intermediate tensor is T×T."""
    monkeypatch.setitem(blocked._BUDGET, "cpu", 1 << 16)
    layer = Layer(text, heads=2, kv_heads=1, dim=8, value_dim=8)
    kept, largest = [], []
    for time in (512, 1024):
        given = tensors(layer, torch.float32, batch=1, time=time)
        held = []

        def keep(x, held=held):
            held.append(x.numel())
            return x

        q, k, v, *extras = given.values()
        with Largest() as seen:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                y = attend(layer, q, k, v, dict(zip(list(given)[3:], extras, strict=True)), mode=mode)
            y.sum().backward()
        kept.append(sum(held))
        largest.append(seen.values)
    assert kept[1] < 2.1 * kept[0]
    # 16 rows at least of 2 heads at a time.
    assert largest[1] <= max(1 << 16, 2 * largest[0]) < 2 * 1024 * 1024 // 4


def test_bfloat16_keeps_scores_of_polynomials_in_float32():
    """A polynomial multiplies the relative error of its scores by its degree; products of bfloat16 would be off by 0.4 % each."""
    torch.manual_seed(1)
    q, k, v = (4 * torch.randn(1, 60, 2, 16)).bfloat16(), torch.randn(1, 60, 2, 16).bfloat16(), torch.randn(1, 60, 2, 16).bfloat16()
    for text in ("softmax", "taylor=0..4", "power=4 over=none norm=l2"):
        layer = Layer(text, heads=2, dim=16)
        exact = attend(layer, q.double(), k.double(), v.double(), {})
        found = attend(layer, q, k, v, {})
        assert found.dtype == torch.bfloat16
        assert rms(found.float(), exact) < (1e-2 if text == "softmax" else 4e-3), f"{text}: {rms(found.float(), exact):.1e}"


def test_autocast_does_not_affect_the_engine():
    layer = Layer("taylor=0..4", heads=2, dim=16)
    q, k, v = torch.randn(3, 1, 40, 2, 16)
    q.requires_grad_()
    plain = attend(layer, q, k, v, {})
    (expected_grad,) = torch.autograd.grad(plain.sum(), q)
    with torch.autocast("cpu", torch.bfloat16):
        y = attend(layer, q, k, v, {})
        (grad,) = torch.autograd.grad(y.sum(), q)
    assert torch.equal(y, plain) and torch.equal(grad, expected_grad)


def test_the_function_takes_the_engine():
    q, k, v = torch.randn(3, 2, 30, 2, 8)
    native = termwise.torch.attention(q, k, v, "taylor=0..2")
    assert rms(termwise.torch.attention(q, k, v, "taylor=0..2", engine="torch"), native) < 1e-5
    assert rms(termwise.torch.attention(q, k, v, "taylor=0..2", engine="torch", mode="chunk=8"), native) < 1e-5
    meta = termwise.torch.attention(*(x.to("meta") for x in (q, k, v)), "softmax", engine="torch")
    assert meta.device.type == "meta" and meta.shape == q.shape
    with pytest.raises(ValueError, match="chunk=LENGTH"):
        termwise.torch.attention(q, k, v, engine="torch", mode="chunks")


def test_states_are_the_kernel():
    """Φ(q)·Φ(k) = (q·k)^n/n!, with one row per monomial."""
    q, k = torch.randn(2, 5, dtype=torch.float64)
    for n in range(5):
        assert len(states.monomials(q, [n])) == states.monomial_count(5, [n])
        assert abs(states.monomials(q, [n]) @ states.monomials(k, [n]) - (q @ k) ** n / np.prod(range(1, n + 1))) < 1e-12


def test_auto_takes_chunks_for_long_texts_of_small_states():
    layer = Layer("taylor=0..2", heads=2, dim=4)
    variant, _ = termwise.torch.engine.parts.read(layer._core.parts).variants[0]
    plan = [blocked.plan(variant, torch.empty(1, time, 2, 4), 4, 4, "auto").chunk for time in (64, 4096)]
    assert plan == [False, True]
    softmax, _ = termwise.torch.engine.parts.read(Layer("softmax", heads=2, dim=4)._core.parts).variants[0]
    assert not blocked.plan(softmax, torch.empty(1, 4096, 2, 4), 4, 4, "auto").chunk
    assert naive.is_near(variant, torch.tensor([[3]]), torch.tensor([2, 4])).tolist() == [[True, False]]


FAMILIES = ["gemma2", "gemma3", "llama-yarn", "llama3-rope", "mistral-window", "olmo2", "phi3", "qwen2", "qwen2-window", "qwen3", "smollm3"]


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    """Logits, loss and the gradient of every parameter against those of transformers in float64."""
    safetensors = pytest.importorskip("safetensors.torch", reason="NOT RUN, safetensors: not installed")
    folder = SHARED / "families" / name
    need("shared", folder.is_dir(), f"{folder} is not there")
    wanted = safetensors.load_file(folder / "expected.safetensors")
    model = termwise.torch.Model.load(folder)
    ids = wanted["ids"].long()
    assert rms(model(ids).detach(), wanted["logits"]) < 1e-4
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    loss = model(ids, labels).sum() / (labels >= 0).sum()
    assert abs(float(loss) - float(wanted["loss"])) < 1e-5
    loss.backward()
    for tensor, parameter in model.named_parameters():
        reference = wanted[f"grad:{tensor}"]
        error = (parameter.grad - reference).square().mean().sqrt()
        assert error <= max(1e-4 * float(reference.square().mean().sqrt()), 1e-6), f"{tensor}: {error:.1e}"
