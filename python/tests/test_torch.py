"""The PyTorch operators against the reference, and with compilation, checkpointing, pickling and threads."""

import copy
import gc
import io
import math
import pickle

import numpy as np
import pytest
from conftest import ROOT, gradient_error, inputs, need, random_variants, rms
from test_convert import VARIANTS, drawn

import termwise
from termwise import Layer

try:
    import torch
except ImportError:
    torch = None
    need("torch", False, "PyTorch is not installed")

import termwise.torch
from termwise.torch import Attention, attention

SIZES = {"heads": 4, "kv_heads": 2, "dim": 16, "value_dim": 5, "rope": 100.0}


def tensors(layer, dtype, **sizes):
    q, k, v, extras = inputs(layer, dtype=np.float64, **sizes)
    return {name: torch.tensor(x, dtype=dtype, requires_grad=True) for name, x in {"q": q, "k": k, "v": v, **extras}.items()}


def arrays(given):
    return {name: x.detach().double().numpy() for name, x in given.items()}


@pytest.mark.parametrize("text", [*termwise.presets(), *random_variants(200)])
def test_operator_is_the_reference(text):
    layer = Layer(text, **SIZES)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        given = tensors(layer, dtype)
        dy = torch.tensor(np.random.default_rng(3).standard_normal((2, 23, 4, 5)), dtype=dtype)
        y = attention(**given, variant=text, rope=100.0)
        y.backward(dy)
        values = arrays(given)
        q, k, v = (values.pop(name) for name in "qkv")
        expected = layer(q, k, v, engine="reference", **values)
        gradients = layer.grad(q, k, v, dy.double().numpy(), engine="reference", **values)
        assert rms(y.detach(), expected) < bound
        for name, x in given.items():
            if x.requires_grad:
                # Gradients of scalars are sums of many terms of both signs.
                assert gradient_error(name, x.grad, gradients) < 5 * bound, name


def test_softmax_is_that_of_torch():
    q, k, v = torch.randn(3, 2, 50, 4, 16)
    theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    assert rms(attention(q, k, v), theirs.transpose(1, 2)) < 1e-6


@pytest.mark.parametrize("text", ["softmax", "taylor=0..2,coef=learned out decay=softplus conv=3 norm=rms", "norm in post", "linear over=position window=3"])
def test_gradcheck(text):
    layer = Layer(text, **SIZES)
    given = tensors(layer, torch.float64, batch=1, time=4)
    names = list(given)
    assert torch.autograd.gradcheck(lambda *values: attention(**dict(zip(names, values)), variant=text, rope=100.0), tuple(given.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 7])])
def test_opcheck(dtype, lengths):
    text = "softmax out norm=rms"
    given = tensors(Layer(text, **SIZES), dtype, time=7)
    q, k, v, *extras = given.values()
    arguments = (q, k, v, extras, lengths, None, text, 100.0, "auto", False, True)
    torch.library.opcheck(torch.ops.termwise.attention.default, arguments)
    y, *saved = torch.ops.termwise.attention(*arguments)
    plain = [x.detach() for x in (q, k, v)]
    backward = (*plain, [x.detach() for x in extras], lengths, None, [x.detach() for x in saved], torch.ones_like(y), text, 100.0, "auto", False)
    # The backward operator is not differentiable.
    torch.library.opcheck(torch.ops.termwise.attention_backward.default, backward)


@pytest.mark.parametrize("engine", ["auto", "torch", "reference"])
@pytest.mark.parametrize("text", ["softmax out", "taylor=0..2 decay=softplus norm=l2", "gated_deltanet"])
def test_packed_sequences_are_computed_separately(engine, text):
    layer = Layer(text, **SIZES)
    given = tensors(layer, torch.float32, batch=1, time=19)
    logits = {"q", "k", "v", *(extra.name for extra in layer.extras if extra.logits)}
    bounds = [0, 1, 8, 19]

    def part(start, end):
        return {name: x[:, start:end] if name in logits else x for name, x in given.items()}

    y = attention(**given, variant=text, rope=100.0, cu_seqlens=torch.tensor(bounds), engine=engine)
    parts = torch.cat([attention(**part(*pair), variant=text, rope=100.0) for pair in zip(bounds, bounds[1:])], 1)
    assert rms(y.detach(), parts.detach()) < 1e-5
    for name, x in given.items():
        a, b = (torch.autograd.grad((z * z).sum(), x, retain_graph=True)[0] for z in (y, parts))
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4), name


