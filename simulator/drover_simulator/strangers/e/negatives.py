"""What looks like a fault and is none: rooms, loops, fans, plans, crashes. Labels with hardware false."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from drover_simulator.strangers.e.boards import Array
from drover_simulator.strangers.e.faults_heat import Fault, Scene, Traces, members_of, ramp
from drover_simulator.strangers.e.faults_other import add_counts, hide, no_process
from drover_simulator.strangers.e.jobs import Label
from drover_simulator.strangers.e.physics import Effects

Maker = Callable[[Scene, list[int]], Fault | None]


def _span(scene: Scene, least: float, most: float) -> tuple[float, float]:
    long = min(float(scene.rng.uniform(least, most)), 0.6 * scene.site.seconds)
    start = float(scene.rng.uniform(0.08, 0.9)) * (scene.site.seconds - long)
    return start, start + long


def _label(kind: str, cause: str, nodes: list[int], span: tuple[float, float | None], note: str) -> Label:
    return Label(kind, cause, members_of(nodes), span[0], span[1], note)


def _warm(cause: str) -> Maker:
    """A room that warms by 2 to 6 K in an hour or two; a loop's maintenance: 3 K on all racks."""

    def make(scene: Scene, _free: list[int]) -> Fault | None:
        site, rng = scene.site, scene.rng
        wet = cause == "loop_maintenance"
        nodes = [n for n in range(site.nodes) if bool(site.liquid[n]) == wet]
        if not nodes:
            return None
        start, end = _span(scene, 3600, 9000)
        size, rise = (3.0, 600.0) if wet else (float(rng.uniform(2, 6)), float(rng.uniform(2400, 6000)))
        curve = np.minimum(ramp(site, start, rise, None), 1 - ramp(site, end, 1200, None)) * size

        def physical(eff: Effects) -> None:
            eff.inlet[:, nodes] += curve[:, None]

        label = _label("thermal", cause, nodes, (start, end + 1200), f"+{size:.1f} K over {rise / 60:.0f} min")
        return Fault(label, (-1, -1), physical)

    return make


def fans_ramp(scene: Scene, free: list[int]) -> Fault | None:
    """A board's controller sets its fans to full for a while (firmware, an operator's test)."""
    dry = [n for n in free if not scene.site.liquid[n]]
    if not dry:
        return None
    n, span = int(scene.rng.choice(dry)), _span(scene, 900, 3600)
    when = slice(scene.site.step(span[0]), scene.site.step(span[1]))

    def physical(eff: Effects) -> None:
        eff.fan_floor[when, n] = 1.0

    return Fault(_label("thermal", "fans_full", [n], span, "fans at full, then back"), span, physical)


def _limits(cause: str) -> Maker:
    """The operator sets the power limit of a rack (a plan) or of all nodes."""

    def make(scene: Scene, _free: list[int]) -> Fault | None:
        site, rng, units = scene.site, scene.rng, scene.units
        racks = int(site.rack_of.max()) + 1
        chosen = (
            np.arange(site.nodes) if cause == "fleet_limit" else np.flatnonzero(site.rack_of == rng.integers(racks))
        )
        nodes = [int(n) for n in chosen]
        span = _span(scene, 2400, 4800 if cause == "fleet_limit" else 9000)
        share = float(rng.choice([0.7, 0.8, 0.9]))
        when = slice(site.step(span[0]), site.step(span[1]))

        def physical(eff: Effects) -> None:
            eff.limit[when, nodes] *= share

        def visible(traces: Traces) -> None:
            for n in nodes:
                for at, part in ((span[0], share), (span[1], 1.0)):
                    limits = units.limit[n] * part
                    traces.facts.append(
                        (at, n, {f"gpu{k}.power_limit_set_w": f"{w:.0f}" for k, w in enumerate(limits)})
                    )

        label = _label("straggler", cause, nodes, span, f"power limit {share:.0%} by plan")
        return Fault(label, (-1, -1), physical, visible)

    return make


def _away(cause: str) -> Maker:
    """A planned reboot, or a fan bank replaced: the agent stops, rows end, all comes back with new counters."""

    def make(scene: Scene, free: list[int]) -> Fault | None:
        site, rng = scene.site, scene.rng
        dry = [n for n in free if cause == "planned_reboot" or not site.liquid[n]]
        if not dry:
            return None
        n = int(rng.choice(dry))
        span = _span(scene, 300, 900) if cause == "planned_reboot" else _span(scene, 900, 2400)
        better = float(rng.uniform(0.97, 1.08))
        when = slice(site.step(span[0] - 120), site.step(span[1] + 120))

        def physical(eff: Effects) -> None:
            eff.dead[when, n] = 1
            if cause != "planned_reboot":
                eff.fan[when.stop :, n] *= better

        def visible(traces: Traces) -> None:
            hide(traces, site, n, None, span)
            traces.lines.append((span[0], n, None, "lifecycle", "agent_stopped", "asked to stop"))
            traces.lines.append((span[1], n, None, "lifecycle", "agent_started", "started"))

        return Fault(
            _label("liveness", cause, [n], span, cause.replace("_", " ")),
            (span[0] - 200, span[1] + 200),
            physical,
            visible,
        )

    return make


