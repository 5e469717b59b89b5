"""Settings of an inventory become the TOML that Drover reads."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

FILE = Path(__file__).resolve().parents[2] / "ansible/filter_plugins/drover.py"


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drover_filters", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FILTERS = _module()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)  # TOML has no lone surrogates
PLAIN = st.booleans() | st.integers(-(2**40), 2**40) | TEXTS | st.lists(TEXTS | st.integers(0, 9), max_size=3)
TABLES = st.recursive(
    st.dictionaries(TEXTS, PLAIN, max_size=3),
    lambda inner: st.dictionaries(TEXTS, PLAIN | inner | st.lists(inner, min_size=1, max_size=2), max_size=3),
    max_leaves=5,
)


@given(TABLES)
def test_what_goes_in_comes_out(settings: dict[str, Any]) -> None:
    assert tomllib.loads(FILTERS.to_toml(settings)) == settings


def test_what_toml_does_not_have_is_refused_with_its_name() -> None:
    with pytest.raises(TypeError, match=r"store\.url: NoneType is nothing that TOML has"):
        FILTERS.to_toml({"store": {"url": None}})


@pytest.mark.parametrize(
    ("listens", "answers"),
    [("0.0.0.0", "127.0.0.1"), ("[::]", "::1"), ("10.0.0.5", "10.0.0.5"), ("[fd00::5]", "fd00::5")],
)
def test_a_listener_is_asked_where_it_listens(listens: str, answers: str) -> None:
    assert FILTERS.reach(listens) == answers


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"failed": True, "msg": "no port"}, "no port"),
        ({"failed": True, "msg": "non-zero return code", "stderr": "no space\n"}, "no space"),
        ({"msg": "All items completed", "results": [{"failed": False}, {"failed": True, "msg": "7302"}]}, "7302"),
        ({}, "it failed without a word"),
    ],
)
def test_a_failed_task_says_why(result: dict[str, Any], expected: str) -> None:
    assert FILTERS.why(result) == expected
