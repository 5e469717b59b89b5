"""What an audit says: what could not be asked is never told as sound."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / "ansible/audit.py"


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drover_audit", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


AUDIT = _module()
SOUND = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
UNASKED = {"name": "c", "skip_reason": "not found on PyPI"}


@pytest.mark.parametrize(
    ("rows", "vulnerable", "told"),
    [
        ([SOUND], 0, ["l: 1 audited, 0 with known vulnerabilities"]),
        ([SOUND, BAD], 1, ["l: b 2: PYSEC-1, mended in 3", "l: 2 audited, 1 with known vulnerabilities"]),
        ([UNASKED], 0, ["l: 1 of 1 NOT audited: nothing is told of c"]),
    ],
    ids=["sound", "bad", "unasked"],
)
def test_what_an_audit_says(rows: list[dict[str, Any]], vulnerable: int, told: list[str]) -> None:
    assert AUDIT.judge("l", {"dependencies": rows}) == (vulnerable, told)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import sys; sys.exit('no route to host')", "no route to host"),
        ("pass", "it gave no answer"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
    ids=["no-network", "silent", "hanging"],
)
def test_who_cannot_ask_says_so_and_is_not_red(program: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AUDIT, "AUDIT_S", 1)
    found = AUDIT.ask(Path("lock.txt"), (sys.executable, "-c", program))
    assert AUDIT.judge("l", found) == (0, [f"l: NOT audited: {told}"])
