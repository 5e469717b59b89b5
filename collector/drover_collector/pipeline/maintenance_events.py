"""Watch what others report of planned work: a file, and taints and conditions of Kubernetes' nodes.

Nothing here can extend a window: a file that cannot be read and an API server that does not answer leave those that are
known, and each ends at its time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from drover_collector.actions.base import ActError
from drover_collector.notify.maintenance_events import (
    MaintenanceEventsConfig,
    as_received,
    planned_work,
    read_file,
)
from drover_collector.pipeline.pipeline import Pipeline
from drover_collector.store import StoreError
from drover_core.model.events import Audit, Silence
from drover_core.settings import SettingsError
from drover_core.times import iso

log = logging.getLogger(__name__)

LOOK_S = 5.0
ASK_EVERY = 12  # looks, for one question to the API server: a minute
SOURCE = "kubernetes"
GONE_FILE = (0, 0, 0, 0)
GONE = "kubernetes: the mark is gone"
LIMIT = "its limit"
DAY_MS = 86_400_000
TROUBLE = "maintenance_events"

Marks = Mapping[str, Sequence[str]]  # node -> taints and conditions that mean maintenance


class MaintenanceEvents:
    """Args:
    marks: asks the API server; None: it is not to be asked. It may block, and raise ActError.
    """

    def __init__(
        self, config: MaintenanceEventsConfig, pipeline: Pipeline, marks: Callable[[], Marks] | None = None
    ) -> None:
        self._config, self._pipeline, self._marks = config, pipeline, marks
        self._stamp: tuple[int, int, int, int] | None = None  # of the file when it was read; None: never
        self._next: tuple[int, int, int, int] | None = None  # of the file when it was seen last
        self._in_file: list[Silence] = []
        self._wrong: dict[str, str] = {}  # what is wrong, by source

    async def run(self) -> None:
        """Run until cancelled."""
        look = 0
        while True:
            try:
                self.look_at_file()
                if self._marks is not None and self._pipeline.leading and look % ASK_EVERY == 0:
                    await asyncio.to_thread(self.ask_kubernetes)
                self._note()
            except Exception as error:  # noqa: BLE001  # a defect must neither end this task nor go unseen
                self._pipeline.ticks.failed(error, self._pipeline.now_ms())
            look += 1
            await asyncio.sleep(LOOK_S)

    def look_at_file(self) -> None:
        """Read the file if it has changed, once two looks find it the same: it may be half written."""
        if self._config.file is None:
            return
        path, silences = Path(self._config.file), self._pipeline.outbox.silences
        try:
            found = path.stat()
            stamp, trouble, written_ms = (
                (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino),
                "",
                found.st_ctime_ns // 10**6,
            )
        except FileNotFoundError as error:
            stamp, trouble, written_ms = GONE_FILE, error.strerror or str(error), 0
        except OSError as error:
            self._wrong["file"] = f"{path}: {error.strerror}; the windows read before count until their end"
            return
        seen, self._next = self._next, stamp
        if stamp == self._stamp or (self._stamp is not None and stamp != seen):
            return
        now_ms = self._pipeline.now_ms()
        received_ms = now_ms if self._stamp is not None else min(now_ms, written_ms)
        self._stamp = stamp
        if trouble:
            self._wrong["file"] = f"{path}: {trouble}; no window of it counts"
            self._in_file = []
            silences.set_file(())
            return
        try:
            windows, wrong = read_file(path, self._pipeline.index.spec.by_name, now_ms)
        except SettingsError as error:
            self._wrong["file"] = f"{error}; the windows read before count until their end"
            return
        self._wrong["file"] = f"{path}: {wrong}; the other windows count" if wrong else ""
        self._in_file = windows = as_received(windows, self._in_file, received_ms, now_ms)
        silences.set_file(windows)
        log.info("%d windows of planned work in %s", len(windows), path)

    def ask_kubernetes(self) -> None:
        """Open and close windows by the marks on Kubernetes' nodes."""
        assert self._marks is not None
        pipeline, config = self._pipeline, self._config
        try:
            marks = self._marks()
        except ActError as error:
            self._wrong[SOURCE] = f"whether nodes are in maintenance by Kubernetes is not known: {error}"
            return
        now_ms = pipeline.now_ms()
        known = pipeline.outbox.silences.remembered(f"{SOURCE}:")
        mine = {node: keys for node, keys in marks.items() if node in pipeline.index.spec.by_name}
        new, over = of_marks(mine, known, now_ms, round(config.taint_hours * 3_600_000))
        covered = {n for s in known if s.until_ms > now_ms for n in s.node}
        wanted = dict.fromkeys(node for silence in new for node in silence.node if node not in covered)
        taken = covered | set(list(wanted)[: max(0, pipeline.outbox.silences.most - len(covered))])
        counted = [silence for silence in new if taken.issuperset(silence.node)]
        left_out = sorted(set(wanted) - taken)
        try:
            for silence in [*over, *counted]:
                what = "maintenance over" if silence.ended_by else "maintenance"
                detail = f"{silence.node[0]} until {iso(silence.until_ms)[:19]}Z ({silence.id})"
                pipeline.take_silence(
                    silence,
                    Audit(f"{what} {silence.id} {now_ms}", now_ms, SOURCE, what, silence.node[0], silence.why, detail),
                )
        except StoreError as error:
            self._wrong[SOURCE] = f"windows by Kubernetes cannot be stored: {error}"
            return
        late = sorted(n for s in known if is_marked(s, mine) and s.until_ms <= now_ms and s.ended_by != GONE
                      for n in s.node)  # fmt: skip
        texts = []
        if left_out:
            texts.append(
                f"{len(left_out)} more nodes carry a mark of maintenance than may count"
                f" (at most {pipeline.outbox.silences.most}), {left_out[0]} first"
            )
        if late:
            texts.append(f"marked as in maintenance for longer than it counts: {', '.join(late[:5])}")
        self._wrong[SOURCE] = "; ".join(texts)

    def _note(self) -> None:
        refused = self._pipeline.outbox.silences.refused(self._pipeline.now_ms())
        nodes = {node for silence in refused for node in silence.node}
        self._wrong["refused"] = (
            f"{len(refused)} windows of {len(nodes)} nodes do not count: together with others they would cover more"
            f" than {self._pipeline.outbox.silences.most} nodes (maintenance_events.most_ratio); {refused[0].event}"
            " first"
            if refused
            else ""
        )
        wrong = [text for text in self._wrong.values() if text]
        troubles = self._pipeline.ticks.troubles
        if not wrong:
            troubles.pop(TROUBLE, None)
        elif troubles.get(TROUBLE) != (text := f"Planned work: {'; '.join(wrong)}."):
            troubles[TROUBLE] = text
            log.warning("%s", text)


