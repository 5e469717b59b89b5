"""Times as a person types them: `36 h`, `03:12`, `yesterday`, `26 Nov 03:00 to 04:30`. Pure functions."""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta, tzinfo

from drover_core.times import from_iso

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
UNITS = {"m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS, "w": 7 * DAY_MS}
LEAST_MS, MOST_MS = MINUTE_MS, 400 * DAY_MS  # the collector answers no longer span
AROUND_MS = 30 * MINUTE_MS  # a moment is shown with so much before and after it
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
EXAMPLES = "36 h, 03:12, yesterday, 03:00 to 04:30, 26 Nov 14:00 to 16:00"

_SPAN = re.compile(r"(?:(?:the )?last )?(\d{1,5}(?:\.\d)?) ?(m|h|d|w)(?:ins?|inutes?|ours?|ays?|eeks?)?")
_CLOCK = re.compile(r"(?:^| )(\d{1,2}):(\d\d)(?::(\d\d))?$")
_BETWEEN = re.compile(r" to | until | - | ?[\u2013\u2014] ?|(?<=:\d\d)-(?=\d)")
_ISO = re.compile(r"\d{4}-\d\d-\d\dt\d\d:\d\d\S*", re.IGNORECASE)


def span_of(text: str) -> int | None:
    """Return the ms of `15 min`, `6 h` or `last 2 days`; None: it is no span."""
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None:
        return None
    span_ms = round(float(found[1]) * UNITS[found[2]])
    return span_ms if LEAST_MS <= span_ms <= MOST_MS else None


def range_of(text: str, now_ms: int, where: tzinfo) -> tuple[int, int] | None:
    """Return the time (from, to) in ms that `text` names in the zone `where`; None: it is none, or lies ahead.

    A moment is shown with half an hour on each side, a date as its whole day.
    """
    parts = _BETWEEN.split(text.strip().lower())
    now = datetime.fromtimestamp(now_ms / 1000, where)
    try:
        if len(parts) == 1:
            found = _one(parts[0], now)
        elif len(parts) == 2:
            first = _moment(parts[0], now)
            last = now if parts[1] == "now" else _moment(parts[1], now, after=first)
            found = first, last
        else:
            return None
    except (ValueError, OverflowError):  # the calendar ends at the year 9999
        return None
    from_ms, to_ms = (round(moment.timestamp() * 1000) for moment in found)
    to_ms = min(to_ms, now_ms)
    return (from_ms, to_ms) if from_ms >= 0 and LEAST_MS <= to_ms - from_ms <= MOST_MS else None


def moment_of(text: str, now_ms: int, where: tzinfo) -> int | None:
    """Return the moment in ms that `text` names in the zone `where`; None: it is none, or lies ahead."""
    now = datetime.fromtimestamp(now_ms / 1000, where)
    try:
        found = round(_moment(text.strip().lower(), now).timestamp() * 1000)
    except (ValueError, OverflowError):
        return None
    return found if 0 <= found < now_ms else None


def _one(text: str, now: datetime) -> tuple[datetime, datetime]:
    if not _CLOCK.search(text) and not _ISO.fullmatch(text):
        day = _date(text, now)
        return _at(day, time(), now), _at(day + timedelta(days=1), time(), now)
    moment, around = _moment(text, now), timedelta(milliseconds=AROUND_MS)
    return moment - around, moment + around


def _moment(text: str, now: datetime, after: datetime | None = None) -> datetime:
    """
    Args:
        after: a time of day without a date is the first one after this moment; else the newest that has been.

    Raises:
        ValueError: it is no moment.
    """
    text = text.strip()
    if _ISO.fullmatch(text):
        return _iso(text, now)
    clock = _CLOCK.search(text)
    if clock is None:
        return _at(_date(text, now), time(), now)
    at, rest = time(int(clock[1]), int(clock[2]), int(clock[3] or 0)), text[: clock.start()].strip(" ,")
    if rest:
        return _at(_date(rest, now), at, now)
    if after is not None:
        found = _at(after.date(), at, now)
        return found if found > after else _at(after.date() + timedelta(days=1), at, now)
    found = _at(now.date(), at, now)
    return found if found <= now else _at(now.date() - timedelta(days=1), at, now)


def _iso(text: str, now: datetime) -> datetime:
    """As the CLI writes it. Without a zone it is the viewer's."""
    naive = datetime.fromisoformat(text.upper())
    return naive.replace(tzinfo=now.tzinfo) if naive.tzinfo is None else datetime.fromtimestamp(
        from_iso(text.upper()) / 1000, now.tzinfo
    )  # fmt: skip


def _date(text: str, now: datetime) -> date:
    """`2026-11-26`, `26 Nov`, `Nov 26`, `yesterday`, `tuesday`: the newest that has begun."""
    today = now.date()
    if text in ("today", "yesterday"):
        return today - timedelta(days=text == "yesterday")
    if text[:3] in DAYS and text.isalpha():
        return today - timedelta(days=(today.weekday() - DAYS.index(text[:3])) % 7)
    if found := re.fullmatch(r"(\d{1,2})\.? ([a-z]{3,9})|([a-z]{3,9}) (\d{1,2})", text):
        month = MONTHS.index((found[2] or found[3])[:3]) + 1
        day = date(today.year, month, int(found[1] or found[4]))
        return day if day <= today else day.replace(year=today.year - 1)
    return date.fromisoformat(text)


def _at(day: date, at: time, now: datetime) -> datetime:
    return datetime.combine(day, at, now.tzinfo)


def label(span_ms: int) -> str:
    """`15 min`, `6 h`, `7 days`."""
    for unit_ms, word in ((DAY_MS, "days"), (HOUR_MS, "h"), (MINUTE_MS, "min")):
        if span_ms % unit_ms == 0 and (unit_ms != DAY_MS or span_ms >= 2 * DAY_MS):
            return f"{span_ms // unit_ms} {word}"
    return f"{max(1, span_ms // MINUTE_MS)} min"


def words(from_ms: int, to_ms: int, now_ms: int, where: tzinfo) -> str:
    """`26 Nov 03:00 to 04:30`; today's without the day. What `range_of` reads again, to the second."""
    start, end, now = (datetime.fromtimestamp(ms / 1000, where) for ms in (from_ms, to_ms, now_ms))
    seconds = "%H:%M:%S" if start.second or end.second else "%H:%M"
    first = start.strftime(seconds if start.date() == now.date() else f"%-d %b {seconds}")
    last = end.strftime(seconds if end.date() == start.date() else f"%-d %b {seconds}")
    if start.year != now.year:
        first = start.strftime(f"%Y-%m-%d {seconds}")
    return f"{first} to {last}"
