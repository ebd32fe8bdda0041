"""Attention on NumPy arrays: every engine against independent formulas and against the other engines."""

import math
import warnings

import numpy as np
import pytest
from conftest import ROOT, gradient_error, inputs, random_variants, rms

import termwise
from termwise import Layer, Variant, attention, attention_grad


def softmax(q, k, v, window=None, sinks=0):
    """Softmax attention in NumPy."""
    batch, time, heads, dim = q.shape
    group = heads // k.shape[2]
    y = np.zeros((batch, time, heads, v.shape[3]))
    for b in range(batch):
        for h in range(heads):
            for t in range(time):
                seen = [s for s in range(t + 1) if window is None or t - s < window or s < sinks]
                x = np.array([q[b, t, h] @ k[b, s, h // group] for s in seen]) / math.sqrt(dim)
                w = np.exp(x - x.max())
                y[b, t, h] = (w / w.sum()) @ np.array([v[b, s, h // group] for s in seen])
    return y


def taylor(q, k, v, orders):
    """Attention with weights Σ x^n/n!, divided by their sum."""
    time, dim = q.shape[1], q.shape[3]
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    x = np.einsum("bthd,bshd->bhts", q, k) / math.sqrt(dim)
    w = sum(x**n / math.factorial(n) for n in orders) * np.tril(np.ones((time, time)))
    return np.einsum("bhts,bshe->bthe", w / w.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("dtype, bound", [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_formulas(dtype, bound):
    layer = Layer(heads=4, kv_heads=2, dim=6, value_dim=5)
    q, k, v, _ = inputs(layer, dtype=dtype)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    assert rms(attention(q, k, v), softmax(*wide)) < bound
    assert rms(attention(q, k, v, "softmax window=4 sinks=2"), softmax(*wide, window=4, sinks=2)) < bound
    assert rms(attention(q, k, v, "taylor=0..4"), taylor(*wide, range(5))) < bound
    mixed = attention(q, k, v, ["softmax", "taylor=0..2", "softmax", "taylor=0..2"])
    assert rms(mixed[:, :, 1::2], taylor(*wide, range(3))[:, :, 1::2]) < bound
    assert rms(mixed[:, :, ::2], softmax(*wide)[:, :, ::2]) < bound
    # With RoPE, a score depends on the distance only.
    same = [np.repeat(x[:, :1], x.shape[1], axis=1) for x in (q, k)]
    turned = attention(*same, v, rope=100.0)
    assert rms(turned, attention(*same, v)) > 1e-3


def reached(text):
    return Layer(text, heads=4, kv_heads=2, dim=16, value_dim=5, rope=100.0)


@pytest.mark.parametrize("text", [*termwise.presets(), *random_variants(60)])
def test_float32_is_the_reference(text):
    layer = reached(text)
    q, k, v, extras = inputs(layer)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    wide_extras = {name: x.astype(np.float64) for name, x in extras.items()}
    dy = np.random.default_rng(1).standard_normal((*q.shape[:3], 5))
    expected, gradients = layer(*wide, **wide_extras), layer.grad(*wide, dy, **wide_extras)
    assert rms(layer(q, k, v, **extras), expected) < 1e-5
    for name, gradient in layer.grad(q, k, v, dy.astype(np.float32), **extras).items():
        assert gradient.shape == gradients[name].shape
        assert gradient_error(name, gradient, gradients) < 5e-5, name


def accepted_pairs():
    """Variant strings of the pairs that docs/reference/combinations.md marks as working, with the parts that they require."""
    lines = (ROOT / "docs" / "reference" / "combinations.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and "`" in line]
    required = {"sinks": ["window=3"], "chosen": ["window=3"], "bits": ["window=3"], "far": ["window=3"], "write": ["over=none", "qk_norm=l2"]}

    def key(word):
        return word.replace("(", "=").split("=")[0]

    for i, row in enumerate(rows):
        for j in range(i + 1, len(rows)):
            if row[2 + j] != "+":
                continue
            words = [row[1].strip("`"), rows[j][1].strip("`")]
            needs = [word for own in words for word in (["out"] if own == "post=out" else required.get(key(own), []))]
            for word in needs:
                if all(key(word) != key(other) for other in words):
                    words.append(word)
            yield " ".join(words)


def test_every_accepted_pair_of_parts_is_the_reference():
    pairs = list(accepted_pairs())
    assert len(pairs) > 300
    for text in pairs:
        layer = Layer(text, heads=2, kv_heads=1, dim=4, value_dim=3, rope=100.0)
        q, k, v, extras = inputs(layer, batch=1, time=7)
        wide = [x.astype(np.float64) for x in (q, k, v)]
        expected = layer(*wide, **{name: x.astype(np.float64) for name, x in extras.items()})
        assert rms(layer(q, k, v, **extras), expected) < 1e-4, text


def test_gradients_are_differences():
    layer = reached("taylor=0..2,coef=learned out decay=softplus conv=3 norm=rms")
    q, k, v, extras = inputs(layer, time=5, dtype=np.float64)
    values = {"q": q, "k": k, "v": v, **extras}
    dy = np.random.default_rng(1).standard_normal((*q.shape[:3], 5))
    gradients = layer.grad(q, k, v, dy, **extras)
    rng = np.random.default_rng(2)
    for name, x in values.items():
        direction = rng.standard_normal(x.shape)
        up, down = ((layer(**{**values, name: x + h * direction}) * dy).sum() for h in (1e-6, -1e-6))
        assert abs((up - down) / 2e-6 - (gradients[name] * direction).sum()) < 1e-6 * (1 + abs(up)), name


def test_memory_layouts():
    layer = Layer(heads=2, dim=4)
    packed = np.random.default_rng(0).standard_normal((2, 9, 3, 2, 4), dtype=np.float32)
    q, k, v = (packed[:, :, i] for i in range(3))
    expected = layer(*(np.ascontiguousarray(x) for x in (q, k, v)))
    assert np.array_equal(layer(q, k, v), expected)
    transposed = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v)]
    assert np.array_equal(layer(*transposed), expected)
    backwards = [x[:, ::-1][:, ::-1] for x in (q, k, v)]
    assert np.array_equal(layer(*backwards), expected)
    reversed_time = [x[:, ::-1] for x in (q, k, v)]
    assert np.array_equal(layer(*reversed_time), layer(*(x.copy() for x in reversed_time)))
    dy = np.ones((2, 9, 2, 4), np.float32)
    strided = np.ones((2, 9, 2, 8), np.float32)[..., ::2]
    assert np.array_equal(layer.grad(q, k, v, strided)["q"], layer.grad(q, k, v, dy)["q"])


def test_modes_lengths_and_documents():
    layer = reached("taylor=0..2 decay=softplus")
    q, k, v, extras = inputs(layer, batch=2, time=64)
    whole = layer(q, k, v, mode="parallel", **extras)
    assert rms(layer(q, k, v, mode="chunk=16", **extras), whole) < 1e-5
    short = layer(q, k, v, lengths=[10, 64], **extras)
    assert not short[0, 10:].any() and np.array_equal(short[1], layer(q, k, v, lengths=[64, 64], **extras)[1])
    parts = layer(q, k, v, documents=[0, 20, 64, 128], **extras)
    second = layer(q[:1, 20:], k[:1, 20:], v[:1, 20:], **{name: x[:1, 20:] for name, x in extras.items()})
    assert rms(parts[0, 20:], second[0]) < 1e-5


def unaligned(x):
    """A copy at an address that is one byte off alignment."""
    memory = np.zeros(x.nbytes + 1, np.uint8)
    shifted = memory[1:].view(x.dtype).reshape(x.shape) if memory.ctypes.data % 4 == 0 else memory[:-1].view(x.dtype).reshape(x.shape)
    shifted[...] = x
    assert not shifted.flags.aligned
    return shifted


def test_unaligned_arrays_are_copied():
    x = np.random.default_rng(0).standard_normal((2, 5, 2, 4), dtype=np.float32)
    assert np.array_equal(attention(unaligned(x), x, unaligned(x)), attention(x, x, x))
    assert np.array_equal(attention_grad(x, x, unaligned(x), unaligned(x))["k"], attention_grad(x, x, x, x)["k"])


def test_nonpositive_denominators_cause_a_warning():
    x = np.random.default_rng(0).standard_normal((1, 30, 2, 8), dtype=np.float32)
    with pytest.warns(RuntimeWarning, match="odd"):
        layer = Layer("taylor=0..1", heads=2, dim=8)
    with pytest.warns(RuntimeWarning, match=r"denominator of batch row 0, head \d, position \d+ is -") as caught:
        layer(4 * x, -x, x)
    assert caught[0].filename == __file__
    with pytest.warns(RuntimeWarning, match="odd") as caught:
        attention(x, x, x, "taylor=0..3", rope=123.0)
    assert caught[0].filename == __file__
    with pytest.warns(RuntimeWarning, match="denominator of batch row 0"):
        layer.state().extend(4 * x, -x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(x, x, x, "taylor=0..2")


@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda a: a.update(q=a["q"][0]), ValueError, "expected [batch, time, heads, dimension]"),
        (lambda a: a.update(k=a["k"][:, :3]), ValueError, "k has shape [2, 3, 2, 4], expected [2, 5, 2, 4]"),
        (lambda a: a.update(v=a["v"][:, :, :1]), ValueError, "v has shape [2, 5, 1, 4], expected [2, 5, 2, 4]"),
        (lambda a: a.update(q=a["q"].astype(np.float64)), TypeError, "float32"),
        (lambda a: a.update(q=a["q"].astype(">f4")), TypeError, ">f4"),
        (lambda a: a.update(q=a["q"].astype(np.int64), k=a["k"].astype(np.int64)), TypeError, "convert them to float32"),
        (lambda a: a.update(q=a["q"].astype(np.float16)), TypeError, "float16"),
        (lambda a: a.update(q=a["q"][:, :, :0]), ValueError, "heads and dimension above 0"),
        (lambda a: a.update(q=a["q"][:0]), ValueError, "expected the same batch and time"),
        (lambda a: a.update(q="text"), (TypeError, ValueError), ""),
        (lambda a: a.update(variant="sofmax"), ValueError, "softmax"),
        (lambda a: a.update(variant="softmax out"), TypeError, "out_gate [batch, time, 2]"),
        (lambda a: a.update(out_gate=a["q"]), TypeError, "no inputs other than q, k and v"),
        (lambda a: a.update(variant="softmax out", out_gate=a["q"]), ValueError, "expected 20 values, found 80"),
        (lambda a: a.update(lengths=[1, 6]), ValueError, "length 6"),
        (lambda a: a.update(lengths=[1.5, 2]), ValueError, "non-negative integers"),
        (lambda a: a.update(documents=[0, 3]), ValueError, "boundaries"),
        (lambda a: a.update(mode="chunks"), ValueError, "chunk"),
        (lambda a: a.update(engine="cuda"), ValueError, "'fused' or 'reference'"),
        (lambda a: a.update(variant=3), TypeError, "found int"),
        (lambda a: a.update(variant=None), TypeError, "found NoneType"),
        (lambda a: a.update(lengths=[1, -1]), ValueError, "non-negative integers"),
        (lambda a: a.update(out=unaligned(a["q"])), ValueError, "y is not aligned"),
        (lambda a: a.update(out=a["q"]), ValueError, "shares memory"),
        (lambda a: a.update(out=np.zeros((2, 5, 2, 3), np.float32)), ValueError, "y has shape"),
    ],
)
def test_invalid_arguments_are_explained(change, error, words):
    x = np.random.default_rng(0).standard_normal((2, 5, 2, 4), dtype=np.float32)
    given = {"q": x, "k": x.copy(), "v": x.copy()}
    change(given)
    with pytest.raises(error) as raised:
        attention(**given)
    assert words in str(raised.value)


def test_read_only_inputs_are_read():
    x = np.ones((1, 3, 1, 4), np.float32)
    x.flags.writeable = False
    assert attention(x, x, x).sum() == 12
    with pytest.raises(ValueError, match="read-only"):
        attention(x, x, x, out=np.broadcast_to(np.float32(0), x.shape))


def test_out_receives_the_result():
    x = np.random.default_rng(0).standard_normal((2, 5, 2, 4), dtype=np.float32)
    out = np.full(x.shape, np.nan, np.float32)
    assert attention(x, x, x, out=out) is out and np.array_equal(out, attention(x, x, x))


def test_gradient_names():
    x = np.ones((1, 3, 2, 4))
    assert set(attention_grad(x, x, x, x, "softmax in out", in_gate=x[..., 0], out_gate=x[..., 0])) == {"q", "k", "v", "in_gate", "out_gate"}


def test_variants():
    assert Variant("softmax") == Variant("exp over=sum") and Variant("softmax") != Variant("linear")
    assert len({Variant("softmax"), Variant("exp over=sum")}) == 1
    assert str(Variant("taylor=0..4 norm=l2")) == "taylor=0..4 over=sum norm=l2"
    assert Variant("norm over=none").equals("norm over=length") and not Variant("norm").equals("softmax")
    assert Variant("softmax").state_bytes(64) is None
    # Order 0 and 1 of dimension 4: five rows of four values and a sum.
    assert Variant("taylor=0..1").state_bytes(4) == 5 * 5 * 4
    assert any("odd" in warning for warning in Variant("taylor=0..3").warnings)
    import pickle

    assert pickle.loads(pickle.dumps(Variant("norm"))) == Variant("norm")
    with pytest.raises(ValueError, match="did you mean"):
        Variant("taylr=0..4")
