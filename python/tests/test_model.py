"""Models on disk, training and analyses, compared with the results of the program."""

import copy
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import pytest

import termwise


@pytest.fixture(scope="module")
def model(stories):
    return termwise.load(stories)


def test_logits_and_losses(model):
    text = "Once upon a time, there was a little girl"
    ids = model.encode(text)
    assert model.decode(ids).strip() == text
    logits = model.logits(ids)
    assert logits.shape == (1, len(ids), model.config["vocab_size"]) and logits.dtype == np.float32
    assert np.array_equal(model.logits(text), logits)
    wide = logits[0].astype(np.float64)
    expected = [np.log(np.exp(row - row.max()).sum()) + row.max() - row[label] for row, label in zip(wide[:-1], ids[1:])]
    losses = model.losses(text)
    assert np.allclose(losses[0, :-1], expected, atol=1e-4) and np.isnan(losses[0, -1])
    assert abs(model.loss(text) - np.mean(expected)) < 1e-5
    # Texts of different lengths in a batch: each gives the same result as alone.
    both = model.losses([text, "The dog"])
    assert np.allclose(both[0][:-1], losses[0][:-1], atol=1e-5)
    alone = model.losses("The dog")[0]
    assert np.allclose(both[1][: len(alone) - 1], alone[:-1], atol=1e-5) and np.isnan(both[1][len(alone) - 1 :]).all()


def test_texts(model, tmp_path):
    pieces = []
    text = model.generate("Once upon a time", max_tokens=20, on_text=pieces.append)
    assert "".join(pieces) == text and len(text) > 20
    # Greedy decoding.
    ids = model.encode("Once upon a time")
    for _ in range(5):
        ids.append(int(model.logits(ids)[0, -1].argmax()))
    assert (model.decode(model.encode("Once upon a time")) + text).startswith(model.decode(ids))
    assert model.generate(["Once upon a time", "The dog"], max_tokens=20)[0] == text
    drawn = {model.generate("Once", max_tokens=12, temperature=1.0, seed=seed) for seed in range(4)}
    assert len(drawn) > 1
    assert "there" in text
    assert model.generate("Once upon a time", max_tokens=20, stop="there") == text.split("there")[0]
    assert model.generate("Once upon a time", max_tokens=20, stop=["never written", "there"]) == text.split("there")[0]
    with pytest.raises(ValueError, match="temperature"):
        model.generate("a", temperature=-1)
    assert len(model.generate("Once", max_tokens=5, order=4)) > 0


def test_a_prompt_that_fails_does_not_stop_the_others(model):
    good = ["Once upon a time", "The dog"]
    texts = model.generate(good, max_tokens=10)
    too_long = "a " * (2 * model.config["max_position_embeddings"])
    for batch in (1, 8):
        with pytest.raises(termwise.GenerationError, match="prompt 2: .*context") as caught:
            model.generate([good[0], too_long, good[1]], max_tokens=10, batch=batch)
        assert caught.value.texts == [texts[0], None, texts[1]] and list(caught.value.errors) == [1]
    with pytest.raises(ValueError, match="context"):
        model.generate(too_long, max_tokens=10)


def test_other_attentions(model, tmp_path):
    ids = model.encode("Once upon a time, there was")
    cut = model.with_order(8)
    assert str(cut.variants[0][0]).startswith("taylor=0..8")
    difference = np.abs(cut.logits(ids) - model.logits(ids)).max()
    assert 0 < difference < 5
    cut.save(tmp_path / "cut")
    again = termwise.load(tmp_path / "cut")
    assert np.array_equal(again.logits(ids), cut.logits(ids)) and again.encode("Once") == model.encode("Once")
    with pytest.raises(ValueError, match="weights"):
        model.with_attention("softmax out")


