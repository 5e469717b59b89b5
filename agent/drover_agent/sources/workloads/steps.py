"""Training loops that report their steps (`drover_agent.client.training_steps`): step time, tokens, operations, MFU.

A thread takes the datagrams as they come, because the kernel keeps but a few (net.unix.max_dgram_qlen, 10 unless set);
a reading sums them up. One row per workload of the node, keyed NODE/NAME, in seconds in which a report came: a loop
that stands still has no rows, and its values are absent (`lost`) soon after.

Everyone on the node may write to the socket, so that nothing here is believed beyond its own row: a name belongs to the
user who uses it, numbers are bounded, and what a tick takes is limited.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from drover_agent.sources.base import Entity, NodeEvent, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads.peaks import bf16_peak_flops
from drover_core.jobs.checkpoint import MAX_STEP, CheckpointReport, to_message
from drover_core.jobs.place import AXES, CLIENT, PlaceError, RankPlace, checked
from drover_core.metrics.catalog import BY_NAME, Absent, Scope
from drover_core.model.kinds import CHECKPOINT, EventKind

MAX_DATAGRAM = 1024
MAX_PER_TICK = 1_000  # datagrams; 16 processes send one a second each
MAX_NAMES = 64
MAX_NAMES_OF_USER = 16  # so that no single one takes all
NEW_NAME_S = 60.0  # each name that begins costs as much of a store that keeps it, MAX_NAMES ahead at most
MAX_RANKS = 256  # of one workload on one node
MAX_PROCESSES = 10_000_000  # of one workload in all
SHORTEST_S = 1e-9
STALE_S, STALE_STEPS = 60.0, 5.0  # a loop has stopped after so long, and so many of its steps, without a report
SAVES_S, SAVES_AHEAD = 10.0, 6  # a report of a checkpoint costs a workload so many seconds; so many are free at first
FRESH_S, FRESH_STEPS = 3.0, 2.0  # of a rank's last report, to count in the row of now
RETRY_S = 60.0  # between attempts to make the socket, and looks whether it is still there

NAMES = ("step_time_s", "tokens_per_step", "flops_per_step", "mfu_ratio")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_NOBODY = (0, -1, -1)

_log = logging.getLogger(__name__)


class JunkError(ValueError):
    """A datagram that is no report."""


class Report(NamedTuple):
    """What one process says of its last steps; see `drover_agent.client.training_steps` for the wire."""

    name: str
    rank: int
    world_size: int
    step_time_s: float
    tokens: float | None
    flops: float | None
    job: str
    place: RankPlace | None = None  # in the job's parallel groups, as the loop says


@dataclass(slots=True, eq=False, repr=False)
class _Workload:
    uid: int
    ranks: dict[int, tuple[float, Report]] = field(default_factory=dict)  # rank -> (when it came, its last report)
    received_s: float = 0.0
    news: bool = False  # a report came since the last row
    saved: CheckpointReport | None = None  # its newest checkpoint, if that is not reported yet
    saves_paid_s: float = -math.inf  # checkpoints that were reported are paid for up to here

    def stale(self, now_s: float) -> bool:
        slowest_s = max(report.step_time_s for _, report in self.ranks.values())
        return now_s - self.received_s > max(STALE_S, STALE_STEPS * slowest_s)


class StepsSource:
    """Rows of the workloads that report on this node. Without a folder for the socket there are none."""

    name = "steps"
    interval_s = 1.0

    def __init__(self, node: str, path: Path, gpus: Gpus, clock: Callable[[], float] = time.monotonic) -> None:
        self._node, self._path, self._gpus, self._clock = node, path, gpus, clock
        self._socket: socket.socket | None = None
        self._inode = 0
        self._next_try_s = -math.inf
        self._next_look_s = -math.inf
        self._trouble = ""
        self._lock = threading.Lock()
        self._room = 0  # datagrams that may still be taken until the next reading
        self._more = threading.Event()  # there is room again, or the end
        self._workloads: dict[str, _Workload] = {}
        self._names_paid_s = -math.inf  # names that began are paid for up to here
        self._logged: set[str] = set()
        self.received = 0  # datagrams
        self.junk = 0  # of them, those that were no report

    def read(self, now_ms: int) -> Reading:
        now_s = self._clock()
        if self._socket is not None and now_s >= self._next_look_s:
            self._next_look_s = now_s + RETRY_S
            if not self._is_there():
                _log.warning("%s was removed; it is made again", self._path)
                self._drop()
                self._next_try_s = now_s
        if self._socket is None:
            self._open(now_s)
        reading = Reading()
        with self._lock:
            for name, workload in list(self._workloads.items()):
                self._add_checkpoint(reading, workload, now_ms, now_s)
                entity = Entity(Scope.WORKLOAD, f"{self._node}/{name}", link=name)
                if workload.stale(now_s):
                    del self._workloads[name]
                    _log.info("workload %s no longer reports its steps", name)
                    reading.absent += [(entity, metric, Absent.LOST) for metric in NAMES]
                elif workload.news:
                    workload.news = False
                    self._add_row(reading, entity, workload, now_s)
        self._room = MAX_PER_TICK
        self._more.set()
        return reading

    def close(self) -> None:
        if self._socket is not None:
            if self._is_there():
                with contextlib.suppress(OSError):
                    self._path.unlink()
            self._drop()

    def _is_there(self) -> bool:
        """Whether our socket can be found, and not another agent's in its place."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def _drop(self) -> None:
        sock, self._socket = self._socket, None
        self._more.set()
        if sock is not None:
            with contextlib.suppress(OSError):  # so that the thread, and senders, know at once
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    # ---- what a reading gives

    @staticmethod
    def _add_checkpoint(reading: Reading, workload: _Workload, now_ms: int, now_s: float) -> None:
        """At once, as a node may wait for it. Anyone may send them, so of many in a row only the newest is reported."""
        paid_s = max(workload.saves_paid_s, now_s - SAVES_AHEAD * SAVES_S) + SAVES_S
        if workload.saved is not None and paid_s <= now_s:
            text, workload.saved, workload.saves_paid_s = to_message(workload.saved), None, paid_s
            reading.events.append(NodeEvent(now_ms, None, EventKind.RANK, CHECKPOINT, text, "steps", forgeable=True))

    def _add_row(self, reading: Reading, entity: Entity, workload: _Workload, now_s: float) -> None:
        """The median over the ranks of this node that have just reported; of tokens and flops the first's, for they
        are those of the whole job."""
        fresh = [
            report
            for came_s, report in workload.ranks.values()
            if now_s - came_s <= max(FRESH_S, FRESH_STEPS * report.step_time_s)
        ] or [max(workload.ranks.values(), key=lambda item: item[0])[1]]
        times = sorted(report.step_time_s for report in fresh)
        step_s = times[(len(times) - 1) // 2]  # the lower median, as the collector takes it
        row = {"step_time_s": step_s}
        absent: dict[str, Absent] = {}
        tokens = next((r.tokens for r in fresh if r.tokens is not None), None)
        flops = next((r.flops for r in fresh if r.flops is not None), None)
        for name, value in (("tokens_per_step", tokens), ("flops_per_step", flops)):
            if value is None:
                absent[name] = Absent.UNSUPPORTED  # the loop does not report it
            else:
                row[name] = value
        peak = self._peak()
        if flops is None or peak is None:
            absent["mfu_ratio"] = Absent.UNSUPPORTED
        else:
            mfu = flops / step_s / (peak * max(report.world_size for report in fresh))
            if mfu <= BY_NAME["mfu_ratio"].high:
                row["mfu_ratio"] = mfu
            else:
                absent["mfu_ratio"] = Absent.OUT_OF_RANGE
        reading.rows.append((entity, row))
        reading.absent += [(entity, name, why) for name, why in absent.items()]

    def _peak(self) -> float | None:
        """FLOP/s of one GPU of this node, taken as that of all the job's; None when they differ or are not known."""
        models = {entity.model for entity in self._gpus.all()}
        return bf16_peak_flops(models.pop()) if len(models) == 1 else None

    # ---- the socket

    def _open(self, now_s: float) -> None:
        if now_s < self._next_try_s:
            return
        self._next_try_s = now_s + RETRY_S
        try:
            fresh = self._bind()
        except OSError as error:
            trouble = f"{self._path}: {error.strerror or error}"
            if isinstance(error, FileNotFoundError):
                trouble = f"there is no folder {self._path.parent} (RuntimeDirectory=drover in the unit makes it)"
            if trouble != self._trouble:
                self._trouble = trouble
                _log.info("training loops cannot report their steps: %s", trouble)
            return
        self._trouble = ""
        self._socket = fresh
        threading.Thread(target=self._receive, args=(fresh,), name="steps", daemon=True).start()

    def _bind(self) -> socket.socket:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self._path.stat().st_mode):
                raise FileExistsError(0, "is there already and no socket; remove it, or set steps_socket")
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect(str(self._path))
                except ConnectionRefusedError:
                    self._path.unlink()  # left by an agent that was killed
                else:
                    raise FileExistsError(0, "another agent receives there")
        fresh = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            fresh.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            fresh.bind(str(self._path))
            self._path.chmod(0o666)  # training loops run as their own users
            self._inode = self._path.stat().st_ino
        except OSError:
            fresh.close()
            raise
        return fresh

    def _receive(self, sock: socket.socket) -> None:
        """The thread's work. When a tick's share is used up it waits for the next, and senders are turned away."""
        while self._socket is sock:
            if self._room <= 0:
                self._more.clear()
                if self._room <= 0 and self._socket is sock:  # else a reading came in between
                    self._more.wait()
                continue
            try:
                data, extra, flags, _ = sock.recvmsg(MAX_DATAGRAM, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError as error:
                if self._socket is sock:  # as where memory is short; a reading makes it again
                    _log.error("%s: %s; reports of training loops are lost for a while", self._path, error.strerror)
                    self._drop()
                return
            if self._socket is not sock:
                return
            self._room -= 1
            sender = next((_CREDENTIALS.unpack(c) for _, kind, c in extra if kind == socket.SCM_CREDENTIALS), _NOBODY)
            pid, uid = sender[:2]
            try:
                if flags & socket.MSG_TRUNC:
                    raise JunkError(f"more than {MAX_DATAGRAM} bytes")
                if (saved := read_saved(data)) is None:
                    self.take(read_report(data), uid, pid)
                else:
                    self.take_saved(*saved, uid)
            except JunkError as error:
                self.junk += 1
                self._log_once(f"a datagram of uid {uid} was left out: {error}")
            self.received += 1

    def take(self, report: Report, uid: int, pid: int = 0) -> None:
        """Count a report in. `pid`: of its sender, by the kernel's word; 0: not known.

        Raises:
            JunkError: its name is another user's, or there is no room for it.
        """
        now_s = self._clock()
        with self._lock:
            workload = self._workloads.get(report.name)
            if workload is None:
                workload = self._begin(report, uid, now_s)
            if workload.uid != uid:
                raise JunkError(f"workload {report.name!r} is that of uid {workload.uid}")
            if report.rank not in workload.ranks and len(workload.ranks) >= MAX_RANKS:
                raise JunkError(f"workload {report.name!r} has {MAX_RANKS} ranks on this node already")
            workload.ranks[report.rank] = now_s, report
            workload.received_s, workload.news = now_s, True
        if report.place is not None and pid:
            self._gpus.say_place(pid, report.place)

    def take_saved(self, name: str, report: CheckpointReport, uid: int) -> None:
        """Note that a checkpoint of a workload is on disk.

        Raises:
            JunkError: no workload of this user reports steps under this name.
        """
        with self._lock:
            workload = self._workloads.get(name)
            if workload is None or workload.uid != uid:
                raise JunkError(f"a checkpoint of workload {name!r}: uid {uid} reports no steps of it")
            workload.saved = report

    def _begin(self, report: Report, uid: int, now_s: float) -> _Workload:
        """
        Raises:
            JunkError: there is no room for one more name.
        """
        if len(self._workloads) >= MAX_NAMES:
            raise JunkError(f"{MAX_NAMES} workloads report already")
        if sum(workload.uid == uid for workload in self._workloads.values()) >= MAX_NAMES_OF_USER:
            raise JunkError(f"{MAX_NAMES_OF_USER} workloads of uid {uid} report already")
        paid_s = max(self._names_paid_s, now_s - MAX_NAMES * NEW_NAME_S) + NEW_NAME_S
        if paid_s > now_s:
            raise JunkError(f"too many names began lately: one in {NEW_NAME_S:g} s is what goes on for long")
        self._names_paid_s = paid_s
        job = f", job {report.job}" if report.job else ""
        _log.info("workload %s of uid %d reports its steps%s", report.name, uid, job)
        workload = self._workloads[report.name] = _Workload(uid)
        return workload

    def _log_once(self, text: str) -> None:
        if text not in self._logged and len(self._logged) < MAX_NAMES:
            self._logged.add(text)
            _log.warning("%s", text)


def read_saved(data: bytes) -> tuple[str, CheckpointReport] | None:
    """Return the workload and the checkpoint of a datagram that reports one; None: it reports something else.

    Raises:
        JunkError: what is wrong with it.
    """
    if b'"saved"' not in data:
        return None
    found = _read(data)
    step, job = _number(found, "saved", 0, MAX_STEP), _job(found)
    if not job:
        raise JunkError("a checkpoint of no job")
    return str(found["name"]), CheckpointReport(job, int(step))


def read_report(data: bytes) -> Report:
    """A datagram, checked.

    Raises:
        JunkError: what is wrong with it.
    """
    found = _read(data)
    rank, world = int(_number(found, "rank", 0, MAX_PROCESSES)), int(_number(found, "world_size", 1, MAX_PROCESSES))
    return Report(
        str(found["name"]),
        rank,
        world,
        _number(found, "step_time_s", SHORTEST_S, BY_NAME["step_time_s"].high),
        None if found.get("tokens") is None else _number(found, "tokens", 0, BY_NAME["tokens_per_step"].high),
        None if found.get("flops") is None else _number(found, "flops", 0, BY_NAME["flops_per_step"].high),
        _job(found),
        _place(found, rank, world),
    )


def _place(found: Mapping[str, Any], rank: int, world: int) -> RankPlace | None:
    """Return where a rank says that it stands; None: it does not say. Raises JunkError."""
    said = found.get("parallel")
    if said is None:
        return None
    try:
        axes = {axis: (int(said[axis][0]), int(said[axis][1])) for axis in AXES if axis in said}
        return checked(RankPlace(_job(found), rank, world, axes, CLIENT))
    except (PlaceError, TypeError, ValueError, LookupError, OverflowError):
        raise JunkError("its parallel is none") from None


def _read(data: bytes) -> Mapping[str, Any]:
    """Return the fields of a datagram with a usable name. Raises JunkError."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise JunkError("it is no JSON") from None
    if not isinstance(found, dict) or found.get("v") != 1:
        raise JunkError("it is no report of version 1")
    name = found.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise JunkError("its name is none")
    return found


def _job(found: Mapping[str, Any]) -> str:
    job = found.get("job", "")
    return re.sub(r"[^!-~]", "", job)[:128] if isinstance(job, str) else ""


def _number(found: Mapping[str, Any], key: str, low: float, high: float) -> float:
    value = found.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise JunkError(f"its {key} is none")
    return float(value)
