"""Which GPUs a probe may use, and whether somebody comes to hold one while it runs: asked of NVML.

A GPU that a process holds is never probed unless a person forces it; one in MIG mode never. Memory in use counts as a
process: inside a container NVML may name none of those outside of it. The processes of the
probe's own session do not count. One that cannot be seen here (other PID namespace, hidepid) does: nobody knows whose
it is. In a container the command therefore needs the machine's own PID namespace (hostPID).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from drover_agent.sources.nvml.calls import ProcessList
from drover_agent.sources.nvml.device import MPS_LISTS
from drover_agent.sources.nvml.library import NOT_FOUND, why_not_loaded
from drover_agent.sources.nvml.mig import COMPUTE_LISTS

LOOK_S = 0.3
DRIVER_S = 10.0  # for the driver to say which GPUs there are
SILENT_S = 5.0  # a driver that says for so long not who holds its GPUs ends the probe
USED_BYTES = 256 << 20  # of its memory without a process: the driver's own is not in the count (v2), a context has more
LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
UNSEEN = -1  # the session of a process that is not to be seen; 0 is one whose leader is outside of this container
NO_DRIVER = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

T = TypeVar("T")


class DriverError(Exception):
    """The driver does not say which GPUs may be used; one line."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """`refusal`: why it cannot be probed. `holders`: processes that hold it, each as "PID (name, user)".

    `unseen_bytes`: of its memory in use, by none of the processes that the driver names.
    """

    slot: int
    uuid: str = ""
    model: str = ""
    refusal: str = ""
    pids: tuple[int, ...] = ()
    holders: tuple[str, ...] = ()
    unseen_bytes: int = 0

    def why_not(self, *, force: bool = False) -> str:
        """Why no probe may run on it; "" when one may."""
        if self.refusal or force:
            return self.refusal
        if self.pids:
            return f"held by process {', '.join(self.holders)}"
        if self.unseen_bytes:
            return (
                f"held: {self.unseen_bytes >> 20} MiB of its memory are in use and the driver names no process "
                "for them (outside of this container, or one that died and left them)"
            )
        return ""


@dataclass(frozen=True, slots=True)
class Found:
    """The node's GPUs by slot; without any, `why_none` says why."""

    gpus: tuple[Gpu, ...] = ()
    why_none: str = ""


def look() -> Found:
    """Return the GPUs of this node in their present state.

    Raises:
        DriverError: there is a driver, and it does not answer or fails.
    """
    return _within(DRIVER_S, _look)


def choose(found: Found, slots: Sequence[int], *, force: bool = False) -> tuple[list[Gpu], dict[int, str]]:
    """(GPUs to probe, slot -> why not) of the slots asked for, all of them when none is."""
    there = {gpu.slot: gpu for gpu in found.gpus}
    why = f"there is no such GPU: {found.why_none or f'this node has {len(found.gpus)}'}"
    refused = {slot: why for slot in slots if slot not in there}
    wanted = [there[slot] for slot in dict.fromkeys(slots or there) if slot in there]
    refused |= {gpu.slot: held for gpu in wanted if (held := gpu.why_not(force=force))}
    return [gpu for gpu in wanted if gpu.slot not in refused], refused