def test_boundaries_of_packed_sequences_are_checked():
    x = torch.randn(1, 5, 2, 4)
    for bounds, words in (([0, 3], "increase from 0 to 5"), ([1, 5], "increase"), ([0, 3, 3, 5], "increase"), ([0.0, 5.0], "integers")):
        with pytest.raises(ValueError, match=words):
            attention(x, x, x, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="batch of 1"):
        attention(x.expand(2, -1, -1, -1), x.expand(2, -1, -1, -1), x.expand(2, -1, -1, -1), cu_seqlens=[0, 5])
    with pytest.raises(ValueError, match="give one of them"):
        attention(x, x, x, cu_seqlens=[0, 5], lengths=[5])


@pytest.mark.parametrize("text", ["softmax", "taylor=0..2 out", "gated_deltanet"])
def test_states_continue_a_sequence(text):
    layer = Layer(text, **SIZES)
    given = {name: x.detach() for name, x in tensors(layer, torch.float32, time=9).items()}
    logits = {"q", "k", "v", *(extra.name for extra in layer.extras if extra.logits)}

    def part(start, end):
        return {name: x[:, start:end] if name in logits else x for name, x in given.items()}

    whole = attention(**given, variant=text, rope=100.0)
    first, state = attention(**part(0, 4), variant=text, rope=100.0, output_final_state=True)
    rest = attention(**part(4, 9), variant=text, rope=100.0, initial_state=state)
    assert state.positions == [4, 4] and rms(torch.cat([first, rest], 1), whole) < 1e-5
    with pytest.raises(ValueError, match="states have no gradients"):
        attention(**{**given, "q": given["q"].requires_grad_()}, variant=text, output_final_state=True)


def test_a_trained_module_decodes():
    module = Attention(16, 2, variant="taylor=0..2 out conv=3", rope=100.0)
    x = torch.randn(2, 7, 16)
    expected, state = module(x), None
    for t in range(7):
        y, state = module.step(x[:, t : t + 1], state)
        assert rms(y, expected[:, t : t + 1].detach()) < 1e-5
    assert state.is_constant and state.positions == [7, 7]


def test_scale():
    q, k, v = torch.randn(3, 1, 6, 2, 4)
    assert torch.equal(attention(q, k, v, scale=0.25), attention(q, k, v, "softmax scale=0.25"))
    with pytest.raises(ValueError, match="already has a scale"):
        attention(q, k, v, "softmax scale=0.5", scale=0.25)


def test_no_copies_of_contiguous_float32(monkeypatch):
    """The engine receives the memory of the tensors, including strided slices of a packed tensor."""
    seen = []
    real = termwise._attention._layer("softmax", 4, 4, 16, 16, None)

    class Spy:
        def forward(self, given, *rest):
            seen.append([x.__array_interface__["data"][0] for x in given[:3]])
            return real._core.forward(given, *rest)

    class Fake:
        _core, extras, variants = Spy(), (), real.variants

        def _extras(self, extras):
            return []

    monkeypatch.setattr(termwise.torch._attention, "_find", lambda *key: Fake())
    q, k, v = torch.randn(3, 2, 8, 4, 16)
    y = attention(q, k, v)
    packed = torch.randn(2, 8, 3, 4, 16)
    attention(*packed.unbind(2))
    assert seen == [[x.data_ptr() for x in (q, k, v)], [x.data_ptr() for x in packed.unbind(2)]]
    monkeypatch.undo()
    assert torch.equal(attention(q, k, v), y)


