"""Prometheus' exposition text: the samples with wanted names, out of a page of hundreds of kilobytes.

The format is that of https://prometheus.io/docs/instrumenting/exposition_formats/ (text 0.0.4), and of OpenMetrics 1.0
as far as samples go: exemplars after ` # `, timestamps in seconds, `# EOF`. Lines with other names are only looked at
as far as their name, which is what makes it cheap: a page of dcgm-exporter or vLLM holds few samples that are used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping

# Pages may come from anyone who can listen at the address, and each line or sample costs far more than its bytes.
MAX_LINES = 200_000  # some ten times the largest page known
MAX_SAMPLES = 20_000  # with wanted names; 64 GPUs with all of DCGM's fields are 4,000
MAX_LINE = 16_384  # characters of a wanted line; dcgm-exporter's with pods and attributes have up to 600
MAX_LABELS = 64  # of one sample
MAX_VALUE = 4_096  # characters of one label's value
STAMP_MS_FROM = 1e11  # a larger timestamp is in ms (text 0.0.4), a smaller one in seconds (OpenMetrics)

Sample = tuple[Mapping[str, str], float]  # labels, value

_LABEL = re.compile(r'[ \t]*([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}
_NUMBER = re.compile(r"[+-]?(?:nan|inf(?:inity)?|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)", re.IGNORECASE)


class ExpositionError(ValueError):
    """A page that is no exposition, or a wanted line that cannot be understood; the message says where and why."""


def parse(
    text: str, wanted: Container[str], is_current: Callable[[float], bool] | None = None
) -> dict[str, list[Sample]]:
    """The samples whose name (with `_bucket`, `_sum`, `_total`) is in `wanted`, by name, in the page's order.

    Args:
        is_current: of the timestamp of a sample that has one, Unix seconds; False leaves the sample out. None: all
            samples count, and timestamps mean nothing.

    Raises:
        ExpositionError: a wanted line is garbled, there are too many, or the page is HTML.
    """
    if text[:256].lstrip()[:1] == "<":
        raise ExpositionError("the page is HTML or XML, not Prometheus text; check the path of the url")
    found: dict[str, list[Sample]] = {}
    known: dict[str, Mapping[str, str]] = {}  # all metrics of one GPU have the same ten labels
    count = 0
    for number, line in enumerate(_lines(text), 1):
        if number > MAX_LINES:
            raise ExpositionError(f"the page has more than {MAX_LINES} lines")
        brace = line.find("{")
        name = head = line[:brace] if brace > 0 else line
        if name not in wanted:  # a blank ends the name where no brace does, or one of an exemplar
            parts = head.split(None, 1)
            name = parts[0] if parts else ""
            if name not in wanted:
                continue
        count += 1
        if count > MAX_SAMPLES:
            raise ExpositionError(f"the page has more than {MAX_SAMPLES} samples of the wanted names")
        start = line.index(name) + len(name)
        try:
            if len(line) > MAX_LINE:
                raise ExpositionError(f"it has more than {MAX_LINE} characters")
            labels, value, stamp = _sample(line, start, known)
            if stamp is None or is_current is None or is_current(stamp):
                found.setdefault(name, []).append((labels, value))
        except ExpositionError as error:
            raise ExpositionError(f"line {number}: {error}: {line[:120]!r}") from None
    return found


def _lines(text: str) -> Iterator[str]:
    """One after another: all of them together take many times the page's own memory."""
    start = 0
    while (end := text.find("\n", start)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


def _sample(line: str, at: int, known: dict[str, Mapping[str, str]]) -> tuple[Mapping[str, str], float, float | None]:
    """Return labels, value and timestamp (Unix seconds; None: it has none) of a line whose name ends at `at`.

    `known` holds labels that were read before, by their text.
    """
    while line[at : at + 1] in (" ", "\t"):
        at += 1
    labels: Mapping[str, str] = {}
    if line[at : at + 1] == "{":
        # Without an exemplar the last brace is the one that ends the labels: what follows are numbers.
        end = line.rfind("}") + 1 if "#" not in line else 0
        text = line[at:end]
        if text in known:
            labels, at = known[text], end
        else:
            labels = {}
            at = _labels(line, at + 1, labels)
            if at == end:
                known[text] = labels
    fields = line[at:].partition(" # ")[0].split()
    if not 1 <= len(fields) <= 2:
        raise ExpositionError("a value, and at most a timestamp, must follow the name and labels")
    for field in fields:
        if not _NUMBER.fullmatch(field):
            raise ExpositionError(f"{field[:40]!r} is no number")
    stamp = None
    if len(fields) == 2:
        stamp = float(fields[1])
        stamp /= 1000 if abs(stamp) > STAMP_MS_FROM else 1
    return labels, float(fields[0]), stamp


def _labels(line: str, at: int, labels: dict[str, str]) -> int:
    """Read labels up to the closing brace; returns the place behind it."""
    while (match := _LABEL.match(line, at)) is not None:
        value = match[2]
        if len(value) > MAX_VALUE or len(labels) >= MAX_LABELS:
            raise ExpositionError(f"a label of more than {MAX_VALUE} characters, or more than {MAX_LABELS} labels")
        labels[match[1]] = _ESCAPE.sub(_unescape, value) if "\\" in value else value
        at = match.end()
        if line[at : at + 1] != ",":
            break
        at += 1
    while line[at : at + 1] in (" ", "\t"):
        at += 1
    if line[at : at + 1] != "}":
        raise ExpositionError('labels must read name="value", with commas between them and a brace at the end')
    return at + 1


def _unescape(match: re.Match[str]) -> str:
    """Escapes other than the three of the format stay unchanged, as Prometheus' own parser has it."""
    return _ESCAPED.get(match[1], match[0])
