"""TERMWISE_REQUIRE is read as by the Rust tests and by .ci/python."""

import pytest
from conftest import need


@pytest.mark.parametrize(("required", "fails"), [("", False), ("torch", False), ("flowers", True), ("torch, flowers", True), ("all", True)])
def test_a_missing_need_skips_or_fails(monkeypatch, required, fails):
    monkeypatch.setenv("TERMWISE_REQUIRE", required)
    need("flowers", True, "there are some")
    with pytest.raises(pytest.fail.Exception if fails else pytest.skip.Exception, match="flowers"):
        need("flowers", False, "there are none")
