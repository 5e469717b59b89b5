"""The pages of threats and intruders name tests that are there, for every row of their tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"`(tests/[\w/]+\.py)`((?:,? `\w+`)*)")


def rows(page: str, heading: str) -> list[str]:
    """The rows of the table below a heading of a page, without its head."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    table = re.search(rf"^## {heading}\n.*?^\| --- .*?\n(.*?)(?=^[^|]|\Z)", text, re.DOTALL | re.MULTILINE)
    assert table is not None, heading
    return table[1].splitlines()


ROWS = [
    *rows("explanation/security.md", "Threat model"),
    *rows("evidence/intruders.md", "Intruders, one by one"),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip().replace("*", "")[:40] for row in ROWS])
def test_the_tests_of_a_row_are_there(row: str) -> None:
    found = LINK.findall(row.rpartition(" | ")[2])
    assert found, "a row names its test"
    for path, names in found:
        text = (ROOT / path).read_text("utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"{path} has no {name}"


def test_every_threat_and_intruder_is_there() -> None:
    threats = ("rogue agent", "stolen node key", "hostile network", "hostile user on a node", "hostile console user",
               "poisoned store", "webhook forgery")  # fmt: skip
    intruders = (
        "no certificate", "another authority", "ended certificate", "denied certificate", "another node's name",
        "viewer", "forged webhook", "replayed webhook", "oversized", "say nothing", "path in the file names",
        "path in a tar", "SQL", "HTML", "every user can read", "TLS 1.2", "defaults", "no named probe",
    )  # fmt: skip
    listed = [row.split("|")[1] for row in ROWS]
    for what in (*threats, *intruders):
        assert [row for row in listed if what in row], what
