"""The parser of Prometheus text against a slow one written by the format's words, on pages good and bad."""

from __future__ import annotations

import math
import string
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover_core.metrics.prometheus_text import MAX_LINES, MAX_SAMPLES, ExpositionError, parse

WANTED = frozenset({"up", "vllm:tokens_total", "latency_seconds_bucket"})


def reference(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """One character at a time, as the format's page describes a line; for pages without a mistake."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.split("\n"):
        rest = line.strip(" \t")
        if not rest or rest.startswith("#"):
            continue
        name = ""
        while rest and rest[0] not in "{ \t":
            name, rest = name + rest[0], rest[1:]
        rest = rest.lstrip(" \t")
        labels: dict[str, str] = {}
        if rest.startswith("{"):
            rest = rest[1:].lstrip(" \t")
            while not rest.startswith("}"):
                label, value = "", ""
                while rest[0] not in "= \t":
                    label, rest = label + rest[0], rest[1:]
                rest = rest.lstrip(" \t")[1:].lstrip(" \t")[1:]  # the equals sign, the quote
                while rest[0] != '"':
                    if rest[0] == "\\":
                        value += {"n": "\n", "\\": "\\", '"': '"'}.get(rest[1], rest[:2])
                        rest = rest[2:]
                    else:
                        value, rest = value + rest[0], rest[1:]
                labels[label] = value
                rest = rest[1:].lstrip(" \t").removeprefix(",").lstrip(" \t")
            rest = rest[1:]
        number = rest.split()[0].lower()
        if name in WANTED:
            found.setdefault(name, []).append((labels, float(number)))
    return found


def same(one: object, other: object) -> bool:
    return repr(one) == repr(other)  # NaN is itself here


LABEL_NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True)
LABEL_VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=20) | st.text(
    '\\"{},=# n', max_size=8
)
NUMBERS = st.sampled_from(["0", "NaN", "+Inf", "-Inf", "Inf", "1e+06", "-2.5E-3", ".5", "7."]) | st.floats().map(repr)
NAMES = st.sampled_from([*sorted(WANTED), "up_total", "u", "other:thing", "latency_seconds_sum"])


def escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def line(name: str, labels: dict[str, str], blank: str, number: str, end: str) -> str:
    inside = ",".join(f'{blank}{key}{blank}={blank}"{escaped(value)}"{blank}' for key, value in labels.items())
    return f"{name}{blank}{{{inside}}}{blank}{number}{end}" if labels else f"{name}{blank or ' '}{number}{end}"


ENDS = st.sampled_from(["", " 1395066363000", " 1.5e9", ' # {trace_id="a}b"} 0.67', " 7 # {} 1 1.5"])
LABELS = st.dictionaries(LABEL_NAMES, LABEL_VALUES, max_size=3)
SAMPLE_LINES = st.builds(line, NAMES, LABELS, st.sampled_from(["", " ", "\t", "  "]), NUMBERS, ENDS)
OTHER_LINES = st.sampled_from(
    ["", "# HELP up {is} it", "# TYPE up gauge", "# EOF", "   ", "#", "up{} 1", 'up{a="b",} 1', '# {a="b"} up 1']
)
PAGES = st.lists(SAMPLE_LINES | OTHER_LINES, max_size=6).map("\n".join)


@given(PAGES)
def test_it_reads_what_a_slow_reader_reads(page: str) -> None:
    assert same(parse(page, WANTED), reference(page))


def cut(page: str, at: int) -> str:
    return page[: at % (len(page) + 1)]


def changed(page: str, at: int, character: str) -> str:
    at %= len(page) + 1
    return page[:at] + character + page[at + 1 :]


PLACES = st.integers(0, 2000)
GARBAGE = (
    st.text(string.printable, max_size=100)
    | st.builds(cut, PAGES, PLACES)
    | st.builds(changed, PAGES, PLACES, st.sampled_from(list('{}"\\,= #\n1e')))
)


@given(GARBAGE)
def test_garbage_is_an_error_that_says_so_and_nothing_else(page: str) -> None:
    try:
        found = parse(page, WANTED)
    except ExpositionError as error:
        assert str(error)
        assert "\n" not in str(error)
    else:
        assert found.keys() <= WANTED


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("up", "line 1: a value, and at most a timestamp"),
        ("x 1\nup one", "line 2: 'one' is no number"),
        ("up 1_000", "'1_000' is no number"),
        ("up 1 2 3", "a value, and at most a timestamp"),
        ('up{a="1"', "labels must read"),
        ('up{a="1" b="2"} 1', "labels must read"),
        ("up{a=1} 1", "labels must read"),
        ('up{"a"="1"} 1', "labels must read"),
        ('up{a="1"} 1 }', "'}' is no number"),
        ("<!doctype html><html>", "HTML"),
    ],
)
def test_a_wanted_line_that_is_wrong_says_where_and_why(page: str, message: str) -> None:
    with pytest.raises(ExpositionError, match=message):
        parse(page, WANTED)


def test_lines_that_nobody_wants_may_be_anything() -> None:
    assert parse('nonsense{{{ "\nup 1\nother one two three\n{"up"} 5\n', WANTED) == {"up": [({}, 1.0)]}


def test_the_number_of_samples_is_bounded() -> None:
    assert len(parse("up 1\n" * MAX_SAMPLES, WANTED)["up"]) == MAX_SAMPLES
    with pytest.raises(ExpositionError, match="more than"):
        parse("up 1\n" * (MAX_SAMPLES + 1), WANTED)


def test_a_page_of_nothing_but_lines_takes_no_memory_of_its_own() -> None:
    page = "".join(f"{number}\n" for number in range(MAX_LINES - 1))
    tracemalloc.start()
    assert parse(page, WANTED) == {}
    assert tracemalloc.get_traced_memory()[1] < len(page) / 10
    tracemalloc.stop()
    with pytest.raises(ExpositionError, match=f"more than {MAX_LINES} lines"):
        parse(page + "\n", WANTED)


def test_labels_of_two_lines_are_distinguished() -> None:
    page = 'up{a="1",b="}"} 1\nup{a="1",b="}"} 2\nup{a="2",b="}"} 3\nup{a="2",b="}"} NaN # {x="}"} 1\n'
    [(one, _), (two, _), (three, last), (four, nan)] = parse(page, WANTED)["up"]
    assert one == two == {"a": "1", "b": "}"}
    assert three == four == {"a": "2", "b": "}"}
    assert last == 3 and math.isnan(nan)
