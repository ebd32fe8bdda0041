"""FlexAttention: its forward pass on the CPU, and the gradient of its formula by autograd."""

import numpy as np
import pytest
from conftest import gradient_error, inputs, need, rms

import termwise
from termwise import Layer

try:
    import torch
except ImportError:
    torch = None
    need("torch", False, "PyTorch is not installed")

from termwise.torch import Attention, attention
from termwise.torch.engine import flex, naive, parts
from termwise.torch.engine import attention as engine

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
SIZES = {"heads": 4, "kv_heads": 2, "dim": 16, "value_dim": 8, "rope": 100.0}

#: Covered parts that no preset contains.
COVERED = [
    "taylor=0..2", "taylor=0..4 norm=l2", "taylor=0..8", "taylor=0..16", "taylor=0,2", "power=2", "power=4 over=none norm=l2", "taylor=0..1 cap=0.9",
    "softmax window=5", "softmax window=4 sinks=2", "softmax window=4 sinks=2 far(taylor=0..2)", "taylor=0..2 window=6 far(taylor=0..4)",
    "softmax cap=5", "softmax clamp=2", "taylor=0..4 cap=3 clamp=1", "softmax decay=fixed", "taylor=0..2 decay=fixed window=7", "softmax over=sum,sink",
    "taylor=0..2 over=length", "taylor=0..2 over=none norm=rms", "softmax over=none norm=l2", "softmax over=none norm=layer", "softmax over=position", "feature=elu",
    "feature=hedgehog", "softmax in out post conv=3 qk_norm=rms", "taylor=0..2 dim=8 scale=0.3",
]  # fmt: skip
#: Variants that are not covered, with a word of the reason.
REFUSED = {
    "taylor=0..1": "negative", "taylor=0..3": "negative", "power=3": "negative", "linear": "negative", "feature=relu": "negative", "taylor=0..2,coef=learned": "negative",
    "softmax decay=softplus": "depends on the input", "gated_deltanet": "write rule", "softmax window=4 far(feature=elu)": "different features",
}  # fmt: skip


def variant_of(layer):
    ((variant, _),) = engine._parts(layer._core.parts).variants
    return variant


def covered_presets():
    return [name for name in termwise.presets() if flex.refusal(variant_of(Layer(name, **SIZES))) is None]


@pytest.fixture(autouse=True)
def few_compilations():
    """Each case is a new function for the compiler, which has a limit of recompilations."""
    torch._dynamo.reset()


def drawn(layer, **sizes):
    q, k, v, extras = inputs(layer, dtype=np.float64, **sizes)
    return {name: torch.tensor(x) for name, x in {"q": q, "k": k, "v": v, **extras}.items()}


def reference(layer, given):
    values = {name: x.numpy() for name, x in given.items()}
    q, k, v = (values.pop(name) for name in "qkv")
    return layer(q, k, v, engine="reference", **values)


@pytest.mark.parametrize("text", [*covered_presets(), *COVERED])
def test_forward_is_the_reference(text):
    layer = Layer(text, **SIZES)
    assert flex.refusal(variant_of(layer)) is None
    given = drawn(layer)
    expected = reference(layer, given)
    with torch.no_grad():
        y = attention(**{name: x.float() for name, x in given.items()}, variant=text, rope=100.0, backend="flex")
    assert y.dtype == torch.float32 and rms(y, expected) < 1e-5


