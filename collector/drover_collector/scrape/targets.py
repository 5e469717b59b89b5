"""The targets of a table of settings: those it lists, and those of its file_sd files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drover_collector.scrape.settings import MAX_TARGETS, ScrapeConfig, Target, parse_target

MAX_FILE_BYTES = 16 << 20


class TargetList:
    """Reads the files again when they change. A file that becomes unreadable leaves its last targets."""

    def __init__(self, config: ScrapeConfig) -> None:
        self._config = config
        self._listed = [parse_target(text, short=config.short_names) for text in config.targets]
        self._read: dict[str, tuple[tuple[int, int, int], list[Target]]] = {}
        self.troubles: dict[str, str] = {}  # file, or name of the table -> what is wrong

    def current(self, room: int | None = None) -> list[Target]:
        """Return the targets now, at most `room` (None: MAX_TARGETS); `troubles` says what is left out."""
        found = dict.fromkeys(self._listed)
        for path in self._config.file_sd:
            try:
                found |= dict.fromkeys(self._of_file(path))
                self.troubles.pop(path, None)
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else str(error)
                self.troubles[path] = f"{path}: {why}; its last targets stay"
                found |= dict.fromkeys(self._read.get(path, ((0, 0, 0), []))[1])
        name, most = self._config.name, MAX_TARGETS if room is None else room
        self.troubles.pop(name, None)
        if len(found) > most:
            self.troubles[name] = (
                f"scrape {name}: {len(found)} targets; the first {most} are read, the others are not"
                " monitored. Give them to another collector"
            )
        return list(found)[:most]

    def _of_file(self, path: str) -> list[Target]:
        stat = Path(path).stat()
        stamp = stat.st_mtime_ns, stat.st_size, stat.st_ino
        known = self._read.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        if stat.st_size > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
        targets = parse_file_sd(Path(path).read_text("utf-8"), self._config.short_names)
        if not targets and known is not None and known[1]:
            raise ValueError("it names no target any more; where that is meant, take it out of file_sd and restart")
        self._read[path] = stamp, targets
        return targets


def parse_file_sd(text: str, short: bool = False) -> list[Target]:
    """Return the targets of a file_sd file, in order (prometheus.io/docs/prometheus/latest/configuration/configuration,
    file_sd_config: `[{"targets": ["HOST:PORT"], "labels": {"NAME": "VALUE"}}]`).

    Raises:
        ValueError: another form; the message says where.
    """
    try:
        groups: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("not valid JSON") from None
    if not isinstance(groups, list):
        raise ValueError("must be a list of groups")
    found = []
    for number, group in enumerate(groups):
        entries = group.get("targets") if isinstance(group, dict) else None
        labels = group.get("labels") or {} if isinstance(group, dict) else {}
        if not isinstance(entries, list) or not isinstance(labels, dict):
            raise ValueError(f"group {number}: must have a list `targets`, and `labels` as a table")
        node = labels.get("node", "")
        for entry in entries:
            if not isinstance(entry, str) or not isinstance(node, str):
                raise ValueError(f"group {number}: targets and the label node must be texts")
            found.append(parse_target(entry, node, short))
    return found