def crash(scene: Scene, free: list[int]) -> Fault | None:
    """A job's own bug: XID 31 or 13 on all its ranks or one; its GPUs are idle for minutes after."""
    site, rng, load = scene.site, scene.rng, scene.load
    at = float(rng.uniform(0.1, 0.9)) * site.seconds
    index = load.job[site.step(at) - 1]
    jobs = sorted({int(j) for n in free for j in index[n] if j < len(load.jobs) and load.jobs[int(j)].kind != "held"})
    jobs = [j for j in jobs if {n for n, _ in load.jobs[j].gpus} <= set(free)]
    if not jobs:
        return None
    job = load.jobs[jobs[int(rng.integers(len(jobs)))]]
    code = str(rng.choice(["31", "13"]))
    hit = job.gpus if rng.random() < 0.5 else job.gpus[:1]
    back = min(at + float(rng.uniform(120, 900)), job.end or site.seconds)
    a, b = np.array([n for n, _ in job.gpus]), np.array([k for _, k in job.gpus])
    text = {
        "31": "31, pid=40123, name=python3, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_3 "
        "faulted @ 0x7f_8a000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
        "13": "13, pid=40123, name=python3, Graphics SM Warp Exception on (GPC 2, TPC 1, SM 0): Out Of Range Address",
    }[code]

    def physical(eff: Effects) -> None:
        eff.dead[site.step(at) : site.step(back), a, b] = 1

    which = np.zeros((site.nodes, site.slots), np.bool_)
    which[a, b] = True

    def visible(traces: Traces) -> None:
        no_process(traces, site, which, (at + 2, back))
        for n, k in hit:
            bus = f"NVRM: Xid (PCI:0000:{0x19 + 17 * k:02x}:00): "
            traces.lines.append((at + float(k) * 0.1, n, k, "xid", code, bus + text))

    nodes = sorted({n for n, _ in job.gpus})
    label = _label("xid", "job_crash", nodes, (at, back), f"XID {code} on {len(hit)} of {len(job.gpus)} ranks")
    return Fault(label, (at, back), physical, visible)


def small_offset(scene: Scene, free: list[int]) -> Fault | None:
    """A clock that is 0.5 to 3 s off, and a correction: not wrong enough to matter."""
    site, rng = scene.site, scene.rng
    if not site.has_node or "clock" not in site.columns or not free:
        return None
    n, span = int(rng.choice(free)), _span(scene, 1200, 7200)
    t = (np.arange(site.rows) + 1) * site.interval
    off: Array = np.where((t > span[0]) & (t < span[1]), float(rng.choice([-1, 1]) * rng.uniform(0.5, 3)), 0.0)

    def visible(traces: Traces) -> None:
        if traces.clock is None:
            traces.clock = np.zeros((site.rows, site.nodes))
        traces.clock[:, n] += off

    return Fault(_label("liveness", "small_offset", [n], span, f"{np.abs(off).max():.1f} s off"), span, visible=visible)


def few_errors(scene: Scene, free: list[int]) -> Fault | None:
    """Some corrected ECC errors in a row, at a rate that healthy boards have."""
    site, rng = scene.site, scene.rng
    if "ecc" not in site.columns or not free:
        return None
    n, k, span = int(rng.choice(free)), int(rng.integers(site.slots)), _span(scene, 600, 3600)
    rows = np.arange(site.row(span[0]), max(site.row(span[1]), site.row(span[0]) + 1))
    hits = rng.choice(rows, int(rng.integers(1, 7)))

    def visible(traces: Traces) -> None:
        add_counts(traces, site, "ecc_dram_corrected")[:, n, k] += np.bincount(hits, minlength=site.rows)

    return Fault(_label("memory", "few_ecc", [n], span, f"{len(hits)} corrected errors"), span, visible=visible)


def stall(scene: Scene, free: list[int]) -> Fault | None:
    """Storage is slow: a whole job waits for data."""
    site, rng, load = scene.site, scene.rng, scene.load
    jobs = [job for job in load.jobs if job.kind == "train" and {n for n, _ in job.gpus} <= set(free)]
    if not jobs:
        return None
    job, span = jobs[int(rng.integers(len(jobs)))], _span(scene, 300, 1500)
    nodes = sorted({n for n, _ in job.gpus})
    when = slice(site.step(span[0]), site.step(span[1]))
    part = float(rng.uniform(0.2, 0.7))

    def physical(eff: Effects) -> None:
        eff.dead[when, nodes] = np.maximum(eff.dead[when, nodes], 1 - part)

    return Fault(_label("straggler", "data_stall", nodes, span, f"whole job at {part:.0%}"), span, physical)


NEGATIVES: dict[str, tuple[float, Maker]] = {
    "room": (1.2, _warm("room_warms")), "loop": (1.0, _warm("loop_maintenance")), "fans": (1.5, fans_ramp),
    "rack": (1.0, _limits("rack_capped")), "fleet": (0.5, _limits("fleet_limit")),
    "reboot": (1.5, _away("planned_reboot")), "bank": (1.2, _away("fan_bank_replaced")), "crash": (1.5, crash),
    "offset": (1.2, small_offset), "ecc": (1.2, few_errors), "stall": (1.2, stall),
}  # fmt: skip
ONCE = {"room", "loop", "rack", "fleet"}