def test_a_spectrum_is_that_of_the_program(model, stories, book, tmp_path):
    events = []
    found = model.spectrum(str(book), tokens=512, length=256, max_order=8, progress=events.append, cache=tmp_path / "cache")
    layers = model.config["num_hidden_layers"]
    assert events[-1]["done"] == events[-1]["of"] == layers
    flags = ["--data", str(book), "--tokens", "512", "--length", "256", "--max-order", "8", "--cache", str(tmp_path / "cache"), "--json", "--quiet"]
    printed = subprocess.run([sys.executable, "-m", "termwise", "spectrum", str(stories), *flags], capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    theirs = json.loads(printed.stdout)
    assert theirs["layers"] == found["layers"] and theirs["kind"] == found.kind == "spectrum"
    entropy = found.to_numpy("layers.heads.entropy.nats")
    assert entropy.shape == (layers, model.config["num_attention_heads"]) and np.isfinite(entropy).all()
    # repr and notebook display.
    page = found._repr_html_()
    assert page.startswith("<iframe srcdoc=") and "&lt;svg" in page and "<svg" not in page
    assert all(svg.startswith("<svg ") for svg in found.figures().values()) and found.figures()
    assert found.save(tmp_path / "page").is_file() and (tmp_path / "page" / "spectrum.json").is_file()
    assert "spectrum" in repr(found).lower()
    with pytest.raises(KeyError, match="there is no 'nothing'"):
        found.to_numpy("layers.nothing")
    by_text = model.spectrum(text="Once upon a time, there was a little girl." * 5, max_order=4, progress=False)
    assert by_text["text"]["windows"] == 1


def test_truncate_equals_the_program(model, stories, book, tmp_path):
    found = model.cut(
        str(book), orders=[2, 4], coefficients=["taylor"], layers=False, length=128, batch=2, batches=6, queries=64, progress=False,
        cache=tmp_path / "cache", budget=None,
    )  # fmt: skip
    flags = ["--orders", "2,4", "--coefficients", "taylor", "--no-map", "--no-plan", "--length", "128", "--batch", "2", "--batches", "6", "--queries", "64"]
    words = ["cut", str(stories), "--data", str(book), *flags, "--cache", str(tmp_path / "cache"), "--json", "--quiet"]
    printed = subprocess.run([sys.executable, "-m", "termwise", *words], capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    theirs = json.loads(printed.stdout)
    assert found.kind == theirs["kind"] == "cut" and found["finished"]
    assert (found["uncut"], found["curves"]) == (theirs["uncut"], theirs["curves"])
    assert [(curve["coefficients"], [point["order"] for point in curve["points"]]) for curve in found["curves"]] == [("taylor", [2, 4])]
    # For these scores, two terms are a poor approximation of exp.
    assert 1 < found["uncut"]["loss"] < 3 and found["curves"][0]["points"][0]["loss"] > found["uncut"]["loss"] + 1


def test_overwrite_keeps_the_old_run_until_the_new_one_has_a_checkpoint(tmp_path):
    old = termwise.train(tmp_path / "run", model="tiny", steps=2, log_every=1, progress=False)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    # Too short for the built-in data, which is known only when the first batch is drawn.
    with pytest.raises(ValueError, match="length"):
        termwise.train(tmp_path / "run", model="tiny", steps=2, length=8, overwrite=True, progress=False)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    events = []
    new = termwise.train(tmp_path / "run", steps=3, log_every=1, overwrite=True, progress=events.append, **{"from": old["checkpoint"]})
    assert new["step"] == 3 and [event["step"] for event in events if event["kind"] == "train"] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_training_sweeps_and_papers(tmp_path):
    events = []
    run = termwise.train(tmp_path / "run", model="tiny", steps=6, log_every=2, eval_every=6, progress=events.append)
    assert run["finished"] and run["step"] == 6 and run.kind == "run"
    assert {event["kind"] for event in events} >= {"train"} and any(event.get("step") == 6 for event in events)
    model = termwise.load(tmp_path / "run")
    assert repr(model).startswith("<Model run, step-00000006:") and model.parameters > 0 and len(model.generate("k3 v7 ? k3", max_tokens=1)) > 0
    with pytest.raises(ValueError, match="steps"):
        termwise.train(tmp_path / "other", step=3)
    plan = {"base": {"model": "tiny", "steps": 3}, "axes": {"attention": ["softmax", "norm"], "seed": [1]}}
    events.clear()
    swept = termwise.sweep(plan, tmp_path / "sweep", parallel=2, progress=events.append)
    assert [one["status"] for one in swept["runs"]] == ["finished"] * 2
    assert sum(event["event"] == "finished" for event in events) == 2
    with pytest.raises(ValueError, match="folder"):
        termwise.sweep(plan)
    found = termwise.separation(["softmax", "linear"], n=[100, 1000], draws=100, progress=False)
    assert found.to_numpy("points.n").tolist() in ([100, 1000, 100, 1000], [100, 100, 1000, 1000])
    with pytest.raises(ValueError, match="scale"):
        termwise.reproduce(scale="paper")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        termwise.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        termwise.train(tmp_path / "run", init_from=tmp_path / "nowhere", steps=1)


def copied(stories, folder):
    shutil.copytree(stories, folder)
    return {name: (folder / name).read_bytes() for name in ("tokenizer.json", "config.json")}


@pytest.mark.parametrize("loaded, saved", [("./m", "m"), ("m", "./m"), ("m", "ABSOLUTE"), ("ABSOLUTE", "m"), ("m", "link"), ("link", "m"), ("m", "m"), ("n/../m", "m")])
def test_a_model_is_saved_onto_itself(stories, tmp_path, monkeypatch, loaded, saved):
    monkeypatch.chdir(tmp_path)
    before = copied(stories, tmp_path / "m")
    (tmp_path / "n").mkdir()
    (tmp_path / "link").symlink_to("m")
    place = {"ABSOLUTE": str(tmp_path / "m")}
    model = termwise.load(place.get(loaded, loaded))
    expected = model.logits([[1, 2, 3]])
    model.save(place.get(saved, saved))
    assert (tmp_path / "m" / "tokenizer.json").read_bytes() == before["tokenizer.json"]
    again = termwise.load("m")
    assert again.encode("Once") == model.encode("Once") and np.array_equal(again.logits([[1, 2, 3]]), expected)
    # Another attention over the model that it was read from.
    model.with_order(4).save(place.get(saved, saved))
    assert str(termwise.load("m").variants[0][0]).startswith("taylor=0..4")
    assert (tmp_path / "m" / "tokenizer.json").read_bytes() == before["tokenizer.json"]


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_links_to_the_files_of_a_model_are_never_emptied(stories, tmp_path, link):
    before = copied(stories, tmp_path / "m")
    (tmp_path / "other").mkdir()
    for name in before:
        getattr(tmp_path / "other" / name, link)(tmp_path / "m" / name)
    termwise.load(tmp_path / "m").with_order(4).save(tmp_path / "other")
    for folder in ("m", "other"):
        assert (tmp_path / folder / "tokenizer.json").read_bytes() == before["tokenizer.json"]
    assert termwise.load(tmp_path / "other").encode("Once") == termwise.load(tmp_path / "m").encode("Once")


def test_models_are_copied_and_pickled(stories):
    """They are immutable: a copy is the model itself, and a pickle has its folder and its changes."""
    model = termwise.load(stories)
    for one in (model, model.with_order(4), model.with_attention(termwise.Variant("softmax window=8")).with_order(2)):
        assert copy.copy(one) is one and copy.deepcopy([one])[0] is one
        again = pickle.loads(pickle.dumps(one))
        assert again.variants == one.variants and again.encode("Once") == one.encode("Once")
        assert np.array_equal(again.logits([1, 2, 3]), one.logits([1, 2, 3]))
    error = termwise.GenerationError(["a", None], {1: "prompt 1 failed"})
    again = pickle.loads(pickle.dumps(error))
    assert (again.texts, again.errors, str(again)) == (error.texts, error.errors, str(error))


def test_a_loss_of_nothing_is_refused(model):
    with pytest.raises(ValueError, match="at least two tokens"):
        model.loss([[1]])
    with pytest.raises(ValueError, match="-100"):
        model.loss([[1, 2]], [[-100, -100]])
    assert np.isnan(model.losses([[1]])).all()


def test_arguments_are_those_of_python_code(tmp_path, book):
    whole = np.int64(2)
    run = termwise.train(tmp_path / "run", model="tiny", attention=termwise.Variant("norm"), steps=whole, lr=np.float64(1e-3), progress=False)
    assert run["step"] == 2 and "norm" in (tmp_path / "run" / "settings.toml").read_text()
    after = termwise.train(tmp_path / "after", init_from=tmp_path / "run", steps=whole, progress=False)
    assert after["finished"]
    with pytest.raises(ValueError, match="zero or more"):
        termwise.train(tmp_path / "bad", model="tiny", steps=-1, progress=False)
    with pytest.raises(ValueError, match="nowhere.txt"):
        termwise.train(tmp_path / "bad", model="tiny", data=tmp_path / "nowhere.txt", steps=1, progress=False)
    with pytest.raises(TypeError, match="object"):
        termwise.train(tmp_path / "bad", model="tiny", steps=object(), progress=False)
    assert termwise.separation("softmax", n=np.int64(100), draws=np.int32(50), progress=False)["points"][0]["n"] == 100
    with pytest.raises(ValueError, match="^n must be a non-negative integer, found 100.5$"):
        termwise.separation("softmax", n=100.5, draws=50, progress=False)
    with pytest.raises(ValueError) as raised:
        termwise.convert(tmp_path / "run", book, keyss=3)
    assert "keyss" in str(raised.value) and "--" not in str(raised.value)


def test_results_are_mappings_that_can_be_copied():
    found = termwise.separation("softmax", n=100, draws=50, progress=False)
    assert isinstance(found, Mapping) and dict(found.items()) == dict(found) and found.get("nothing", 3) == 3
    for again in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert again.to_json() == found.to_json() and repr(again) == repr(found) and again.kind == found.kind
    assert found.points == found["points"] and "points" in dir(found)
    with pytest.raises(AttributeError, match="its keys are"):
        found.pionts
    described = termwise.Variant("taylor=0..4 norm=l2").describe()
    # A notebook has HTML and Markdown.
    assert described._repr_markdown_() == described.to_markdown() and "taylor=0..4" in described._repr_markdown_() and "<iframe" in described._repr_html_()
    assert isinstance(described, termwise.Result) and "taylor=0..4" in repr(described) and "object at" not in repr(described)


def test_results_as_data_frames():
    pytest.importorskip("pandas")
    found = termwise.separation(["softmax", "linear"], n=100, draws=50, progress=False)
    frame = found.to_pandas("points")
    assert len(frame) == 2 and list(frame["n"]) == [100, 100] and frame.equals(found.to_pandas())
    for path in ("seed", "made_by"):
        with pytest.raises(ValueError, match="not a list of records; lists of records are points"):
            found.to_pandas(path)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"max_tokens": -1}, "max_tokens must be a non-negative integer, found -1"),
        ({"max_tokens": 2.5}, "max_tokens must be a non-negative integer, found 2.5"),
        ({"temperature": None}, "temperature must be a number, found None"),
        ({"top_k": "three"}, "top_k must be a non-negative integer, found \"three\""),
        ({"echo": 1}, "echo must be True or False, found 1"),
        ({"batch": [1]}, "batch must be a non-negative integer, found a list"),
        ({"seed": {}}, "seed must be a non-negative integer, found a dict"),
        ({"stop": [True]}, "stop must be a string, found True"),
    ],
)
def test_types_of_arguments_are_checked(model, arguments, message):
    with pytest.raises(ValueError) as raised:
        model.generate("Once", **arguments)
    assert str(raised.value) == message


