"""Lines of logs: hostile ones are harmless, prefixes name ranks, the form says how loud a line is."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover_core.jobs.lines import MAX_LINE, Form, clean, in_order, ranks_of_names, read_log
from drover_core.jobs.rules import RULES, matches


@given(st.binary(max_size=400))
def test_a_line_is_printable_and_short_whatever_it_was(raw: bytes) -> None:
    text = clean(raw)
    assert not text or text.isprintable()
    assert len(text) <= MAX_LINE


@pytest.mark.parametrize(
    "raw, shown",
    [
        (b"\x1b[1;31mRuntimeError: x\x1b[0m", "RuntimeError: x"),
        (b"\x1b]0;title\x07done", "done"),
        (b"\x1b]52;c;cm0gLXJmIC8=\x1b\\paste", "paste"),
        (b"10%\r50%\r100% |##| 8/8 [00:01<00:00]\r", "100% |##| 8/8 [00:01<00:00]"),
        (b"bad \xff\xfe utf", "bad \ufffd\ufffd utf"),
        (b"a\x9b31mb\x00c", "a\ufffd31mb c"),
        ("left\u202eto right\u2066".encode(), "left to right "),
    ],
)
def test_escapes_and_carriage_returns(raw: bytes, shown: str) -> None:
    assert clean(raw) == shown


def test_a_huge_line_keeps_both_ends() -> None:
    text = clean(b"begin " + b"x" * 20_000_000 + b" RuntimeError: end")
    assert text.startswith("begin ") and text.endswith("RuntimeError: end") and len(text) <= MAX_LINE


@pytest.mark.parametrize(
    "text, rank, node, rest",
    [
        ("[rank3]: Traceback (most recent call last):", 3, "", "Traceback (most recent call last):"),
        ("[default1]:[rank5]: ValueError: x", 5, "", "ValueError: x"),
        ("[default0]:step 1", 0, "", "step 1"),
        ("[1,12]<stderr>: boom", 12, "", "boom"),
        ("(RayWorkerWrapper pid=270291, ip=10.175.94.190) [rank2]: KeyError: 'a'", 2, "10.175.94.190", "KeyError: 'a'"),
        ("2026-11-28T02:07:14.123456789Z stderr F OSError: [Errno 28]", None, "", "OSError: [Errno 28]"),
        ('{"log":"[rank1]: boom\\n","stream":"stderr"}', None, "", "[rank1]: boom"),
    ],
)
def test_prefixes(text: str, rank: int | None, node: str, rest: str) -> None:
    line = read_log("job.log", text.encode()).lines[0]
    if text.startswith("{"):
        assert line.text.endswith("boom")
    else:
        assert (line.rank, line.node, line.text) == (rank, node, rest)


def test_srun_labels_count_only_where_most_lines_have_one() -> None:
    labelled = read_log("job.log", b"0: a\n1: b\n 2: c\n3: d\nsrun: error: n07: task 2: Killed\n")
    assert [line.rank for line in labelled.lines] == [0, 1, 2, 3, None]
    plain = read_log("job.log", b"begin\nresults\n3: apples\nmore\nend\n")
    assert [line.rank for line in plain.lines] == [None] * 5


def test_forms() -> None:
    text = b"""WARNING caught ValueError: bad sample
Traceback (most recent call last):
  File "a.py", line 1, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
n07:123:456 [2] NCCL WARN NET/IB : Got async event : port error
[12345.678901] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.
slurmstepd: error: *** STEP 1.0 ON n07 CANCELLED AT 2026-11-28T02:00:00 DUE TO TIME LIMIT ***
retrying after OSError: [Errno 5] Input/output error
"""
    forms = [line.form for line in read_log("x.log", text).lines]
    wanted = [Form.QUIET, Form.OTHER, Form.OTHER, Form.EXCEPTION, Form.NCCL, Form.KERNEL, Form.SCHEDULER, Form.QUIET]
    assert forms == wanted


def test_files_with_times_are_joined_by_time() -> None:
    one = read_log("rank_0.log", b"2026-11-28 02:00:01,5 a\nb\n2026-11-28 02:00:03,0 c\n", rank=0)
    two = read_log("rank_1.log", b"2026-11-28 02:00:02,0 d\n[E1128 02:00:02.900000000 X.cpp:1] e\n", rank=1)
    assert [line.text[-1] for line in in_order([one, two])] == ["a", "b", "d", "e", "c"]


@pytest.mark.parametrize(
    "text, ms",
    [
        (b"2025-05-31T20:30:00-04:00 x", 1748737800000),
        (b"2025-06-01 00:30:00,500 +0000 x", 1748737800500),
        (b"2025-06-01T00:30:00Z stderr F x", 1748737800000),
        (b'{"log":"x\\n","stream":"stderr","time":"2025-06-01T00:30:00.25Z"}', 1748737800250),
        (b"[Sun Jun  1 00:30:00 2025] x", 1748737800000),
        (b"Jun  1 00:30:00 n08 kernel: x", None),
        (b"2025-02-31 00:30:00 x", None),
    ],
)
def test_times_of_lines(text: bytes, ms: int | None) -> None:
    line = read_log("job.log", text).lines[0]
    assert line.ms == ms and line.at is not None
    if ms:
        assert int(line.at) == (5 * 31 + 1) * 86400 + 1800


def test_offsets_count_when_files_are_joined() -> None:
    later = read_log("rank_1.log", b"2025-05-31T20:30:00-04:00 25 minutes later\n", rank=1)
    first = read_log("rank_0.log", b"2025-06-01T00:05:00+00:00 first\n", rank=0)
    assert [line.rank for line in in_order([later, first])] == [0, 1]


def test_ranks_of_file_names() -> None:
    assert ranks_of_names(["rank_3.log", "rank-12.err"]) == {"rank_3.log": 3, "rank-12.err": 12}
    assert ranks_of_names(["run/attempt_0/1/stderr.log"]) == {"run/attempt_0/1/stderr.log": 1}
    assert ranks_of_names(["job-4711-0.out", "job-4711-1.out", "job-4711-2.out"])["job-4711-2.out"] == 2
    assert ranks_of_names(["slurm-4711.out"]) == {}


def test_rules_have_sources_and_needles_that_their_patterns_can_meet() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.needle == rule.needle.lower() and rule.source and 0 < rule.confidence < 1


def test_no_rule_takes_long_on_a_hostile_line() -> None:
    """A pattern that backtracks would take seconds to years here."""
    needles = sorted({rule.needle for rule in RULES})
    begun = time.monotonic()
    for filler in ("a", " ", "(", "1:", "error ", "[", "x."):
        for needle in needles:
            text = clean((needle + filler * MAX_LINE + needle).encode())
            matches(text, Form.OTHER)
            matches(needle[:20] * 60, Form.SCHEDULER)
    assert time.monotonic() - begun < 100
