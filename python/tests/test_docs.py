"""Examples in documentation are run."""

import doctest
import importlib.util
import re

import pytest
from conftest import ROOT

MODULES = ["termwise", "termwise._attention", "termwise._results", "termwise._model", "termwise._commands"]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0


def test_the_reference_is_up_to_date():
    found = importlib.util.spec_from_file_location("api", ROOT / "python" / "api.py")
    api = importlib.util.module_from_spec(found)
    found.loader.exec_module(api)
    assert api.PAGE.read_text() == api.page(), "docs/python-api.md is of another version: run python python/api.py"


def blocks(text: str) -> list[str]:
    """Code blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_tutorial(tmp_path, monkeypatch, capsys):
    """Block after block in one namespace, as in a notebook; comments `# → text` say what a line prints."""
    tutorial = (ROOT / "docs" / "python.md").read_text()
    core, rest = tutorial.split("<!-- needs torch -->")
    monkeypatch.chdir(tmp_path)
    run(core, capsys)
    assert len(blocks(core)) >= 6 and blocks(rest)


def run(text, capsys):
    namespace = {}
    for number, block in enumerate(blocks(text)):
        capsys.readouterr()
        exec(compile(block, f"docs/python.md, block {number}", "exec"), namespace)
        printed, expected = capsys.readouterr().out.split(), " ".join(re.findall(r"# → (.*)", block)).split()
        assert printed == expected, f"block {number} prints {' '.join(printed)!r}:\n{block}"