@pytest.mark.parametrize("text", [*covered_presets(), *COVERED])
def test_gradient_of_its_formula(text, monkeypatch):
    """The softmax over modified scores with autograd, in float64: the same functions as in a call, with all pairs at once instead of FlexAttention."""
    layer = Layer(text, **SIZES)
    given = {name: x.requires_grad_() for name, x in drawn(layer, time=11).items()}
    trained = {"q", "k", "v", *(extra.name for extra in layer.extras)}

    def dense(variant, made):
        q, k, v = made["near_q"], made["near_k"], made["v"]
        if (key_weight := made.get("key_weight")) is not None:
            v = v * key_weight.unsqueeze(-1)
        shape = torch.broadcast_shapes(q.shape[:3], k.shape[:3])
        heads = torch.arange(shape[1] * shape[2]).view(1, shape[1], shape[2], 1, 1)
        at = torch.arange(q.shape[3])
        t, s = at[:, None], at[None]
        log = flex.score_mod(variant, made)(q @ k.transpose(-1, -2), torch.zeros(()), heads, t, s)
        seen = s <= t if variant.far is not None else naive.is_near(variant, t, s)
        log = log.masked_fill(~seen, -torch.inf)
        return flex.scaled(variant, log.softmax(-1) @ v, log.logsumexp(-1))

    monkeypatch.setattr(flex, "sums", dense)
    y = attention(**given, variant=text, rope=100.0, backend="flex")
    dy = torch.randn_like(y)
    y.backward(dy)
    values = {name: x.detach().numpy() for name, x in given.items()}
    q, k, v = (values.pop(name) for name in "qkv")
    assert rms(y.detach(), layer(q, k, v, engine="reference", **values)) < 1e-10
    expected = layer.grad(q, k, v, dy.numpy(), engine="reference", **values)
    for name in trained:
        assert gradient_error(name, given[name].grad, expected) < 1e-8, name


@pytest.mark.parametrize("text, word", REFUSED.items())
def test_refusals_have_a_reason(text, word):
    layer = Layer(text, **SIZES)
    given = {name: x.float() for name, x in drawn(layer, time=5).items()}
    with torch.no_grad(), pytest.raises(ValueError, match=f"backend='flex' does not compute .*{word}"):
        attention(**given, variant=text, rope=100.0, backend="flex")


def test_every_preset_is_covered_or_has_a_reason():
    covered = covered_presets()
    assert {"softmax", "norm", "linear_elu"} <= set(covered)
    for name in set(termwise.presets()) - set(covered):
        assert len(flex.refusal(variant_of(Layer(name, **SIZES)))) > 20


def test_nonnegative_polynomials():
    def least(*dense, low=-np.inf, high=np.inf):
        orders = tuple(range(len(dense)))
        given = tuple(c * float(np.prod(range(1, n + 1))) for n, c in enumerate(dense))
        return flex._least(parts.Kernel("taylor", orders, given), low, high)

    assert least(1, 2, 1) == 0 and least(2, 2, 1) == pytest.approx(1) and least(0, 2, 1) == pytest.approx(-1)
    assert least(1, 1) == -np.inf and least(1, 1, low=-0.5, high=3) == 0.5 and least(1, 0, -1) == -np.inf
    assert least(1, 0, -1, low=-0.5, high=0.5) == 0.75


def test_padding_documents_heads_and_modules():
    texts = ["softmax", "taylor=0..2", "taylor=0..2 decay=fixed", "softmax window=3"]
    q, k, v = torch.randn(1, 9, 4, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)
    for more in ({"lengths": [6]}, {"cu_seqlens": [0, 2, 9]}):
        with torch.no_grad():
            y = attention(q, k, v, texts, backend="flex", **more)
        assert rms(y, attention(q, k, v, texts, **more)) < 1e-5
    module, x = Attention(16, 2, variant="taylor=0..2 out", backend="flex"), torch.randn(1, 5, 16)
    with torch.no_grad():
        expected = module(x)
        module.backend = "blocked"
        assert rms(expected, module(x)) < 1e-5


def test_bfloat16():
    q, k, v = torch.randn(3, 1, 20, 2, 16).bfloat16()
    for text in ("softmax", "taylor=0..4", "softmax window=4 far(taylor=0..2)"):
        y = attention(q, k, v, text, backend="flex")
        assert y.dtype == torch.bfloat16 and rms(y.float(), attention(q.float(), k.float(), v.float(), text)) < 2e-2


def test_no_backward_on_the_cpu():
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    with pytest.raises(ValueError, match="no backward pass on cpu"):
        attention(x, x, x, backend="flex")


def test_one_variant_is_compiled_once():
    """The compiler limits recompilations, so all calls of a variant must share one compiled function."""
    x = torch.randn(1, 12, 2, 8)
    graphs = []
    for _ in range(20):
        attention(x, x, x, "taylor=0..2 decay=fixed", backend="flex")
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1, graphs
