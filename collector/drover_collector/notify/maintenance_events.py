"""Planned work on nodes that others report: a file, the Fleet API, or a taint of Kubernetes. Pure, but for the file.

Each is a silence with `maintenance` and `event`. It always has an end, and together they cover a share of the fleet at
most: anyone who can write such events must not be able to blind Drover for all of it.

Names of others' taints and conditions, to be set as one needs them:
- `aws-node-termination-handler/scheduled-maintenance`: pkg/node/node.go of aws/aws-node-termination-handler.
- `cloud.google.com/impending-node-termination`: GKE's graceful termination of nodes with GPUs.
- `VMEventScheduled`, a condition: the node problem detector of AKS.
- `node.kubernetes.io/unschedulable`: any cordon, also a person's (Well-Known Labels, Annotations and Taints).
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from drover_core import settings
from drover_core.model.events import Silence
from drover_core.settings import SettingsError, between, required, setting
from drover_core.times import from_iso

MOST_HOURS = 72.0  # of one window, as of the weekly ones
MOST_WINDOWS = 1_000
MOST_NODES = 1_000  # of one window
WHY_CHARS = 500
ID_CHARS = 100
FILE_BYTES = 1 << 20
RESERVED = ("kubernetes", "file")  # sources that Drover reads itself
PAST_MS = 7 * 86_400_000  # windows of the file that ended before are left out


@dataclass(frozen=True, slots=True)
class MaintenanceEventsConfig:
    file: str | None = setting(None, "file of planned work, read again when it changes (docs/how-to/silence.md)")
    most_ratio: float = setting(
        0.1, "all planned work that others report covers at most this share of the nodes at once, one at least",
        between(0, 1),
    )  # fmt: skip
    taints: tuple[str, ...] = setting((), "a Kubernetes node with a taint of such a key is in maintenance; none: off")
    conditions: tuple[str, ...] = setting((), "or with a condition of such a type whose status is True")
    taint_hours: float = setting(
        8.0, "a taint or condition that stays for longer no longer counts", between(0.1, MOST_HOURS)
    )

    @property
    def marks(self) -> bool:
        """Whether Kubernetes is asked for taints or conditions."""
        return bool(self.taints or self.conditions)

    def most(self, nodes: int) -> int:
        """Return how many of so many nodes may be covered at once."""
        return min(nodes, max(1, int(nodes * self.most_ratio + 1e-9)))


def validate_events(config: MaintenanceEventsConfig, kubernetes: bool) -> None:
    """Check what concerns several settings. `kubernetes`: the collector has an API server to ask.

    Raises:
        SettingsError: taints are named and there is nobody to ask for them.
    """
    for key in ("taints", "conditions"):
        if getattr(config, key) and not kubernetes:
            raise SettingsError(f"maintenance_events.{key}: set act.kubernetes too; act.mode may stay observe")


def _instant(value: str) -> str | None:
    try:
        from_iso(value)
    except ValueError:
        return "must be a time in quotes, such as 2026-12-01T02:00:00Z"
    return None


def wrong_source(source: str) -> str | None:
    """Return what is wrong with the name of a source; None: nothing."""
    if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", source) and source not in RESERVED:
        return None
    return f"1 to 64 letters, digits, . - and _; not {' or '.join(RESERVED)}"


def wrong_id(id_: str) -> str | None:
    """Return what is wrong with a source's name for the work; None: nothing."""
    if not id_ or len(id_) > ID_CHARS:
        return f"has {len(id_)} characters; from 1 to {ID_CHARS}, its source's name for the work"
    return None if id_.isprintable() else "has characters that cannot be printed"


@dataclass(frozen=True, slots=True)
class _Window:
    node: tuple[str, ...] = required("names of nodes")
    start: str = required("when it begins", _instant)
    end: str = required("when it ends", _instant)
    why: str = required("what is done there")
    source: str = setting("file", "who plans it", lambda value: None if value == "file" else wrong_source(value))
    id: str = setting("", "id of its source; none: made of the rest", lambda value: wrong_id(value) if value else None)


@dataclass(frozen=True, slots=True)
class _File:
    window: tuple[_Window, ...] = field(default=(), metadata={"help": "planned work", "check": None})


