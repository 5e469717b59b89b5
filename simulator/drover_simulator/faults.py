"""Read and write files of faults to inject. effects.py has what each kind does to the fleet."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drover_core.model.fleet import FleetSpec
from drover_simulator.draw import demo_faults, draw_faults
from drover_simulator.fault import Fault, FaultsError, Label
from drover_simulator.kinds import KINDS

__all__ = ["Fault", "FaultsError", "Label", "demo_faults", "draw_faults", "dump_faults", "load_faults"]

_KEYS = {item.name for item in dataclasses.fields(Fault)}


def dump_faults(faults: list[Fault]) -> str:
    """Return the JSON that `load_faults` reads."""
    return json.dumps({"faults": [dataclasses.asdict(fault) for fault in faults]}, indent=1)


def load_faults(path: Path, spec: FleetSpec) -> list[Fault]:
    """Read `{"faults": [{"kind", "cause", "node", "gpu", "start_s", "end_s", "severity", "ramp_s"}, ...]}`.

    Without `end_s` a fault does not end; `severity` and `ramp_s` default to those of its kind. `gpu` is for kinds that
    hit one GPU.

    Raises:
        FaultsError: missing, not JSON, or a fault that this fleet cannot have.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise FaultsError(f"{path}: {error.strerror}; give a JSON file of faults, or `demo` or `none`") from None
    except ValueError as error:
        raise FaultsError(f"{path}: not valid JSON: {error}") from None
    entries = data.get("faults") if isinstance(data, dict) else data
    if not isinstance(entries, list):
        raise FaultsError(f'{path}: expected {{"faults": [...]}}')
    return [_fault(f"{path}: fault {number}", entry, spec) for number, entry in enumerate(entries, 1)]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One fault of a file, read with checks."""

    where: str
    data: dict[str, Any]

    def number(self, key: str, default: float | None, low: float) -> float | None:
        value = self.data.get(key, default)
        if value is None and default is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= low:
            raise FaultsError(f"{self.where}: {key} must be a number from {low:g}, found {value!r}")
        return float(value)


def _fault(where: str, data: Any, spec: FleetSpec) -> Fault:
    if not isinstance(data, dict):
        raise FaultsError(f"{where}: expected an object, found {data!r}")
    if unknown := sorted(set(data) - _KEYS):
        raise FaultsError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}")
    name = (str(data.get("kind")), str(data.get("cause")))
    if name not in KINDS:
        known = ", ".join(f"{kind}/{cause}" for kind, cause in KINDS)
        raise FaultsError(f"{where}: no such fault {name[0]}/{name[1]}; known are {known}")
    kind = KINDS[name]
    node = spec.by_name.get(str(data.get("node")))
    if node is None:
        raise FaultsError(f"{where}: node {data.get('node')!r} is not in the fleet")
    gpu = data.get("gpu")
    if kind.scope == "gpu" and (not isinstance(gpu, int) or isinstance(gpu, bool) or not 0 <= gpu < node.gpus):
        raise FaultsError(f"{where}: gpu must be a slot from 0 to {node.gpus - 1} of {node.name}, found {gpu!r}")
    if kind.scope != "gpu" and gpu is not None:
        raise FaultsError(f"{where}: {name[0]}/{name[1]} hits a {kind.scope}; leave gpu out")
    entry = _Entry(where, data)
    start_s = entry.number("start_s", None, 0.0)
    if start_s is None:
        raise FaultsError(f"{where}: start_s is missing; seconds after the fleet's start")
    end_s = entry.number("end_s", None, start_s)
    severity = entry.number("severity", kind.severity[1], 0.0)
    ramp_s = entry.number("ramp_s", kind.ramp_s, 0.0)
    assert severity is not None
    assert ramp_s is not None
    return Fault(*name, node.name, gpu, start_s, end_s, severity, ramp_s, str(data.get("id", "")))