def test_bfloat16_is_computed_in_float32():
    q, k, v = torch.randn(3, 1, 30, 2, 8).bfloat16()
    q.requires_grad_()
    y = attention(q, k, v, "taylor=0..4")
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, attention(q.float(), k.float(), v.float(), "taylor=0..4").bfloat16())
    y.sum().backward()
    assert q.grad.dtype == torch.bfloat16


def test_compiled_and_checkpointed():
    module = termwise.torch.Attention(32, 4, kv_heads=2, variant="taylor=0..2 out norm=rms conv=3")
    x = torch.randn(2, 20, 32, requires_grad=True)

    def gradients(function):
        module.zero_grad()
        x.grad = None
        y = function(x)
        y.square().sum().backward()
        return [y.detach(), x.grad.clone(), *(p.grad.clone() for p in module.parameters())]

    expected = gradients(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for found in (gradients(compiled), gradients(lambda x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False))):
        for a, b in zip(found, expected, strict=True):
            assert rms(a, b) < 1e-6
    # Other lengths.
    for time in (5, 33):
        other = torch.randn(1, time, 32)
        assert rms(compiled(other).detach(), module(other).detach()) < 1e-6


def test_two_forwards_before_one_backward():
    q, k, v = torch.randn(3, 1, 40, 2, 8)
    q.requires_grad_()
    first, second = attention(q, k, v), attention(q * 2, k, v)
    (grad,) = torch.autograd.grad(first.sum(), q, retain_graph=True)
    assert torch.equal(grad, torch.autograd.grad(attention(q, k, v).sum(), q)[0])
    second.sum().backward()


@pytest.mark.parametrize("text", ["softmax", "taylor=0..2"])
@pytest.mark.parametrize("engine, mode", [("auto", "auto"), ("reference", "auto"), ("torch", "auto"), ("torch", "chunk=2"), ("torch", "naive")])
def test_second_derivatives_are_refused(text, engine, mode):
    if text == "softmax" and mode in ("chunk=2", "naive"):
        # Softmax has no chunked mode, and autograd differentiates its naive formula any number of times.
        return
    x, w = torch.randn(1, 4, 1, 4, requires_grad=True, dtype=torch.float64), torch.randn(4, 4, requires_grad=True, dtype=torch.float64)
    q = x @ w
    (grad,) = torch.autograd.grad((attention(q, q, q, text, engine=engine, mode=mode) ** 2).sum(), x, create_graph=True)
    # Part of the second derivative depends on w only; it must not be returned as the whole.
    with pytest.raises(RuntimeError):
        (grad**2).sum().backward()


def test_modules_are_copied_and_pickled(stories):
    for module, x in (
        (termwise.torch.Attention(32, 4, variant="taylor=0..2 out", rope=100.0), torch.randn(2, 7, 32)),
        (termwise.torch.Model.load(stories), torch.tensor([[1, 2, 3]])),
    ):
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        averaged = torch.optim.swa_utils.AveragedModel(module).module
        for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False), averaged):
            assert again is not module and torch.equal(again(x), module(x))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
@pytest.mark.parametrize("engine", ["auto", "torch", "reference"])
def test_empty_batches_and_sequences(shape, engine):
    q, k, v = torch.randn(*shape, 4, 8), torch.randn(*shape, 2, 8), torch.randn(*shape, 2, 3)
    gate = torch.randn(*shape, 4, requires_grad=True)
    for x in (q, k, v):
        x.requires_grad_()
    y = attention(q, k, v, "softmax out", engine=engine, out_gate=gate)
    y.sum().backward()
    assert y.shape == (*shape, 4, 3) and all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v, gate))
    arrays = [x.detach().numpy() for x in (q, k, v)]
    assert termwise.attention(*arrays).shape == y.shape
    assert termwise.attention_grad(*arrays, y.detach().numpy())["k"].shape == k.shape
    with pytest.raises(ValueError, match="heads and dimension above 0"):
        attention(q[:, :, :0], k[:, :, :0], v[:, :, :0])


def _decoded(module, x, answers):
    answers.put([module(x).detach().numpy(), module.step(x)[1]])


