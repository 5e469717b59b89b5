"""Put a case together: place faults, run with and without them, keep what can be seen, write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from drover_simulator.strangers.e import faults_heat as heat
from drover_simulator.strangers.e.boards import Rng, build_site, build_units
from drover_simulator.strangers.e.faults_heat import Fault, Scene, Traces
from drover_simulator.strangers.e.faults_other import OTHERS, clock_wrong
from drover_simulator.strangers.e.jobs import Label, Scheduler
from drover_simulator.strangers.e.negatives import NEGATIVES, ONCE
from drover_simulator.strangers.e.physics import Plant, Room, Run, build_room, no_effects, simulate
from drover_simulator.strangers.e.rows import Measure, Story, write_inventory, write_rows
from drover_simulator.strangers.writer import CaseWriter, iso

HEAT = {
    "cooling": (6.0, heat.cooling), "fan": (3.0, heat.fan), "rack": (1.5, heat.rack), "hbm": (2.5, heat.hbm),
    "clock": (2.0, clock_wrong), "straggler": (1.5, heat.straggler_thermal),
}  # fmt: skip
APART_S = 1200.0  # no fault on a node within 20 minutes of another


def write_case(
    folder: str | Path,
    seed: int,
    *,
    nodes: int | None = None,
    hours: float | None = None,
    interval_s: float | None = None,
    healthy: bool = False,
    **other: int | None,
) -> None:
    """Write one case; the same arguments give the same bytes.

    `faults=0`, the only other argument, is `healthy=True`; another number is about how many faults to place.

    Raises:
        TypeError: another argument.
    """
    faults = other.pop("faults", None)
    if other:
        msg = f"unknown arguments: {', '.join(other)}"
        raise TypeError(msg)
    healthy = healthy or faults == 0
    site = build_site(_rng(seed, 1), nodes, hours, interval_s)
    units = build_units(_rng(seed, 2), site)
    load = Scheduler(_rng(seed, 3), site, healthy).fill()
    room = build_room(_rng(seed, 4), site)
    site.mig[list(load.claimed)] = False  # util is absent there, and an idle job would be hidden
    scene = Scene(_rng(seed, 5), site, units, load)
    calm, wanted = _negatives(scene, faults)
    scene.rng = _rng(seed, 6)
    story, bad = _settle(scene, room, calm, 0 if healthy else wanted, seed)
    _write(Path(folder), seed, story, [f.label for f in (*calm, *bad)])


def _rng(seed: int, part: int) -> Rng:
    return np.random.default_rng([seed, 0xE, part])


def _free(scene: Scene, placed: list[Fault], span: tuple[float, float]) -> list[int]:
    busy = set(scene.load.claimed)
    for fault in placed:
        if fault.busy[1] > fault.busy[0] and fault.busy[0] - APART_S < span[1] and span[0] < fault.busy[1] + APART_S:
            busy |= {n for n, _ in fault.label.members}
    return [n for n in range(scene.site.nodes) if n not in busy]


def _clear(scene: Scene, placed: list[Fault], fault: Fault) -> bool:
    free = set(_free(scene, placed, fault.busy))
    return all(n in free for n, _ in fault.label.members)


def _negatives(scene: Scene, faults: int | None) -> tuple[list[Fault], int]:
    """Place hard negatives; return them and the number of faults that the fleet should have."""
    site, rng = scene.site, scene.rng
    size = site.nodes * site.slots / 200 * site.seconds / 14400
    wanted = int(np.clip(round(float(rng.uniform(12, 25)) * size), 3, 30)) if faults is None else faults
    names, placed, used = list(NEGATIVES), list[Fault](), set[str]()
    chance = np.array([NEGATIVES[name][0] for name in names])
    want = max(3, int(wanted * 0.8) - len([la for la in scene.load.labels if not la.hardware]) // 2)
    for _ in range(want * 4):
        name = str(rng.choice(names, p=chance / chance.sum()))
        if name in used:
            continue
        fault = NEGATIVES[name][1](scene, list(range(site.nodes)))
        if fault is None or (fault.busy[1] > fault.busy[0] and not _clear(scene, placed, fault)):
            continue
        placed.append(fault)
        used |= {name} & ONCE
        if len(placed) >= want:
            break
    return placed, wanted


def _faults(scene: Scene, calm: list[Fault], placed: list[Fault], wanted: int) -> None:
    """Place faults: three quarters heat and clocks (held jobs are there already), a quarter of all else."""
    rng = scene.rng
    weights = np.array([weight for weight, _ in HEAT.values()])
    held = sum(label.hardware for label in scene.load.labels)
    others, rack_first = max(1, round(wanted / 4)), rng.random() < 0.5
    wanted = max(wanted, held + 3) if wanted else 0
    maker: Any
    for turn in range(wanted * 10):
        if len(placed) + held >= wanted:
            break
        names = {f.label.kind for f in placed if f.group == "other"}
        if rack_first and turn < 5 and not placed:  # a rack needs all its nodes, so it comes first
            group, pick, maker = "heat", "rack", heat.rack
        elif sum(f.group == "other" for f in placed) >= others or rng.random() < 0.55:
            group, pick = "heat", list(HEAT)[int(rng.choice(len(weights), p=weights / weights.sum()))]
            maker = HEAT[pick][1]
            if sum(f.label.cause.startswith(pick) for f in placed) >= np.ceil(
                wanted * (0.4 if pick == "cooling" else 0.25)
            ):
                continue
        else:
            group, pick = "other", str(rng.choice(list(OTHERS)))
            if pick.split()[0] in names and turn % 3:
                continue
            maker = OTHERS[pick]
        spare = _free(scene, [*calm, *placed], (-9e8, 9e8)) if turn % 2 else []
        fault = maker(scene, spare or [n for n in range(scene.site.nodes) if n not in scene.load.claimed])
        if fault is not None and _clear(scene, [*calm, *placed], fault):
            fault.group = group
            placed.append(fault)


def _settle(scene: Scene, room: Room, calm: list[Fault], wanted: int, seed: int) -> tuple[Story, list[Fault]]:
    """Run without faults, place them, run with them; those that cannot be seen are dropped and others placed."""
    eff, without = _run(scene, room, calm, seed)
    run, bad = without, list[Fault]()
    scene.calm = without
    rounds = 3 if scene.site.steps < 9000 else 1  # each costs a run
    for turn in range(rounds + 1):
        if turn < rounds:
            _faults(scene, calm, bad, wanted)
        if not bad:
            break
        eff, run = _run(scene, room, [*calm, *bad], seed)
        weak = [f for f in bad if f.check and f.check(without, run) < 1]
        if not weak:
            break
        bad = [f for f in bad if f not in weak]
    else:
        eff, run = _run(scene, room, [*calm, *bad], seed)
    for fault in bad:
        if fault.weigh:
            _weigh(fault, fault.weigh(without, run))
    traces = Traces()
    for fault in (*calm, *bad):
        if fault.visible:
            fault.visible(traces)
    return Story(scene.site, scene.units, scene.load, eff, run, traces), bad


def _weigh(fault: Fault, loss: float) -> None:
    """Set what a straggler loses; a hot board that loses nearly nothing is a thermal fault."""
    label = fault.label
    label.note += f", {loss:.1%} lost"
    if label.cause == "thermal" and loss < 0.03:
        label.kind, label.cause = "thermal", "cooling"
    else:
        label.severity = round(max(loss, 0.001), 3)


def _run(scene: Scene, room: Room, faults: list[Fault], seed: int) -> tuple[Any, Run]:
    eff = no_effects(scene.site, scene.units)
    for fault in faults:
        if fault.physical:
            fault.physical(eff)
    return eff, simulate(Plant(scene.site, scene.units, room, scene.load), eff, seed)


def _write(folder: Path, seed: int, story: Story, labels: list[Label]) -> None:
    site, load, rng = story.site, story.load, _rng(seed, 8)
    fleet: dict[str, Any] = {"generator": "e", "nodes": [], "jobs": []}
    for n, name in enumerate(site.names):
        row = {"name": name, "rack": site.racks[n], "leaf": f"leaf{site.rack_of[n] // 2}", "pool": site.pools[n]}
        fleet["nodes"].append({**row, "sku": site.boards[n].sku, "gpus": site.slots})
    if site.lists_jobs:
        for j, job in enumerate(load.jobs):
            end = None if job.end is None else iso(site.ms(job.end))
            members = [[site.names[n], k] for n, k in job.gpus]
            start = site.ms(job.start) if job.start else site.ms(-float(rng.exponential(30000)))  # runs already
            fleet["jobs"].append(
                {"id": f"{job.kind[:2]}{seed % 1000}-{j}", "start": iso(start), "end": end, "members": members}
            )
    writer = CaseWriter(folder, fleet)
    rng = _rng(seed, 7)
    write_rows(writer, Measure(rng, story))
    write_inventory(writer, rng, story)
    for at, n, k, kind, code, text in story.traces.lines:
        if 0 <= at < site.seconds:
            writer.event(site.ms(at), site.names[n], k, kind, code, text)
    for i, label in enumerate(sorted([*load.labels, *labels], key=lambda la: (la.start, la.kind, str(la.members)))):
        writer.label(**_line(story, i, label))
    writer.close()


def _line(story: Story, number: int, label: Label) -> dict[str, Any]:
    site = story.site
    one = len(label.members) == 1
    end = None if label.end is None or label.end >= site.seconds else site.ms(label.end)
    row: dict[str, Any] = {
        "id": f"e{number:02d}", "kind": label.kind, "node": site.names[label.members[0][0]],
        "gpu": label.members[0][1] if one else None, "start": site.ms(label.start), "end": end, "cause": label.cause,
        "hardware": label.hardware, "members": [[site.names[n], k] for n, k in label.members],
        "severity": label.severity, "note": label.note,
    }  # fmt: skip
    if label.precursor:
        row |= {"precursor": label.precursor, "precursor_start": iso(site.ms(label.precursor_start or 0.0))}
    return row