def read_file(path: Path, nodes: Collection[str], now_ms: int) -> tuple[list[Silence], str]:
    """Return the windows of a file, and what is wrong with some of them, a sentence; "": nothing.

    A window that cannot be used is left out and named. The others count.

    Raises:
        SettingsError: the file cannot be read as a whole.
    """
    found: list[Silence] = []
    wrong: list[str] = []
    windows = settings.load_text(_File, _text(path), str(path)).window
    if len(windows) > MOST_WINDOWS:
        raise SettingsError(f"{path}: {len(windows)} windows; at most {MOST_WINDOWS}")
    for number, window in enumerate(windows):
        begin_ms, end_ms = from_iso(window.start), from_iso(window.end)
        known = tuple(name for name in dict.fromkeys(window.node) if name in nodes)
        if strange := [name for name in window.node if name not in nodes]:
            wrong.append(f"window[{number}].node: {strange[0][:80]!r} is not in the fleet file")
        if problem := unusable(begin_ms, end_ms, len(window.node), window.why):
            wrong.append(f"window[{number}]: {problem}")
        elif known and end_ms > now_ms - PAST_MS:
            made = planned_work(window.source, window.id, known, (begin_ms, end_ms), window.why, begin_ms)
            if any(made.id == other.id for other in found):
                wrong.append(f"window[{number}]: an earlier window has its source and id; give it an id of its own")
            else:
                found.append(made)
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return found, f"{wrong[0]}{more}" if wrong else ""


def _text(path: Path) -> str:
    """Return the text of a file, without waiting for one that is none: a pipe, a device.

    Raises:
        SettingsError
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SettingsError(f"{path}: it is not a regular file")
            content = file.read(FILE_BYTES + 1)
        if len(content) > FILE_BYTES:
            raise SettingsError(f"{path}: it is larger than {FILE_BYTES >> 20} MiB")
        return content.decode()
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from None


def as_received(windows: Sequence[Silence], before: Sequence[Silence], received_ms: int, now_ms: int) -> list[Silence]:
    """Return windows of a file that hide nothing of before they were received.

    Args:
        before: those received until now. One that is under way keeps its begin, unless it names more nodes.
        received_ms: when the file was written, for those that are new.
    """
    known = {silence.id: silence for silence in before if silence.from_ms <= now_ms < silence.until_ms}
    found = []
    for silence in windows:
        same = known.get(silence.id)
        goes_on = same is not None and set(silence.node) <= set(same.node)
        floor_ms = same.from_ms if same is not None and goes_on else received_ms
        if (from_ms := max(silence.from_ms, floor_ms)) < silence.until_ms:
            found.append(replace(silence, from_ms=from_ms))
    return found


def unusable(begin_ms: int, end_ms: int, nodes: int, why: str) -> str:
    """Return why such planned work is not accepted; "": it is."""
    hours = (end_ms - begin_ms) / 3_600_000
    if not 0 < hours <= MOST_HOURS:
        return f"it lasts {hours:g} hours; more than 0 and at most {MOST_HOURS:g} are allowed"
    if not 0 < nodes <= MOST_NODES:
        return f"it names {nodes} nodes; from 1 to {MOST_NODES} are allowed"
    if not why.strip() or len(why) > WHY_CHARS:
        return f"say what is done there, in 1 to {WHY_CHARS} characters"
    return ""


def planned_work(
    source: str, id_: str, nodes: tuple[str, ...], span_ms: tuple[int, int], why: str, made_ms: int
) -> Silence:
    """Return planned work as a silence. The same source and id make the same silence, so it can be changed."""
    seed = id_ or f"{' '.join(nodes)} {span_ms[0]}"
    event = f"{source}:{seed}"
    name = hashlib.blake2b(event.encode(errors="replace"), digest_size=6).hexdigest()
    return Silence(
        name, made_ms, *span_ms, f"planned work ({source})"[:100], " ".join(why.split()), nodes, maintenance=True,
        event=event,
    )  # fmt: skip


def admit(silences: Sequence[Silence], most: int) -> tuple[list[Silence], list[Silence]]:
    """Return those that count, in their order, and planned work of others that would cover too many nodes.

    What began first is admitted first, each window as a whole: a later one cannot push out an earlier one.
    """
    events = [silence for silence in silences if silence.event]
    covered: set[str] = set()
    refused = []
    for silence in sorted(events, key=lambda silence: (silence.from_ms, silence.made_ms, silence.id)):
        if len(covered | set(silence.node)) > most:
            refused.append(silence)
        else:
            covered |= set(silence.node)
    out = {silence.id for silence in refused}
    return [silence for silence in silences if silence.id not in out], refused
