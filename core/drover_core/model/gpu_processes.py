"""The processes that hold a GPU, as an entry of a node's inventory: `gpu3.processes`.

Names, users and beginnings alone. Arguments may hold secrets, so that no agent sends them. The entry changes when a
process begins or ends, and an agent sends it once in five minutes at most.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

KEY = re.compile(r"gpu(\d{1,3})\.processes")
MOST = 16  # of a GPU that are listed; `total` counts all
NAME = 64  # characters of a name: what a process calls itself is up to it


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """`user`: "" where the node's own list of users has no name for `uid`. `since_ms`: 0: not known."""

    pid: int
    uid: int
    user: str
    name: str
    since_ms: int


def key(slot: int) -> str:
    return f"gpu{slot}.processes"


def pack(found: Iterable[GpuProcess]) -> str:
    listed = sorted(found, key=lambda process: (process.since_ms, process.pid))
    return json.dumps(
        {"total": len(listed), "processes": [asdict(process) for process in listed[:MOST]]}, separators=(",", ":")
    )


def unpack(text: str) -> tuple[list[GpuProcess], int] | None:
    """Return the processes listed and how many there are; None: not known, or not to be read."""
    try:
        read = json.loads(text)
        listed = [
            GpuProcess(int(one["pid"]), int(one["uid"]), str(one["user"])[:NAME], str(one["name"])[:NAME],
                       int(one["since_ms"]))
            for one in read["processes"][:MOST]
        ]  # fmt: skip
        return listed, int(read["total"])
    except (ValueError, KeyError, TypeError):
        return None


def without(inventory: Mapping[str, str]) -> dict[str, str]:
    """Return the inventory without users and processes: for readers, and for what leaves the site."""
    return {name: text for name, text in inventory.items() if not KEY.fullmatch(name)}
