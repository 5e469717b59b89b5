"""The capacity table follows from measured figures, and each of these stands where it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import capacity  # noqa: E402  # it lies next to the other scripts


def test_the_page_is_what_the_script_writes() -> None:
    written = (ROOT / "docs/evidence/capacity.md").read_text("utf-8")
    assert written == capacity.page(), "run: .venv/bin/python benchmarks/capacity.py --write docs/evidence/capacity.md"


def test_each_figure_stands_in_its_document() -> None:
    for name, figure in capacity.MEASURED.items():
        text = " ".join((ROOT / "docs/evidence" / figure.document).read_text("utf-8").split())  # lines are wrapped
        assert figure.words in text, name
        assert (ROOT / "benchmarks" / figure.script).is_file(), name


def test_what_is_computed() -> None:
    assert capacity.cores(10_000) == pytest.approx(0.49 + 250 * 0.00024)
    assert capacity.cores(55_000) == pytest.approx((0.49 + 1.19) / 2 + 1375 * 0.00024)
    assert capacity.memory_gib(100_000) == pytest.approx(1.3 + 12_500 * 84 / 2**20)
    assert capacity.disk_gb(1_000) == pytest.approx(1.2 * 30 * 1.1)
    cells = [capacity.cores(size) for size in capacity.SIZES]
    assert cells == sorted(cells)
