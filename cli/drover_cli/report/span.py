"""Which time a report is about: an ISO week, some days, or any two moments. All UTC."""

from __future__ import annotations

import argparse
import re
from datetime import UTC, date, datetime, timedelta

from drover_cli.commands.export import moment
from drover_cli.errors import CliError

DAY_MS = 86_400_000
LAST = "last"  # what `--week` without a value means
_WEEK = re.compile(r"(\d{4})-?W(\d{1,2})", re.IGNORECASE)


def of_arguments(args: argparse.Namespace, now_ms: int) -> tuple[int, int]:
    """Return [from, to) in ms.

    Raises:
        CliError: no such time, or one that has not come yet.
    """
    if sum(value is not None for value in (args.week, args.days, args.since)) > 1:
        raise CliError("give one of --week, --days and --since")
    if args.until is not None and args.since is None:
        raise CliError("--until needs --since")
    if args.week is not None:
        return week(args.week, now_ms)
    if args.since is not None:
        from_ms, to_ms = moment(args.since, now_ms), now_ms if args.until is None else moment(args.until, now_ms)
    else:
        from_ms, to_ms = now_ms - (args.days or 7) * DAY_MS, now_ms
    if from_ms >= to_ms:
        raise CliError("the time ends before it begins; give --until after --since")
    return from_ms, to_ms


def week(text: str, now_ms: int) -> tuple[int, int]:
    """Return [from, to) of `2026-W47`, or of the last week that is over. A week that is not over ends now.

    Raises:
        CliError: no such week, or one that has not come yet.
    """
    today = datetime.fromtimestamp(now_ms / 1000, UTC).date()
    monday = today - timedelta(days=today.weekday() + 7) if text == LAST else _monday(text)
    if monday is None:
        raise CliError(f"{text!r} is no week; write 2026-W47, or --week alone for the last one that is over")
    if monday > today:
        raise CliError(f"week {name_of_week(monday)} has not come yet: nothing is known of it")
    from_ms = round(datetime(monday.year, monday.month, monday.day, tzinfo=UTC).timestamp() * 1000)
    return from_ms, min(from_ms + 7 * DAY_MS, now_ms)


def _monday(text: str) -> date | None:
    found = _WEEK.fullmatch(text)
    try:
        return date.fromisocalendar(int(found[1]), int(found[2]), 1) if found else None
    except ValueError:
        return None


def name_of_week(day: date) -> str:
    year, number, _ = day.isocalendar()
    return f"{year}-W{number:02}"


def title(from_ms: int, to_ms: int) -> str:
    """Return `week 2026-W47`, or the two moments."""
    begin = datetime.fromtimestamp(from_ms / 1000, UTC)
    if to_ms - from_ms == 7 * DAY_MS and begin.weekday() == 0 and from_ms % DAY_MS == 0:
        return f"week {name_of_week(begin.date())}"
    end = datetime.fromtimestamp(to_ms / 1000, UTC)
    return f"{begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"
