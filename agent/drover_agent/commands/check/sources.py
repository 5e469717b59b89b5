"""Checks of the sources, from two readings of each: what they give here and what they do not."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from drover_agent.commands.check.line import CheckState, Line
from drover_agent.commands.read_all import SourceReading
from drover_agent.config import AgentConfig
from drover_agent.sources.base import Entity
from drover_agent.sources.facts import FACTS, JOBS_UNKNOWN
from drover_agent.sources.nvml.library import NOT_FOUND
from drover_core.metrics.catalog import Absent, Scope, of_scope

DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers, PCI Code and ID Assignment Specification
NVIDIA = "0x10de"
HUNG = "look at the kernel log and at processes in state D; the rest goes on without it"
GPM = tuple(m.name for m in of_scope(Scope.GPU) if "gpm" in m.sources and "nvml" not in m.sources)
ECC = tuple(m.name for m in of_scope(Scope.GPU) if m.name.startswith("ecc_"))


def sources(config: AgentConfig, looks: Sequence[SourceReading]) -> list[Line]:
    gpus = [found for found in looks if found.slot is not None]
    lines = _gpus(config, next((found for found in looks if found.name == "nvml"), None), gpus)
    for found in looks:
        if found.slot is None and found.name != "nvml":
            lines.append(_source(found, asked_for=found.name == "dcgm" and config.dcgm_url != "auto"))
            if found.name == "jobs" and lines[-1].state in (CheckState.OK, CheckState.MISSING):
                lines[-1] = _of_all_gpus(found, sum(bool(gpu.readings) for gpu in gpus), lines[-1])
    return [*lines, _steps(config), _dmi(Path(config.sys_root))]


# ---- any source


def _source(found: SourceReading, *, asked_for: bool) -> Line:
    """`asked_for`: the settings name it themselves, so that it is broken when it is not there."""
    facts = FACTS[found.name]
    needs = "" if facts.rights.startswith("none") else facts.rights
    if found.off:
        return Line(found.name, CheckState.MISSING, f"not set: {facts.setting}")
    if found.hung or found.error:
        return Line(found.name, CheckState.BROKEN, found.error, HUNG if found.hung else needs)
    given, absent = _told([found])
    if not (given or absent or any(r.holdings or r.inventory or r.events for r in found.readings)):
        return Line(found.name, CheckState.BROKEN if asked_for else CheckState.MISSING, facts.missing)
    text = _given(found, given)
    told = {key: value for reading in found.readings for key, value in reading.inventory.items()}
    if trouble := told.get(f"{found.name}.trouble"):
        return Line(found.name, CheckState.LIMITED, f"{text}; {trouble}", needs)
    if refused := absent.get(Absent.NO_PERMISSION):
        return Line(found.name, CheckState.LIMITED, f"{text}; not allowed: {_names(refused)}", needs)
    for reason in (Absent.ERROR, Absent.TIMEOUT, Absent.LOST, Absent.OUT_OF_RANGE):
        if failed := absent.get(reason):
            state = CheckState.LIMITED if given else CheckState.BROKEN
            return Line(found.name, state, f"{text}; {reason}: {_names(failed)}", "`drover-agent once` says how")
    if lacking := absent.get(Absent.UNSUPPORTED):
        text += f"; not here: {_names(lacking, 5)}"
    return Line(found.name, CheckState.OK if given or not absent else CheckState.MISSING, text)


def _of_all_gpus(jobs: SourceReading, gpus: int, line: Line) -> Line:
    """That it is not known of a GPU who holds it is no good state, and no sign that there is none."""
    unknown = gpus - len({gpu for reading in jobs.readings for gpu, _ in reading.holdings})
    if unknown <= 0:
        return line
    known = f"{line.text}; " if line.state is CheckState.OK else ""
    return Line("jobs", CheckState.LIMITED, f"{known}{unknown} of {gpus} GPUs: {JOBS_UNKNOWN}", FACTS["jobs"].rights)


def _given(found: SourceReading, given: set[str]) -> str:
    if held := {gpu: job for reading in found.readings for gpu, job in reading.holdings}:
        return f"jobs of {len(held)} GPUs known, {sum(job is not None for job in held.values())} held"
    things = {e for reading in found.readings for e, values in reading.rows if e.scope is not Scope.NODE and values}
    if given:
        return f"{len(given)} metrics" + (f" of {len(things)}: {_names(_label(e) for e in things)}" if things else "")
    return "nothing could be read" if any(reading.absent for reading in found.readings) else "read"


def _label(entity: Entity) -> str:
    return entity.link or entity.key


def _told(looks: Iterable[SourceReading]) -> tuple[set[str], dict[Absent, set[str]]]:
    """Metrics that the newest readings gave, and by reason those that they did not: by metric, or by the thing's name
    where it gave nothing. MIG instances, which have few of them, are left out."""
    given: set[tuple[Entity, str]] = set()
    absent: dict[tuple[Entity, str], Absent] = {}
    for found in looks:
        for reading in found.readings:
            for entity, values in reading.rows:
                given |= {(entity, name) for name in values if not entity.mig}
            absent |= {(entity, name): reason for entity, name, reason in reading.absent if not entity.mig}
    some = {entity for entity, _ in given}
    by_reason: dict[Absent, set[str]] = {}
    for (entity, name), reason in absent.items():
        if (entity, name) not in given:
            whole = entity not in some and entity.scope in (Scope.LINK, Scope.WORKLOAD)
            by_reason.setdefault(reason, set()).add(_label(entity) if whole else name)
    return {name for _, name in given}, by_reason


def _names(names: Iterable[str], most: int = 12) -> str:
    found = sorted(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


# ---- GPUs


def _gpus(config: AgentConfig, opened: SourceReading | None, gpus: Sequence[SourceReading]) -> list[Line]:
    on_bus = _gpus_on_bus(Path(config.sys_root))
    if opened is None:
        text = f"not asked: hardware = {config.hardware}"
        return [Line("nvml", CheckState.MISSING, text, 'hardware = "auto"' if on_bus else "")]
    if opened.error:
        return [Line("nvml", CheckState.BROKEN, opened.error, HUNG)]
    inventory = {key: value for reading in opened.readings for key, value in reading.inventory.items()}
    if reason := inventory.get("no_gpu_reason", ""):
        why, _, remedy = reason.partition(": ")
        nobody_asked = config.hardware == "auto" and not on_bus and reason == NOT_FOUND
        if on_bus:
            why += f"; {on_bus} NVIDIA GPUs are on the PCI bus"
        return [Line("nvml", CheckState.MISSING if nobody_asked else CheckState.BROKEN, why, remedy)]
    driver = inventory.get("driver_version", "?")
    lines = [_found(driver, len(gpus), on_bus)]
    for found in gpus:
        if found.hung or found.error:
            lines.append(Line(found.name, CheckState.BROKEN, found.error, HUNG))
    lines += _lost_or_refused(gpus)
    given, absent = _told(gpus)
    unsupported = absent.get(Absent.UNSUPPORTED, set())
    if any(found.readings for found in gpus):
        lines += [_gpm(given), _ecc(given)]
        rest = unsupported - set(GPM) - set(ECC)
        text = f"{len(given)} metrics" + (f"; not of this GPU or driver: {_names(rest, 20)}" if rest else "")
        lines.append(Line("nvml metrics", CheckState.OK, text))
    return lines


def _found(driver: str, count: int, on_bus: int) -> Line:
    text = f"driver {driver}, {count} GPUs"
    if on_bus > count:
        return Line(
            "nvml", CheckState.LIMITED, f"{text}; {on_bus} are on the PCI bus", "NVRM lines in the kernel log say why"
        )
    return Line("nvml", CheckState.OK, text)


def _lost_or_refused(gpus: Sequence[SourceReading]) -> list[Line]:
    lines = []
    for found in gpus:
        _, absent = _told([found])
        if absent.get(Absent.LOST):
            lines.append(
                Line(found.name, CheckState.BROKEN, "lost: it has fallen off the bus", "reset it or reboot the node")
            )
        elif refused := absent.get(Absent.NO_PERMISSION):
            remedy = "access to /dev/nvidia*; NVreg_RestrictProfilingToAdminUsers=0 for profiling"
            lines.append(Line(found.name, CheckState.LIMITED, f"not allowed: {_names(refused)}", remedy))
        elif failed := absent.get(Absent.ERROR):
            lines.append(Line(found.name, CheckState.LIMITED, f"failed: {_names(failed)}", "standard error says how"))
    return lines


def _gpm(given: set[str]) -> Line:
    if given & set(GPM):
        return Line("nvml profiling", CheckState.OK, f"GPM gives {len(given & set(GPM))} metrics")
    text = "no GPM, which Hopper and newer have: no tensor, SM and memory activity"
    return Line(
        "nvml profiling", CheckState.MISSING, text, "dcgm-exporter gives it on Volta to Ampere: see source dcgm"
    )


def _ecc(given: set[str]) -> Line:
    if given & set(ECC):
        return Line("nvml ECC", CheckState.OK, f"{len(given & set(ECC))} counters")
    return Line(
        "nvml ECC", CheckState.MISSING, "no ECC counters: off, or not of this GPU", "nvidia-smi -e 1, then a reset"
    )


def _gpus_on_bus(sys: Path) -> int:
    """NVIDIA's GPUs as the kernel lists them, whether or not a driver has them."""
    count = 0
    for device in sys.glob("bus/pci/devices/*"):
        try:
            vendor, kind = ((device / name).read_text("ascii").strip() for name in ("vendor", "class"))
        except OSError:  # removed while we looked
            continue
        count += vendor == NVIDIA and kind.startswith(DISPLAY_CLASSES)
    return count


def _steps(config: AgentConfig) -> Line:
    """Whether an agent receives there; a loop that reports sees the same."""
    path = config.steps_socket
    if not path:
        return Line("steps", CheckState.MISSING, "not set: `steps_socket`")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            text = f"no agent receives at {path}: {error.strerror}; training loops report to nobody"
            return Line("steps", CheckState.MISSING, text, FACTS["steps"].rights)
    return Line("steps", CheckState.OK, f"an agent receives at {path}")


def _dmi(sys: Path) -> Line:
    path = sys / "class/dmi/id/product_serial"
    if not path.exists():
        return Line("dmi", CheckState.MISSING, "the firmware tells no serial number of the node")
    if os.access(path, os.R_OK):
        return Line("dmi", CheckState.OK, "the node's serial number can be read")
    return Line("dmi", CheckState.LIMITED, "only root reads the node's serial number", "nothing else depends on it")
