"""Days as people name them: `today`, `yesterday`, `tuesday` (the newest one before today), `2026-11-17`. UTC."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

from drover_cli.errors import CliError

DAY_MS = 86_400_000
WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def day(text: str, now_ms: int) -> tuple[int, int]:
    """[from, to) in ms of that day in UTC, as all times of commands are.

    Raises:
        CliError: no such day, or one that has not come yet.
    """
    today = datetime.fromtimestamp(now_ms / 1000, UTC).date()
    found = _date(text.lower().strip().removeprefix("last").strip(" -"), today)
    if found is None:
        raise CliError(f"{text!r} is no day; write today, yesterday, a weekday such as tuesday, or 2026-11-17")
    if found > today:
        raise CliError(f"{found} has not come yet: nothing is known of it")
    from_ms = round(datetime(found.year, found.month, found.day, tzinfo=UTC).timestamp() * 1000)
    return from_ms, from_ms + DAY_MS


def _date(word: str, today: date) -> date | None:
    if word in ("today", "yesterday"):
        return today - timedelta(days=word == "yesterday")
    if len(word) >= 3 and (fits := [n for n, name in enumerate(WEEKDAYS) if name.startswith(word)]):
        return today - timedelta(days=(today.weekday() - fits[0]) % 7 or 7)
    try:
        return date.fromisoformat(word)
    except ValueError:
        return None


def named(from_ms: int) -> str:
    """`Tuesday 2026-11-17`."""
    return datetime.fromtimestamp(from_ms / 1000, UTC).strftime("%A %Y-%m-%d")