def _look() -> Found:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        library = why_not_loaded() if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND else ""
        if library not in ("", NOT_FOUND):
            raise DriverError(f"the NVIDIA driver cannot be used: {library}") from None
        if error.value in NO_DRIVER:
            return Found(why_none=f"no NVIDIA driver is in use here ({error})")
        raise DriverError(f"the NVIDIA driver cannot be used: {error}") from None
    try:
        gpus = tuple(_gpu(slot) for slot in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        raise DriverError(f"the NVIDIA driver does not say which GPUs there are: {error}") from None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return Found(gpus, "" if gpus else "the NVIDIA driver knows no GPU")


def _gpu(slot: int) -> Gpu:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(slot)
        uuid, model = str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError as error:
        return Gpu(slot, refusal=f"the driver says of it: {error}")
    if _in_mig_mode(handle):
        return Gpu(slot, uuid, model, "it is split into MIG instances, which are not probed")
    try:
        pids = held_by(handle)
    except pynvml.NVMLError as error:
        return Gpu(slot, uuid, model, f"the driver does not say who holds it: {error}")
    return Gpu(slot, uuid, model, "", pids, tuple(_describe(pid) for pid in pids), 0 if pids else _used(handle))


def _used(handle: Any) -> int:
    """Return bytes; 0 when the GPU uses no more than an idle one, or the driver is too old to report its own share."""
    try:
        used = int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    except pynvml.NVMLError:
        return 0
    return used if used >= USED_BYTES else 0


def _in_mig_mode(handle: Any) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except pynvml.NVMLError:  # a model without it
        return False


def held_by(handle: Any) -> tuple[int, ...]:
    """Processes with a compute context on a GPU, through MPS too.

    Raises:
        NVMLError: they cannot be read.
    """
    pids = set(ProcessList(*COMPUTE_LISTS).read(handle))
    with contextlib.suppress(pynvml.NVMLError):  # an older driver, or a model without MPS
        pids |= set(ProcessList(*MPS_LISTS).read(handle))
    return tuple(sorted(pids))


def _describe(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return f"{pid} (not to be seen from here)"
    with contextlib.suppress(KeyError):
        return f"{pid} ({name}, {pwd.getpwuid(uid).pw_name})"
    return f"{pid} ({name}, user {uid})"


class Guard:
    """Looks each LOOK_S, in a thread of its own since a driver may hang, who holds the GPUs under test.

    A context manager. `needed` suits `Runner`. Processes in `tolerated` are those that a person forced the probe upon.
    """

    def __init__(self, gpus: Sequence[Gpu], tolerated: Sequence[int] = ()) -> None:
        self._gpus, self._tolerated = tuple(gpus), frozenset(tolerated)
        self._holders: dict[int, dict[int, int]] = {}  # slot -> process -> session
        self._trouble = ""
        self.lost: int | None = None  # the slot of a GPU that the driver lost meanwhile
        self.silent = False  # the probe was ended since the driver did not answer
        self._looked_s = time.monotonic()
        self.looks = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe guard", daemon=True)

    def __enter__(self) -> Guard:
        if self._gpus:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._gpus:
            self._thread.join(LOOK_S)  # a thread in a driver that hangs is left behind

    def needed(self, session: int) -> str:
        """Why the probe whose processes are of this session must give way; "" when it need not."""
        if not self._gpus:
            return ""
        if self._trouble:
            return self._trouble
        for slot, holders in self._holders.items():
            for pid, its_session in holders.items():
                if its_session != session and pid not in self._tolerated:
                    return f"GPU {slot} is held by process {_describe(pid)}"
        if time.monotonic() - self._looked_s > SILENT_S:
            self.silent = True
            return f"the driver has not said for {SILENT_S:g} s who holds its GPUs"
        return ""

    def _run(self) -> None:
        try:
            pynvml.nvmlInit()
            handles = {gpu.slot: pynvml.nvmlDeviceGetHandleByIndex(gpu.slot) for gpu in self._gpus}
            if moved := [g.slot for g in self._gpus if pynvml.nvmlDeviceGetUUID(handles[g.slot]) != g.uuid]:
                self._trouble = f"GPU {moved[0]} is another one now"
                return
            unseen: set[int] = set()
            while True:
                began = time.monotonic()
                pids = {slot: self._held(slot, handle) for slot, handle in handles.items()}
                sessions = {pid: _session(pid) for held in pids.values() for pid in held}
                # One that ended since it was listed is nobody; one that is listed again lives out of sight.
                gone = {pid for pid, session in sessions.items() if session == UNSEEN} - unseen
                unseen = {pid for pid, session in sessions.items() if session == UNSEEN}
                self._holders = {slot: {p: sessions[p] for p in held if p not in gone} for slot, held in pids.items()}
                self._looked_s = time.monotonic()
                self.looks += 1
                if self._ended.wait(max(0.0, LOOK_S - (time.monotonic() - began))):
                    break
        except Exception as error:  # noqa: BLE001  # whatever it is, nobody looks any more
            self._trouble = f"the driver no longer says who holds its GPUs: {error}"
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _held(self, slot: int, handle: Any) -> tuple[int, ...]:
        """Raises NVMLError."""
        try:
            return held_by(handle)
        except pynvml.NVMLError as error:
            if error.value in LOST:
                self.lost = slot
            raise


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return UNSEEN


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Raises DriverError when it does not return in time: a call into the driver that hangs cannot be ended."""
    answer: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((work(), None))
        except Exception as error:  # noqa: BLE001  # raised again by who waits
            answer.put((None, error))

    threading.Thread(target=run, name="driver", daemon=True).start()
    try:
        result, error = answer.get(timeout=seconds)
    except queue.Empty:
        raise DriverError(f"the NVIDIA driver does not answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # there is one when nothing was raised