def test_labels_and_lengths_are_checked(model):
    for length in (0, -4):
        with pytest.raises(ValueError, match=f"length must be at least 1, found {length}"):
            model.spectrum(text="Once upon a time", length=length, progress=False)
    for labels in ([[0.5, 1]], [[2**40, 1]], [[-7, 1]], [[1]]):
        with pytest.raises(ValueError, match=r"labels must be token ids or -100, of shape \(1, 2\)"):
            model.loss([[1, 2]], labels)
    assert model.loss([[1, 2]], np.array([[2, -100]])) == model.loss([1, 2])
    with pytest.raises(ValueError, match="leave lengths out"):
        model.logits(["a", "b"], lengths=[1, 1])
    for ids in ([-1], [0.5], [[[1]]]):
        with pytest.raises(ValueError, match="non-negative integers"):
            model.decode(ids)
    assert model.decode([]) == "" and model.decode(np.array(model.encode("Once"), np.int16)) == model.decode(model.encode("Once"))


def test_ids_are_checked(model):
    with pytest.raises(ValueError, match="non-negative integers"):
        model.logits([[-1]])
    with pytest.raises(ValueError):
        model.logits([[10**6]])
    with pytest.raises(ValueError, match="without empty dimensions"):
        model.logits(np.zeros((1, 0), np.int64))
