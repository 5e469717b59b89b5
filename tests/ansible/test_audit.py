"""What an audit says: what could not be asked is never reported as sound."""

from __future__ import annotations

import importlib.util
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
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
    ("rows", "vulnerable", "expected"),
    [
        ([SOUND], 0, ["l: 1 audited, 0 with known vulnerabilities"]),
        ([SOUND, BAD], 1, ["l: b 2: PYSEC-1, mended in 3", "l: 2 audited, 1 with known vulnerabilities"]),
        ([UNASKED], 0, ["l: 1 of 1 NOT audited: no registry reports on c"]),
    ],
    ids=["sound", "bad", "unasked"],
)
def test_what_an_audit_says(rows: list[dict[str, Any]], vulnerable: int, expected: list[str]) -> None:
    assert AUDIT.judge("l", {"dependencies": rows}) == (vulnerable, expected)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.exit('no route to host')", "no route to host"),
        ("pass", "it gave no answer"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
    ids=["no-network", "silent", "hanging"],
)
def test_who_cannot_ask_says_so_and_is_not_red(program: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AUDIT, "AUDIT_S", 1)
    found = AUDIT.ask(Path("lock.txt"), (sys.executable, "-c", program))
    assert AUDIT.judge("l", found) == (0, [f"l: NOT audited: {reason}"])


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, b'{"vulnerabilities": []}', None),
        (200, b'{"releases": {}}', "reports none"),
        (200, b"<html>", "Expecting value"),
        (404, b"", "404"),
    ],
    ids=["lists", "lists-none", "page", "mirror"],
)
def test_lint_asks_where_a_registry_lists_vulnerabilities(status: int, body: bytes, reason: str | None) -> None:
    asked: list[str] = []

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        found = AUDIT.why_not(f"http://127.0.0.1:{server.server_port}")
        thread.join(20)
    assert asked and asked[0].startswith("/pypi/") and asked[0].endswith("/json")
    assert found is None if reason is None else reason in str(found)
