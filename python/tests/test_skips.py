"""TERMWISE_REQUIRE has the same meaning as in the Rust tests and in .ci/python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import need


@pytest.mark.parametrize(("required", "fails"), [("", False), ("torch", False), ("flowers", True), ("torch, flowers", True), ("all", True)])
def test_a_missing_need_skips_or_fails(monkeypatch, required, fails):
    monkeypatch.setenv("TERMWISE_REQUIRE", required)
    need("flowers", True, "there are some")
    with pytest.raises(pytest.fail.Exception if fails else pytest.skip.Exception, match="flowers"):
        need("flowers", False, "there are none")


@pytest.mark.parametrize(("required", "fails"), [("", False), ("torch", False), ("all", True)])
def test_every_skip_is_a_failure_if_all_are_required(tmp_path, required, fails):
    """Includes skips that do not use `need`."""
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_one.py").write_text("import pytest\n\ndef test_one():\n    pytest.importorskip('no_such_module')\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", tmp_path], capture_output=True, text=True, env={**os.environ, "TERMWISE_REQUIRE": required}
    )
    assert (run.returncode != 0) is fails, run.stdout + run.stderr
    assert "1 tests were skipped" in run.stdout
