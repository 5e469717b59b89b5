"""The kept corpus of real runs and the strangers' logs: as good as published."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_job_failures as bench  # noqa: E402  # it lies next to the other scripts
import job_failures_page  # noqa: E402  # the same


def test_the_page_of_job_failures_is_what_the_script_writes() -> None:
    """It scores both halves and the strangers' logs, so it fails too when one verdict changes."""
    written = (ROOT / "docs/evidence/job-failures.md").read_text("utf-8")
    assert written == job_failures_page.page(), "run: python benchmarks/bench_job_failures.py --write"


def test_the_kept_corpus_is_small_and_its_halves_have_the_same_kinds() -> None:
    sizes = [path.stat().st_size for path in (ROOT / "benchmarks/data/jobs").iterdir()]
    assert sum(sizes) < 1_500_000
    kinds = [{truth["kind"] for _, truth, _ in bench.runs_of(half)} for half in ("tune", "score")]
    assert kinds[0] == kinds[1] and len(kinds[0]) > 10


def test_what_a_log_shows_is_never_raw() -> None:
    for result in bench.score(list(bench.runs_of("tune"))[::8]):
        verdict = result.verdict
        for text in [verdict.sentence, *(proof.text for proof in verdict.proofs + verdict.consequences)]:
            assert text.isprintable()


def test_an_outside_set_in_the_form_of_gpualert(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.log").write_text("RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB\n")
    (tmp_path / "corpus/b.log").write_text("KeyError: 'x'\n")
    rows = [
        '{"id": "a", "mode": "cuda_oom", "log_path": "corpus/a.log", "true_exit_code": 1}',
        '{"id": "b", "class": "storage", "log_path": "corpus/b.log"}',
    ]
    (tmp_path / "labels.jsonl").write_text("\n".join(rows))
    results = bench.outside(tmp_path)
    assert [result.right for result in results] == [True, False]
    assert bench.macro_f1(results)[0] == pytest.approx(0.5)
