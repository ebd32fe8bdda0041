"""Runs the examples in the documentation."""

import ast
import doctest
import importlib.util
import inspect
import re

import pytest
from conftest import ROOT

import termwise

MODULES = ["termwise", "termwise._attention", "termwise._errors", "termwise._results", "termwise._model", "termwise._commands"]
TORCH_MODULES = ["termwise.torch._attention"]


def script(name):
    """A script in the folder python, as a module."""
    found = importlib.util.spec_from_file_location(name, ROOT / "python" / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [*MODULES, *TORCH_MODULES])
def test_docstrings(name):
    if name in TORCH_MODULES:
        pytest.importorskip("torch")
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0


def test_docstrings_of_the_extension_module():
    """Their docstrings are in the stub."""
    stub = ast.parse((ROOT / "python" / "termwise" / "_core.pyi").read_text())
    texts = [ast.get_docstring(node) for node in ast.walk(stub) if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    examples = [text for text in texts if text and ">>>" in text]
    assert examples
    for text in examples:
        test = doctest.DocTestParser().get_doctest(text, {}, "_core.pyi", None, 0)
        assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test).failed == 0


def public_functions():
    for name in termwise.__all__:
        value = getattr(termwise, name)
        if inspect.isfunction(value):
            yield name, value


@pytest.mark.parametrize("name, function", list(public_functions()))
def test_public_functions_have_numpy_docstrings(name, function):
    """Every argument is described, and there is an example."""
    text = inspect.getdoc(function)
    assert "Examples\n--------" in text and ">>>" in text
    if name == "presets":
        return
    described = text.split("Parameters\n----------")[1].split("Returns\n-------")[0]
    names = {word.strip("*, ") for line in described.splitlines() if line and not line.startswith(" ") for word in line.partition(" : ")[0].split(",")}
    assert set(inspect.signature(function).parameters) == names


def test_settings_have_types():
    """The types match the table of the extension module."""
    rows = termwise._core.settings()
    made = script("settings")
    assert made.PAGE.read_text() == made.page(rows), "python/termwise/_settings.py is of another version: run python python/settings.py"
    assert set(termwise.Settings.__annotations__) | set(termwise.DataSettings.__annotations__) == {row[0] for row in rows} - {"from"}


def test_the_reference_is_up_to_date():
    api = script("api")
    assert api.PAGE.read_text() == api.page(), "docs/python-api.md is of another version: run python python/api.py"


def blocks(text: str) -> list[str]:
    """The Python code blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_tutorial(tmp_path, monkeypatch, capsys):
    """All blocks in one namespace, as in a notebook. A comment `# → text` is the output of its line."""
    tutorial = (ROOT / "docs" / "python.md").read_text()
    core, rest = tutorial.split("<!-- needs torch -->")
    monkeypatch.chdir(tmp_path)
    run(core, capsys)
    assert len(blocks(core)) >= 6 and blocks(rest)


STARTED = (ROOT / "docs" / "getting-started.md").read_text().split("\n## ")[1:]


@pytest.mark.parametrize("section", [part for part in STARTED if blocks(part)], ids=lambda part: part.splitlines()[0])
def test_getting_started(section, tmp_path, monkeypatch, capsys):
    """Every section runs independently of the others."""
    for needed in re.findall(r"<!-- needs (\w+) -->", section):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    run(section, capsys, "docs/getting-started.md")


def test_getting_started_is_the_first_page():
    summary = (ROOT / "docs" / "SUMMARY.md").read_text()
    assert re.search(r"\]\((.*?)\)", summary)[1] == "getting-started.md"
    for text in ((ROOT / "docs" / "getting-started.md").read_text(), (ROOT / "docs" / "python.md").read_text()):
        assert "pip install termwise" not in text or "not on PyPI yet" in text


def run(text, capsys, page="docs/python.md"):
    namespace = {}
    for number, block in enumerate(blocks(text)):
        capsys.readouterr()
        exec(compile(block, f"{page}, block {number}", "exec"), namespace)
        printed, expected = capsys.readouterr().out.split(), " ".join(re.findall(r"# → (.*)", block)).split()
        assert printed == expected, f"block {number} prints {' '.join(printed)!r}:\n{block}"