def test_modules_and_states_go_to_spawned_processes():
    """A module is sent to a spawned process, and its state is returned."""
    module, x = Attention(16, 2, variant="taylor=0..2 out", rope=100.0), torch.randn(1, 5, 16)
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_decoded, args=(module, x[:, :4], answers))
    process.start()
    y, state = answers.get(timeout=120)
    process.join(60)
    whole = module(x).detach()
    assert rms(y, whole[:, :4]) < 1e-6 and rms(module.step(x[:, 4:], state)[0], whole[:, 4:]) < 1e-5


def test_variants_are_copied_and_pickled():
    for text in termwise.presets():
        variant = termwise.Variant(text)
        assert pickle.loads(pickle.dumps(variant)) == copy.deepcopy(variant) == copy.copy(variant) == variant


def test_a_state_of_another_layer_is_refused():
    """Its own variant and RoPE would be used, and those of the call would have no effect."""
    q, k, v = torch.randn(3, 2, 9, 2, 8)
    _, state = attention(q, k, v, "taylor=0..2", rope=100.0, output_final_state=True)
    attention(q, k, v, "taylor=0..2", rope=100.0, initial_state=state)
    for variant, rope in [("taylor=0..4", 100.0), ("taylor=0..2", 200.0), ("taylor=0..2", None)]:
        with pytest.raises(ValueError, match="initial_state is one of Layer"):
            attention(q, k, v, variant, rope=rope, initial_state=state)
    with pytest.raises(TypeError, match="must be a termwise.State, found str"):
        attention(q, k, v, initial_state="file")


def test_forward_mode_is_refused():
    """The operators have no forward-mode derivative, and PyTorch would return zeros."""
    x = torch.randn(1, 3, 1, 4)
    with pytest.raises(ValueError, match="forward-mode derivatives are not supported"):
        torch.func.jvp(lambda q: attention(q, x, x), (x,), (x,))


def test_the_torch_engine_breaks_the_graph_of_the_compiler():
    """The reason is in docs/python.md: its backward pass calls autograd. Without fullgraph it works."""
    module = Attention(16, 2, variant="taylor=0..2 norm=rms", engine="torch")
    x = torch.randn(1, 9, 16, requires_grad=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    expected = module(x)
    compiled = torch.compile(module, backend="aot_eager")
    y = compiled(x)
    assert rms(y.detach(), expected.detach()) < 1e-6
    assert rms(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0]) < 1e-5


def test_deleted_layers_leave_the_registry(stories):
    before = len(termwise.torch._attention._registered)
    layers = [Layer("softmax", heads=2, dim=4) for _ in range(5)]
    assert len({termwise.torch._attention.register(layer) for layer in layers * 2}) == 5
    assert len(termwise.torch._attention._registered) == before + 5
    del layers
    gc.collect()
    assert len(termwise.torch._attention._registered) == before


def test_nonpositive_denominators_cause_a_warning():
    x = torch.randn(1, 30, 2, 8)
    with pytest.warns(RuntimeWarning, match="denominator of batch row 0") as caught:
        attention(4 * x, -x, x, "taylor=0..1")
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("text", [*termwise.presets(), "softmax in out post decay=mamba conv=4 over=sum,sink qk_norm=rms"])
def test_a_module_for_every_variant(text):
    module = termwise.torch.Attention(24, 4, kv_heads=2, dim=16, variant=text)
    x = torch.randn(2, 9, 24)
    y = module(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)
    names = set(dict(module.named_parameters()))
    assert {f"{e.tensor}.weight" if e.logits else e.tensor for e in module.layer.extras} <= names
    again = termwise.torch.Attention(24, 4, kv_heads=2, dim=16, variant=text)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x), y)
    # Causality: later inputs do not change earlier outputs.
    x[:, 5:] += 1
    assert rms(module(x)[:, :5].detach(), y[:, :5].detach()) < 1e-5