def of_marks(marks: Marks, known: Iterable[Silence], now_ms: int, limit_ms: int) -> tuple[list[Silence], list[Silence]]:
    """Return the windows to open, and changed ones, for what marks there are now.

    A mark opens one window, which ends when the mark goes, at its limit, or when a person ends it; while the mark
    stays, none opens again.

    Args:
        known: windows of before, also those that are over.
    """
    newest: dict[str, Silence] = {}
    for silence in sorted(known, key=lambda silence: silence.made_ms):
        newest[_mark_of(silence)] = silence
    there = {f"{node}/{key}": (node, key) for node, keys in marks.items() for key in keys}
    new = [
        planned_work(SOURCE, f"{mark}@{now_ms}", (node,), (now_ms, now_ms + limit_ms), f"it carries {key}", now_ms)
        for mark, (node, key) in sorted(there.items())
        if mark not in newest or newest[mark].ended_by == GONE
    ]
    changed = []
    for mark, silence in newest.items():
        if mark not in there:
            if silence.ended_by != GONE:
                changed.append(replace(silence, until_ms=min(silence.until_ms, now_ms), ended_by=GONE))
        elif silence.ended_by != GONE and silence.until_ms < now_ms - DAY_MS:
            # It is over, and must stay known: silences that are over are forgotten after some days.
            changed.append(replace(silence, from_ms=now_ms, until_ms=now_ms, ended_by=silence.ended_by or LIMIT))
    return new, changed


def is_marked(silence: Silence, marks: Marks) -> bool:
    """Return whether the mark of a window is still there."""
    node, _, key = _mark_of(silence).partition("/")
    return key in marks.get(node, ())


def _mark_of(silence: Silence) -> str:
    return silence.event.removeprefix(f"{SOURCE}:").rpartition("@")[0]


def marks_of(
    nodes: Iterable[Mapping[str, object]],
    taints: Set[str],
    conditions: Set[str],
    own: Callable[[object], bool],
    fleet: Container[str] | None = None,
) -> dict[str, list[str]]:
    """Return the marks of Kubernetes' nodes, as the API server sends them.

    Args:
        own: whether Drover itself keeps a node closed: its cordon is no maintenance.
        fleet: names of the fleet's nodes; None: not known.
    Raises:
        ActError: none of the fleet's nodes is listed. Its database was lost, or it is another cluster's: no mark has
            gone for that.
    """
    found: dict[str, list[str]] = {}
    listed = fleet is None
    for node in nodes:
        name, keys = _name(node), _marks(node, taints, conditions)
        listed = listed or (fleet is not None and name in fleet)
        if name and keys and not own(node):
            found[name] = keys
    if not listed:
        raise ActError("the API server lists none of the fleet's nodes")
    return found


def _name(node: Mapping[str, object]) -> str:
    meta = node.get("metadata")
    return str(meta.get("name") or "") if isinstance(meta, dict) else ""


def _marks(node: Mapping[str, object], taints: Set[str], conditions: Set[str]) -> list[str]:
    spec, status = node.get("spec"), node.get("status")
    here = [t.get("key") for t in (spec.get("taints") or () if isinstance(spec, dict) else ()) if isinstance(t, dict)]
    states = [c for c in (status.get("conditions") or () if isinstance(status, dict) else ()) if isinstance(c, dict)]
    true = [c.get("type") for c in states if c.get("status") == "True"]
    return sorted({str(key) for key in here if key in taints} | {str(kind) for kind in true if kind in conditions})
