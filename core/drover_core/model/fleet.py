"""The fleet that should exist: nodes and their topology, from `fleet.toml` or a case's `fleet.json`.

Reports of agents never override it. A node in it that never reports is a finding.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drover_core.times import from_iso, iso


class FleetError(ValueError):
    """A fleet file cannot be used. The message names the file and the place, and says what to do."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A network port: its name, the slot of the GPU that it serves, its leaf switch.

    `gpu`: None: not given here, so the node's PCI bus decides; -1: it serves no GPU.
    """

    link: str
    gpu: int | None = None
    leaf: str | None = None


@dataclass(frozen=True, slots=True)
class NodeSpec:
    name: str
    rack: str = ""
    leaf: str = ""
    pool: str = ""
    sku: str = ""
    gpus: int = 8
    links: tuple[LinkSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class RackSpec:
    """A rack: the row of the room that it is in, and the power that it may draw."""

    name: str
    row: str = ""
    power_budget_w: float | None = None


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job and the GPUs that it holds, each as (node, slot). `end_ms` None: it still runs."""

    id: str
    start_ms: int
    end_ms: int | None
    members: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """What a job or an inference service is expected to keep.

    Attributes:
        job: its name, `*` and `?` as in a shell; or service: the name of inference servers in the agents' settings. One
            of both is empty.
        metric: `step_time_s` of a job, `ttft_p95_s` of a service: the highest value that is within it.
        minutes: how long it must be above that until it is reported.
    """

    job: str
    service: str
    metric: str
    limit: float
    minutes: float = 5.0