@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda a: a.update(q=a["q"][0]), ValueError, "expected [batch, time, heads, dimension] with"),
        (lambda a: a.update(q=a["q"].transpose(1, 2)), ValueError, "heads come after time"),
        (lambda a: a.update(q=a["q"].double()), TypeError, "one dtype"),
        (lambda a: a.update(q=a["q"].int()), TypeError, "convert it to float32"),
        (lambda a: a.update(q=a["q"].numpy()), TypeError, "torch.as_tensor"),
        (lambda a: a.update(q=a["q"].to_sparse()), TypeError, "to_dense"),
        (lambda a: a.update(variant="softmax out"), TypeError, "out_gate"),
        (lambda a: a.update(variant="softmax out", out_gate=torch.zeros(2, 5, 3)), ValueError, "out_gate has shape (2, 5, 3), expected (2, 5, 2)"),
        (lambda a: a.update(lengths=[9, 9]), ValueError, "from 0 to 5, found [9, 9]"),
        (lambda a: a.update(lengths=[5, -1]), ValueError, "from 0 to 5, found [5, -1]"),
        (lambda a: a.update(lengths=[4.7, 3.2]), ValueError, "integers"),
        (lambda a: a.update(lengths=torch.tensor([4.7, 3.2])), ValueError, "integers"),
        (lambda a: a.update(attn_mask=True), TypeError, "padding is given by lengths"),
        (lambda a: a.update(is_causal=True), TypeError, "always causal"),
        (lambda a: a.update(variant=None), TypeError, "found NoneType"),
        (lambda a: a.update(lengths=[1]), ValueError, "lengths"),
        (lambda a: a.update(engine="cuda"), ValueError, "'torch'"),
        (lambda a: a.update(mode="chunks"), ValueError, "chunk"),
        (lambda a: a.update(backend="triton"), ValueError, "'blocked' or 'flex'"),
        (lambda a: a.update(backend="flex", engine="fused"), ValueError, "engine='torch'"),
        (lambda a: a.update(backend="flex", mode="chunk"), ValueError, "needs mode='parallel'"),
    ],
)
def test_invalid_arguments_are_explained(change, error, words):
    given = dict(zip("qkv", torch.randn(3, 2, 5, 2, 4)))
    change(given)
    with pytest.raises(error) as raised:
        attention(**given)
    assert words in str(raised.value)


def test_sizes_of_a_module_are_checked():
    with pytest.raises(ValueError, match="hidden=30 is not a multiple of heads=4"):
        termwise.torch.Attention(30, 4)


@pytest.mark.parametrize("text", VARIANTS.values())
def test_memory_of_fixed_size(text):
    """Outputs equal those for arrays. Inference-only variants raise an error before the computation if gradients are required."""
    layer, q, k, v, extras = drawn(next(name for name, other in VARIANTS.items() if other == text))
    expected, without = layer(q, k, v, **extras), layer.variants[0].inference_only
    q, k, v = (torch.from_numpy(x) for x in (q, k, v))
    extras = {name: torch.from_numpy(x) for name, x in extras.items()}
    assert rms(attention(q, k, v, text, **extras), expected) < 1e-6
    assert rms(attention(*(x.double() for x in (q, k, v)), text, **{name: x.double() for name, x in extras.items()}), expected) < 1e-5
    if without is None:
        assert rms(attention(q, k, v, text, engine="torch", **extras), expected) < 1e-5
    else:
        with pytest.raises(ValueError, match="needs the KV store of the native engine"):
            attention(q, k, v, text, engine="torch", **extras)
    q.requires_grad_()
    if without is None:
        attention(q, k, v, text, **extras).sum().backward()
        assert bool(q.grad.isfinite().all())
        return
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match=f"`{without}` is inference-only"):
            attention(*(x.to(dtype) for x in (q, k, v)), text, **{name: x.to(dtype) for name, x in extras.items()})
    with torch.no_grad():
        assert rms(attention(q, k, v, text, **extras), expected) < 1e-6


def test_other_devices_have_the_torch_engine():
    class Elsewhere:
        type = "cuda"

        def __str__(self):
            return "cuda:0"

    class Far(torch.Tensor):
        device = Elsewhere()

    q = torch.randn(1, 3, 1, 4)
    with pytest.raises(ValueError, match="q is on cuda:0 and k on cpu"):
        attention(q.as_subclass(Far), q, q)
    far = q.as_subclass(Far)
    with pytest.raises(ValueError, match=r"q is on cuda:0.*engine='torch'.*\.cpu\(\)"):
        attention(far, far, far, engine="fused")


