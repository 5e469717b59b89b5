"""Check the sources from two readings of each: what they give here and what they do not."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from drover_agent.commands.check.result import CheckResult, CheckState
from drover_agent.commands.read_all import SourceReading
from drover_agent.config import AgentConfig
from drover_agent.sources.base import Entity
from drover_agent.sources.facts import FACTS, JOBS_UNKNOWN
from drover_agent.sources.nvml.library import NOT_FOUND
from drover_core.metrics.catalog import Absent, Scope, of_scope

DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers, PCI Code and ID Assignment Specification
NVIDIA = "0x10de"
HUNG = "see the kernel log and processes in state D; the other sources are read without it"
GPM = tuple(m.name for m in of_scope(Scope.GPU) if "gpm" in m.sources and "nvml" not in m.sources)
ECC = tuple(m.name for m in of_scope(Scope.GPU) if m.name.startswith("ecc_"))


def sources(config: AgentConfig, readings: Sequence[SourceReading]) -> list[CheckResult]:
    gpus = [found for found in readings if found.slot is not None]
    lines = _gpus(config, next((found for found in readings if found.name == "nvml"), None), gpus)
    for found in readings:
        if found.slot is None and found.name != "nvml":
            lines.append(_source(found, asked_for=found.name == "dcgm" and config.dcgm_url != "auto"))
            if found.name == "jobs" and lines[-1].state in (CheckState.OK, CheckState.MISSING):
                lines[-1] = _of_all_gpus(found, sum(bool(gpu.readings) for gpu in gpus), lines[-1])
    return [*lines, _steps(config), _dmi(Path(config.sys_root))]


# ---- any source


def _source(found: SourceReading, *, asked_for: bool) -> CheckResult:
    """`asked_for`: the settings name this source, so it is broken if it gives nothing."""
    facts = FACTS[found.name]
    needs = "" if facts.rights.startswith("none") else facts.rights
    if found.off:
        return CheckResult(found.name, CheckState.MISSING, f"not set: {facts.setting}")
    if found.hung or found.error:
        return CheckResult(found.name, CheckState.BROKEN, found.error, HUNG if found.hung else needs)
    given, absent = _metrics([found])
    if not (given or absent or any(r.holdings or r.inventory or r.events for r in found.readings)):
        return CheckResult(found.name, CheckState.BROKEN if asked_for else CheckState.MISSING, facts.missing)
    text = _given(found, given)
    inventory = {key: value for reading in found.readings for key, value in reading.inventory.items()}
    if trouble := inventory.get(f"{found.name}.trouble"):
        return CheckResult(found.name, CheckState.LIMITED, f"{text}; {trouble}", needs)
    if refused := absent.get(Absent.NO_PERMISSION):
        return CheckResult(found.name, CheckState.LIMITED, f"{text}; not allowed: {_names(refused)}", needs)
    for reason in (Absent.ERROR, Absent.TIMEOUT, Absent.LOST, Absent.OUT_OF_RANGE):
        if failed := absent.get(reason):
            state = CheckState.LIMITED if given else CheckState.BROKEN
            return CheckResult(found.name, state, f"{text}; {reason}: {_names(failed)}", "`drover-agent once` says how")
    if lacking := absent.get(Absent.UNSUPPORTED):
        text += f"; not here: {_names(lacking, 5)}"
    return CheckResult(found.name, CheckState.OK if given or not absent else CheckState.MISSING, text)


def _of_all_gpus(jobs: SourceReading, gpus: int, line: CheckResult) -> CheckResult:
    """Return a limited result if for some GPUs it is not known which job holds them."""
    unknown = gpus - len({gpu for reading in jobs.readings for gpu, _ in reading.holdings})
    if unknown <= 0:
        return line
    known = f"{line.text}; " if line.state is CheckState.OK else ""
    return CheckResult(
        "jobs", CheckState.LIMITED, f"{known}{unknown} of {gpus} GPUs: {JOBS_UNKNOWN}", FACTS["jobs"].rights
    )


def _given(found: SourceReading, given: set[str]) -> str:
    if held := {gpu: job for reading in found.readings for gpu, job in reading.holdings}:
        return f"jobs of {len(held)} GPUs known, {sum(job is not None for job in held.values())} held"
    entities = {e for reading in found.readings for e, values in reading.rows if e.scope is not Scope.NODE and values}
    if given:
        return f"{len(given)} metrics" + (
            f" of {len(entities)}: {_names(_label(e) for e in entities)}" if entities else ""
        )
    return "nothing could be read" if any(reading.absent for reading in found.readings) else "read"


def _label(entity: Entity) -> str:
    return entity.link or entity.key


def _metrics(readings: Iterable[SourceReading]) -> tuple[set[str], dict[Absent, set[str]]]:
    """Return the metrics that the newest readings gave, and by reason those that they did not.

    Of an entity that gave nothing the name is returned instead of its metrics. MIG instances are left out.
    """
    given: set[tuple[Entity, str]] = set()
    absent: dict[tuple[Entity, str], Absent] = {}
    for found in readings:
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


def _gpus(config: AgentConfig, opened: SourceReading | None, gpus: Sequence[SourceReading]) -> list[CheckResult]:
    on_bus = _gpus_on_bus(Path(config.sys_root))
    if opened is None:
        text = f"not read: hardware = {config.hardware}"
        return [CheckResult("nvml", CheckState.MISSING, text, 'hardware = "auto"' if on_bus else "")]
    if opened.error:
        return [CheckResult("nvml", CheckState.BROKEN, opened.error, HUNG)]
    inventory = {key: value for reading in opened.readings for key, value in reading.inventory.items()}
    if reason := inventory.get("no_gpu_reason", ""):
        why, _, remedy = reason.partition(": ")
        nobody_asked = config.hardware == "auto" and not on_bus and reason == NOT_FOUND
        if on_bus:
            why += f"; {on_bus} NVIDIA GPUs are on the PCI bus"
        return [CheckResult("nvml", CheckState.MISSING if nobody_asked else CheckState.BROKEN, why, remedy)]
    driver = inventory.get("driver_version", "?")
    lines = [_found(driver, len(gpus), on_bus)]
    for found in gpus:
        if found.hung or found.error:
            lines.append(CheckResult(found.name, CheckState.BROKEN, found.error, HUNG))
    lines += _lost_or_refused(gpus)
    given, absent = _metrics(gpus)
    unsupported = absent.get(Absent.UNSUPPORTED, set())
    if any(found.readings for found in gpus):
        lines += [_gpm(given), _ecc(given)]
        rest = unsupported - set(GPM) - set(ECC)
        text = f"{len(given)} metrics" + (f"; not available on this GPU or driver: {_names(rest, 20)}" if rest else "")
        lines.append(CheckResult("nvml metrics", CheckState.OK, text))
    return lines


def _found(driver: str, count: int, on_bus: int) -> CheckResult:
    text = f"driver {driver}, {count} GPUs"
    if on_bus > count:
        return CheckResult(
            "nvml", CheckState.LIMITED, f"{text}; {on_bus} are on the PCI bus", "NVRM lines in the kernel log say why"
        )
    return CheckResult("nvml", CheckState.OK, text)


def _lost_or_refused(gpus: Sequence[SourceReading]) -> list[CheckResult]:
    lines = []
    for found in gpus:
        _, absent = _metrics([found])
        if absent.get(Absent.LOST):
            lines.append(
                CheckResult(
                    found.name, CheckState.BROKEN, "lost: it has fallen off the bus", "reset it or reboot the node"
                )
            )
        elif refused := absent.get(Absent.NO_PERMISSION):
            remedy = "access to /dev/nvidia*; NVreg_RestrictProfilingToAdminUsers=0 for profiling"
            lines.append(CheckResult(found.name, CheckState.LIMITED, f"not allowed: {_names(refused)}", remedy))
        elif failed := absent.get(Absent.ERROR):
            lines.append(
                CheckResult(found.name, CheckState.LIMITED, f"failed: {_names(failed)}", "standard error says how")
            )
    return lines


def _gpm(given: set[str]) -> CheckResult:
    if given & set(GPM):
        return CheckResult("nvml profiling", CheckState.OK, f"GPM gives {len(given & set(GPM))} metrics")
    text = "no GPM, which Hopper and newer have: no tensor, SM and memory activity"
    return CheckResult(
        "nvml profiling", CheckState.MISSING, text, "dcgm-exporter gives it on Volta to Ampere: see source dcgm"
    )


def _ecc(given: set[str]) -> CheckResult:
    if given & set(ECC):
        return CheckResult("nvml ECC", CheckState.OK, f"{len(given & set(ECC))} counters")
    return CheckResult(
        "nvml ECC",
        CheckState.MISSING,
        "no ECC counters: ECC is off, or this GPU has none",
        "nvidia-smi -e 1, then a reset",
    )


def _gpus_on_bus(sys: Path) -> int:
    """Return how many NVIDIA GPUs the kernel lists, with or without a driver."""
    count = 0
    for device in sys.glob("bus/pci/devices/*"):
        try:
            vendor, kind = ((device / name).read_text("ascii").strip() for name in ("vendor", "class"))
        except OSError:  # removed meanwhile
            continue
        count += vendor == NVIDIA and kind.startswith(DISPLAY_CLASSES)
    return count


def _steps(config: AgentConfig) -> CheckResult:
    """Check whether an agent receives steps, in the way a training loop does."""
    path = config.steps_socket
    if not path:
        return CheckResult("steps", CheckState.MISSING, "not set: `steps_socket`")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            text = f"no agent receives at {path}: {error.strerror}; reports of training loops are lost"
            return CheckResult("steps", CheckState.MISSING, text, FACTS["steps"].rights)
    return CheckResult("steps", CheckState.OK, f"an agent receives at {path}")


def _dmi(sys: Path) -> CheckResult:
    path = sys / "class/dmi/id/product_serial"
    if not path.exists():
        return CheckResult("dmi", CheckState.MISSING, "the firmware has no serial number of the node")
    if os.access(path, os.R_OK):
        return CheckResult("dmi", CheckState.OK, "the node's serial number can be read")
    return CheckResult(
        "dmi", CheckState.LIMITED, "only root reads the node's serial number", "nothing else depends on it"
    )