@dataclass(frozen=True, slots=True)
class FleetSpec:
    nodes: tuple[NodeSpec, ...]
    jobs: tuple[JobSpec, ...] = ()
    name: str = ""
    racks: tuple[RackSpec, ...] = ()
    objectives: tuple[ObjectiveSpec, ...] = ()
    by_name: dict[str, NodeSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name: dict[str, NodeSpec] = {}
        for node in self.nodes:
            if node.name in by_name:
                raise FleetError(f"node {node.name!r} is listed twice; give each node one entry")
            by_name[node.name] = node
        object.__setattr__(self, "by_name", by_name)

    @property
    def gpu_count(self) -> int:
        return sum(node.gpus for node in self.nodes)


MOST_GPUS = 255  # of a node
MOST_NAMES = 200_000  # of one host list
_BRACKET = re.compile(r"\[([^\]]*)\]")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")  # a host name, as Slurm and Kubernetes take them


def is_node_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def expand(pattern: str) -> Iterator[str]:
    """Yield the names of a Slurm host list: `r01n[01-04,07]` gives r01n01 .. r01n04, r01n07.

    Raises:
        FleetError: the pattern is malformed, or would give more than 200,000 names.
    """
    for count, name in enumerate(_expand(pattern)):
        if count == MOST_NAMES:
            raise FleetError(f"{pattern!r} gives more than {MOST_NAMES:,} names")
        yield name


def _expand(pattern: str) -> Iterator[str]:
    found = _BRACKET.search(pattern)
    if found is None:
        if not _NAME.fullmatch(pattern):
            raise FleetError(f"{pattern!r} is not a node name; use letters, digits, '-', '_' and '.'")
        yield pattern
        return
    for part in found[1].split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise FleetError(f"{pattern!r}: {part!r} is not a number or a range such as 01-16")
        first, last = int(low), int(high or low)
        if not 0 <= last - first < MOST_NAMES:
            raise FleetError(f"{pattern!r}: the range {part} has its end before its start, or is too long")
        for number in range(first, last + 1):
            yield from _expand(f"{pattern[: found.start()]}{number:0{len(low)}d}{pattern[found.end() :]}")


def load_toml(path: Path) -> FleetSpec:
    """Read `fleet.toml`.

    Raises:
        FleetError: missing, not TOML, or not of the documented form.
    """
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise FleetError(
            f"{path}: {error.strerror}; write the nodes that should exist there (docs/reference/fleet-file.md)"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FleetError(f"{path}: not valid TOML: {error}") from None
    _known(path, "the file", data, {"name", "nodes", "racks", "objectives"})
    nodes: list[NodeSpec] = []
    for number, entry in enumerate(_list(path, "nodes", data.get("nodes", [])), 1):
        where = f"[[nodes]] number {number}"
        _known(path, where, entry, {"names", "rack", "leaf", "pool", "sku", "gpus", "links"})
        if not isinstance(entry.get("names"), str):
            raise FleetError(f'{path}: {where}: names is missing; write names = "r01n[01-16]"')
        try:
            names = list(expand(entry["names"]))
        except FleetError as error:
            raise FleetError(f"{path}: {where}: {error}") from None
        nodes.extend(_node(path, where, {**entry, "name": name}) for name in names)
    if not nodes:
        raise FleetError(f"{path}: no [[nodes]] entry; a fleet needs at least one node")
    known = {node.rack for node in nodes}
    racks: dict[str, RackSpec] = {}
    for number, entry in enumerate(_list(path, "racks", data.get("racks", [])), 1):
        for rack in _racks(f"{path}: [[racks]] number {number}", entry):
            if rack.name not in known:
                raise FleetError(f"{path}: [[racks]] number {number}: no node is in rack {rack.name!r}")
            if rack.name in racks:
                raise FleetError(f"{path}: [[racks]] number {number}: rack {rack.name!r} has two entries")
            racks[rack.name] = rack
    spec = _spec(path, tuple(nodes), (), data.get("name", ""), tuple(racks.values()))
    return replace(spec, objectives=_objectives(path, data))


def load_json(path: Path) -> FleetSpec:
    """Read a case's `fleet.json`.

    Raises:
        FleetError: missing, not JSON, or not of the documented form.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise FleetError(f"{path}: {error.strerror}; a case needs a fleet.json with its nodes") from None
    except ValueError as error:
        raise FleetError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise FleetError(f'{path}: expected an object with "nodes" and "jobs"')
    nodes = tuple(
        _node(path, f"nodes[{i}]", entry) for i, entry in enumerate(_list(path, "nodes", data.get("nodes", [])))
    )
    jobs = tuple(_job(path, f"jobs[{i}]", entry) for i, entry in enumerate(_list(path, "jobs", data.get("jobs", []))))
    if not nodes:
        raise FleetError(f"{path}: no nodes; a fleet needs at least one")
    return replace(_spec(path, nodes, jobs, ""), objectives=_objectives(path, data))


def dump_json(spec: FleetSpec, generator: str = "") -> str:
    """Return the `fleet.json` of a case; `generator`: what made the case, if it was simulated."""
    nodes = []
    for node in spec.nodes:
        entry: dict[str, Any] = {
            "name": node.name, "rack": node.rack, "leaf": node.leaf, "pool": node.pool, "sku": node.sku,
            "gpus": node.gpus,
        }  # fmt: skip
        if node.links:
            entry["links"] = [{"link": k.link, "gpu": k.gpu, "leaf": k.leaf} for k in node.links]
        nodes.append(entry)
    jobs = [
        {
            "id": job.id,
            "start": iso(job.start_ms),
            "end": None if job.end_ms is None else iso(job.end_ms),
            "members": [list(m) for m in job.members],
        }
        for job in spec.jobs
    ]
    made_by = {"generator": generator} if generator else {}
    wanted = {"objectives": [_given(each) for each in spec.objectives]} if spec.objectives else {}
    return json.dumps({**made_by, "nodes": nodes, "jobs": jobs, **wanted}, indent=1)


def dump_toml(spec: FleetSpec) -> str:
    """Return a `fleet.toml` with one entry for each node."""
    lines = [f"name = {json.dumps(spec.name)}", ""]
    for rack in spec.racks:
        lines += ["[[racks]]", f"names = {json.dumps(rack.name)}", f"row = {json.dumps(rack.row)}"]
        lines += [f"power_budget_w = {rack.power_budget_w!r}"] if rack.power_budget_w is not None else []
        lines.append("")
    for objective in spec.objectives:
        lines += ["[[objectives]]", *(f"{key} = {json.dumps(value)}" for key, value in _given(objective).items()), ""]
    for node in spec.nodes:
        lines += [
            "[[nodes]]",
            f"names = {json.dumps(node.name)}",
            *(f"{key} = {json.dumps(getattr(node, key))}" for key in ("rack", "leaf", "pool", "sku")),
            f"gpus = {node.gpus}",
            *([f"links = [{', '.join(_inline(link) for link in node.links)}]"] if node.links else []),
            "",
        ]
    return "\n".join(lines)


def _inline(link: LinkSpec) -> str:
    given = {"link": link.link, "gpu": link.gpu, "leaf": link.leaf}
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in given.items() if value is not None) + "}"


def _racks(where: str, entry: dict[str, Any]) -> Iterator[RackSpec]:
    if unknown := sorted(set(entry) - {"names", "row", "power_budget_w"}):
        raise FleetError(f"{where}: unknown key {unknown[0]!r}; known are names, power_budget_w, row")
    names, row, budget = entry.get("names"), entry.get("row", ""), entry.get("power_budget_w")
    if not isinstance(names, str):
        raise FleetError(f'{where}: names is missing; write names = "r[01-08]"')
    if not isinstance(row, str):
        raise FleetError(f"{where}: row must be a string, found {row!r}")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < 1e9):
        raise FleetError(f"{where}: power_budget_w must be a number of watts above 0, found {budget!r}")
    try:
        for name in expand(names) if "[" in names else (names,):
            yield RackSpec(name, row, None if budget is None else float(budget))
    except FleetError as error:
        raise FleetError(f"{where}: {error}") from None


_OBJECTIVES = {"job": "step_time_s", "service": "ttft_p95_s"}  # who has one, and its metric


def _given(objective: ObjectiveSpec) -> dict[str, str | float]:
    """Return the keys of an objective in a fleet file."""
    whose = {"job": objective.job} if objective.job else {"service": objective.service}
    return {**whose, objective.metric: objective.limit, "minutes": objective.minutes}


def _objectives(path: Path, data: dict[str, Any]) -> tuple[ObjectiveSpec, ...]:
    found = []
    for number, entry in enumerate(_list(path, "objectives", data.get("objectives", [])), 1):
        where = f"[[objectives]] number {number}"
        _known(path, where, entry, {"job", "service", "minutes", *_OBJECTIVES.values()})
        whose = [key for key in _OBJECTIVES if key in entry]
        if len(whose) != 1 or not isinstance(entry[whose[0]], str) or not entry[whose[0]]:
            raise FleetError(f'{path}: {where}: write either job = "llama*" or service = "chat"')
        metric = _OBJECTIVES[whose[0]]
        if metric not in entry or len(set(_OBJECTIVES.values()) & set(entry)) != 1:
            raise FleetError(f"{path}: {where}: an objective of a {whose[0]} is {metric} = SECONDS, and nothing else")
        for key, high in ((metric, 1e6), ("minutes", 1440.0)):
            value = entry.get(key, 5.0 if key == "minutes" else None)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
                raise FleetError(f"{path}: {where}: {key} must be a number above 0, {high:g} at most, found {value!r}")
        minutes = float(entry.get("minutes", 5.0))
        found.append(
            ObjectiveSpec(entry.get("job", ""), entry.get("service", ""), metric, float(entry[metric]), minutes)
        )
    return tuple(found)


def _spec(
    path: Path, nodes: tuple[NodeSpec, ...], jobs: tuple[JobSpec, ...], name: str, racks: tuple[RackSpec, ...] = ()
) -> FleetSpec:
    try:
        spec = FleetSpec(nodes, jobs, name, racks)
    except FleetError as error:
        raise FleetError(f"{path}: {error}") from None
    for job in jobs:
        for node, gpu in job.members:
            if node not in spec.by_name or not 0 <= gpu < spec.by_name[node].gpus:
                raise FleetError(f"{path}: job {job.id!r} names GPU {gpu} of {node!r}, which no node of the fleet has")
    return spec


def _list(path: Path, where: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise FleetError(f"{path}: {where}: expected a list of tables")
    return value


def _known(path: Path, where: str, entry: dict[str, Any], keys: set[str]) -> None:
    unknown = sorted(set(entry) - keys)
    if unknown:
        raise FleetError(f"{path}: {where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(keys))}")


def _node(path: Path, where: str, entry: dict[str, Any]) -> NodeSpec:
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FleetError(f"{path}: {where}: name {name!r} is not a node name")
    for key in ("rack", "leaf", "pool", "sku"):
        if not isinstance(entry.get(key, ""), str):
            raise FleetError(f"{path}: {where}: {key} must be a string, found {entry[key]!r}")
    gpus = entry.get("gpus", 8)
    if not isinstance(gpus, int) or isinstance(gpus, bool) or not 0 <= gpus <= MOST_GPUS:
        raise FleetError(f"{path}: {where}: gpus must be a number from 0 to {MOST_GPUS}, found {gpus!r}")
    links = []
    for item in _list(path, f"{where}.links", entry.get("links", [])):
        if not isinstance(item.get("link"), str):
            raise FleetError(f"{path}: {where}.links: each entry needs a link name")
        slot, leaf = item.get("gpu"), item.get("leaf")
        if slot is not None and (isinstance(slot, bool) or not isinstance(slot, int) or slot < -1):
            raise FleetError(
                f"{path}: {where}.links: gpu of {item['link']!r} must be the slot of a GPU, or -1 for a port that"
                f" serves none; found {slot!r}"
            )
        if leaf is not None and not isinstance(leaf, str):
            raise FleetError(f"{path}: {where}.links: leaf of {item['link']!r} must be a string, found {leaf!r}")
        links.append(LinkSpec(item["link"], slot, leaf))
    fields = {key: entry.get(key, "") for key in ("rack", "leaf", "pool", "sku")}
    return NodeSpec(name=name, gpus=gpus, links=tuple(links), **fields)


def _job(path: Path, where: str, entry: dict[str, Any]) -> JobSpec:
    try:
        members = tuple((str(node), int(gpu)) for node, gpu in entry["members"])
        end = entry.get("end")
        return JobSpec(str(entry["id"]), from_iso(entry["start"]), None if end is None else from_iso(end), members)
    except (KeyError, TypeError, ValueError) as error:
        raise FleetError(
            f'{path}: {where}: expected {{"id", "start", "end", "members": [[node, gpu], ...]}} ({error!r})'
        ) from None