def test_layouts_and_mixtures_of_gradients():
    q, k, v = torch.randn(3, 2, 2, 9, 4)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    expected = attention(*(x.contiguous() for x in turned))
    assert torch.equal(attention(*turned), expected)
    # Only some inputs require gradients.
    for wanted in ([0], [1], [2], [0, 2]):
        given = [x.clone().contiguous().requires_grad_(i in wanted) for i, x in enumerate(turned)]
        attention(*given).sum().backward()
        assert [x.grad is not None for x in given] == [i in wanted for i in range(3)]
    with torch.no_grad():
        assert not attention(*(x.requires_grad_() for x in given)).requires_grad
    expanded = torch.randn(1, 1, 1, 4).expand(2, 5, 3, 4)
    assert torch.equal(attention(expanded, expanded, expanded), attention(*[expanded.contiguous()] * 3))


def test_an_expanded_gradient():
    q = torch.randn(2, 5, 3, 4, requires_grad=True)
    attention(q, q, q).sum().backward()
    assert torch.isfinite(q.grad).all()


def test_it_trains():
    torch.manual_seed(0)
    module = termwise.torch.Attention(16, 2, variant="taylor=0..2 norm=rms")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    x = torch.randn(4, 12, 16)
    target = torch.cat([torch.zeros(4, 1, 16), x[:, :-1]], 1)
    losses = []
    for _ in range(60):
        loss = (module(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0] and math.isfinite(losses[-1])


def test_the_tutorial(tmp_path, monkeypatch, capsys):
    from test_docs import run

    monkeypatch.chdir(tmp_path)
    run((ROOT / "docs" / "python.md").read_text().split("<!-- needs torch -->")[1].split("<!-- needs transformers -->")[0], capsys)


def test_ten_threads_train_at_once():
    """Forward and backward in ten threads: bit-identical to a single thread."""
    import threading

    def gradients(seed):
        draw = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 30 + seed, 2, 8, generator=draw, requires_grad=True) for _ in range(3))
        attention(q, k, v, ["softmax", "taylor=0..2 norm=rms", "norm"][seed % 3], **({"norm_weight": torch.ones(8)} if seed % 3 == 1 else {})).square().sum().backward()
        return [x.grad for x in (q, k, v)]

    expected, found = [gradients(seed) for seed in range(10)], [None] * 10

    def work(seed):
        for _ in range(5):
            found[seed] = gradients(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(10)]
    [thread.start() for thread in threads]
    [thread.join(120) for thread in threads]
    assert all(torch.equal(a, b) for x, y in zip(found, expected) for a, b in zip(x, y, strict=True))


def test_a_forked_worker_computes():
    """As the workers of a data loader do, after the parent has computed."""
    x = torch.randn(2, 40, 2, 8)
    expected = attention(x, x, x, "taylor=0..2")

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return attention(x, x, x, "taylor=0..2")

    for y in torch.utils.data.DataLoader(Data(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60):
        assert torch.equal(y, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_propagate(bad):
    """Every position that sees one shows it. Those before it in the same tile may do so, too: a weight of zero times NaN is NaN."""
    q, k, v = torch.randn(3, 1, 20, 2, 8)
    expected = attention(q, k, v, "taylor=0..2")
    v[0, 11, 0, 3] = bad
    y = attention(q, k, v, "taylor=0..2")
    others = [0, 1, 2, 4, 5, 6, 7]
    assert not torch.isfinite(y[:, 11:, 0, 3]).any()
    assert torch.equal(y[..., others], expected[..., others]) and torch.equal(y[:, :, 1], expected[:, :, 1])


def test_freed_and_modified_graphs_raise():
    q, k, v = torch.randn(3, 1, 9, 2, 8)
    q.requires_grad_()
    y = attention(q, k, v)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    y = attention(q, k, v)
    with torch.no_grad():
        q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
