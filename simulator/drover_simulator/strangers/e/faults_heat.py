"""Faults of heat, and what they look like from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from drover_simulator.strangers.e.boards import Array, Rng, Site, Units
from drover_simulator.strangers.e.jobs import Label, Load, Member
from drover_simulator.strangers.e.physics import Effects, Run

Check = Callable[[Run, Run], float]  # (without, with) -> size; under 1 it cannot be seen
Line = tuple[float, int, int | None, str, str, str]


@dataclass
class Traces:
    """What rows get in addition to the physics. Arrays are (rows, nodes, slots), made when first used."""

    counts: dict[str, Array] = field(default_factory=dict)  # increments of counters
    states: dict[str, Array] = field(default_factory=dict)  # NaN: as usual
    ports: dict[str, Array] = field(default_factory=dict)  # the same for links, counters and states
    gone: Array | None = None  # rows of GPUs that do not come
    node_gone: Array | None = None
    clock: Array | None = None  # seconds that a node's clock is off
    lines: list[Line] = field(default_factory=list)
    facts: list[tuple[float, int, dict[str, str]]] = field(default_factory=list)  # inventory changes


@dataclass
class Fault:
    """A fault as placed: its label, what it does, and how its size is measured."""

    label: Label
    busy: tuple[float, float]
    physical: Callable[[Effects], None] | None = None
    visible: Callable[[Traces], None] | None = None
    check: Check | None = None
    weigh: Check | None = None  # severity from the two runs
    group: str = "heat"


@dataclass
class Scene:
    """All that the placing of faults needs to know."""

    rng: Rng
    site: Site
    units: Units
    load: Load
    calm: Run | None = None  # the case without faults


def busy_power(scene: Scene, span: tuple[float, float | None], n: int, k: int) -> tuple[float, float]:
    """Power of a board at its busier quarter of a span, and the air there (die less R times power)."""
    site, units = scene.site, scene.units
    if scene.calm is None:
        return float(units.limit[n, k]) / 2, 33.0
    rows = slice(site.row(span[0]), max(site.row(span[1] or site.seconds), site.row(span[0]) + 1))
    power, die = scene.calm.power[rows, n, k], scene.calm.die[rows, n, k]
    top = float(np.percentile(power, 75))
    hot = float(np.percentile(die, 75))
    return top, hot - top * float(units.r_die[n, k] + units.r_sink[n, k])


def ramp(site: Site, start: float, long: float, end: float | None) -> Array:
    """0 to 1 over `long` seconds from `start`, 0 again from `end`."""
    t = np.arange(site.steps) * site.dt
    up = np.clip((t - start) / max(long, site.dt), 0, 1)
    return np.where(t > (site.seconds + 1 if end is None else end), 0.0, up)


def window(scene: Scene) -> tuple[float, float, float | None]:
    """Onset, length of ramp and end (None: not repaired within the case)."""
    rng, long = scene.rng, scene.site.seconds
    kind = str(rng.choice(["sudden", "minutes", "hours"]))
    if kind == "hours":
        rise = float(rng.uniform(0.25, 0.5)) * long
        return float(rng.uniform(0.1, 0.3)) * long, rise, None
    start = float(rng.uniform(0.12, 0.68)) * long
    rise = 10.0 if kind == "sudden" else float(rng.uniform(300, 900))
    end = start + rise + float(rng.uniform(1800, 6000))
    return start, rise, None if end > long - 600 or rng.random() < 0.25 else end


def label_of(ramp_s: float, span: tuple[float, float | None], label: Label) -> Label:
    """Set the start at a third of the ramp; a slow one creeps before."""
    label.start, label.end = span[0] + ramp_s / 3, span[1]
    if ramp_s >= 1200:
        label.precursor, label.precursor_start = "heat", span[0]
    label.hardware = True
    return label


def loaded(scene: Scene, span: tuple[float, float | None], nodes: list[int]) -> list[tuple[int, int, str]]:
    """Boards of `nodes` with some load in the span: (node, slot, kind of job)."""
    site, load = scene.site, scene.load
    when = slice(site.step(span[0]), site.step(span[1] or site.seconds))
    work = (load.demand[when] * load.kernel[when]).mean(axis=0)
    most = load.job[(when.start + when.stop) // 2].astype(int)
    found = []
    for n in nodes:
        for k in range(site.slots):
            if work[n, k] > 0.1:
                j = int(most[n, k])
                found.append((n, k, load.jobs[j].kind if j < len(load.jobs) else "between jobs"))
    return found


def rows_of(site: Site, label: Label) -> slice:
    """Rows in which a fault is there."""
    return slice(site.row(label.start), max(site.row(label.start) + 1, site.row(label.end or site.seconds)))


def rise_check(site: Site, label: Label, what: str, least: float) -> Check:
    """Size: rise of a quantity of the members at the busier quarter of the time, over `least`."""

    def check(without: Run, run: Run) -> float:
        when = rows_of(site, label)
        sizes = []
        for n, k in label.members:
            gain = getattr(run, what)[when, n] - getattr(without, what)[when, n]
            gain = gain if k is None or gain.ndim == 1 else gain[:, k]
            sizes.append(float(np.percentile(gain, 75)))
        return max(sizes) / least

    return check


def cooling(scene: Scene, nodes: list[int]) -> Fault | None:
    """R of one GPU up by 10 to 60 %: paste that pumps out (die side), a clogged plate or blocked fins (sink side)."""
    rng, units = scene.rng, scene.units
    start, rise, end = window(scene)
    choice = loaded(scene, (start, end), nodes)
    if not choice:
        return None
    kinds = sorted({kind for _, _, kind in choice})
    want = kinds[int(rng.integers(len(kinds)))]
    same = [c for c in choice if c[2] == want]
    n, k, _ = same[int(rng.integers(len(same)))]
    factor = float(np.exp(rng.uniform(np.log(1.1), np.log(1.6))))
    total = float(units.r_die[n, k] + units.r_sink[n, k])
    factor = max(factor, 1 + 2.6 / (total * busy_power(scene, (start, end), n, k)[0]))  # else under the sensor's step
    if factor > 1.7:
        return None
    paste = bool(rng.random() < 0.6)
    note = f"{'paste' if paste else 'fins or plate'}: R +{factor - 1:.0%}, ramp {rise / 60:.0f} min, load {want}"
    label = label_of(rise, (start, end), Label("thermal", "cooling", [(n, k)], start, end, note))
    label.severity = round(factor - 1, 3)
    more = (factor - 1) * total * ramp(scene.site, start, rise, end)

    def physical(eff: Effects) -> None:
        (eff.r_die if paste else eff.r_sink)[:, n, k] += more

    return Fault(label, (start, end or 9e9), physical, check=rise_check(scene.site, label, "die", 2.0))


def straggler_thermal(scene: Scene, nodes: list[int]) -> Fault | None:
    """A board of a synchronous job so hot that its clock steps down; R is chosen for a clock 5 to 30 % lower."""
    rng, units = scene.rng, scene.units
    start, rise, end = window(scene)
    choice = [c for c in loaded(scene, (start, end), nodes) if c[2] in ("train", "moe", "pipeline")]
    if not choice:
        return None
    n, k, kind = choice[int(rng.integers(len(choice)))]
    x = 1 - float(rng.uniform(0.05, 0.35))
    power, air = busy_power(scene, (start, end), n, k)
    power *= 0.25 + 0.75 * x * (0.55 + 0.45 * x) ** 2  # a quarter follows no clock
    total = float(units.r_die[n, k] + units.r_sink[n, k])
    more = max(0.0, (units.slow[n, k] + 1 - air) / power - total)
    if more > 1.5 * total:  # no paste is so bad
        return None
    if not more:
        return None
    note = f"throttles at {units.slow[n, k]:.0f} C, ramp {rise / 60:.0f} min, load {kind}"
    label = label_of(rise, (start, end), Label("straggler", "thermal", [(n, k)], start, end, note))
    label.severity = round(more / total, 3)
    curve = more * ramp(scene.site, start, rise, end)

    def physical(eff: Effects) -> None:
        eff.r_die[:, n, k] += curve

    def loss(without: Run, run: Run) -> float:
        when = rows_of(scene.site, label)
        return float(np.percentile(1 - run.clock[when, n, k] / np.maximum(without.clock[when, n, k], 0.1), 60))

    check = rise_check(scene.site, label, "die", 2.0)
    return Fault(label, (start, end or 9e9), physical, check=check, weigh=loss)


def fan(scene: Scene, nodes: list[int]) -> Fault | None:
    """One node's fans: one stops, one turns slower, the wall is at its limit (filters, a dead bank)."""
    rng, site = scene.rng, scene.site
    start, rise, end = window(scene)
    choice = sorted({n for n, _, _ in loaded(scene, (start, end), nodes) if not site.liquid[n]})
    if not choice:
        return None
    n = choice[int(rng.integers(len(choice)))]
    rpm = not site.no_fan[n]
    ways = ["stops", "slower", "wall at its limit", "bank slow"]
    way = str(rng.choice(ways if rpm else ways[2:]))
    rise = min(rise, 15.0) if way == "stops" else rise
    note = f"fan: {way}, ramp {rise / 60:.0f} min, law {site.fan_law}, {'rpm' if rpm else 'no rpm'}"
    label = label_of(rise, (start, end), Label("thermal", "fan", [(n, None)], start, end, note))
    j, curve = int(rng.integers(site.fans)), ramp(site, start, rise, end)
    size = float(rng.uniform(0.3, 0.6) if rpm else rng.uniform(0.5, 0.8))

    def physical(eff: Effects) -> None:
        if way == "stops":  # and air runs back through it
            eff.fan[:, n, j] *= 1 - curve
            eff.flow[:, n] *= 1 - curve * 0.6 / site.fans
        elif way == "slower":
            eff.fan[:, n, j] *= 1 - curve * size
        elif way == "bank slow":
            eff.fan[:, n, j : j + site.fans // 2] *= (1 - curve * size)[:, None]
        else:
            eff.flow[:, n] *= 1 - curve * size

    heat = rise_check(site, label, "die", 1.8)
    spin, mean = rise_check(site, label, "fan_min", 1.0), rise_check(site, label, "fan_mean", 0.07)

    def check(without: Run, run: Run) -> float:
        seen = max(abs(spin(without, run)) / 0.07, mean(without, run)) if rpm else 0.0
        return max(heat(without, run), seen)

    return Fault(label, (start, end or 9e9), physical, _fan_alarm(scene, n, label, way), check)


def _fan_alarm(scene: Scene, n: int, label: Label, way: str) -> Callable[[Traces], None] | None:
    """A board says that a fan failed when it stops; few do when it turns slower."""
    site = scene.site
    if way != "stops" or site.no_fan[n] or "fans_failed" not in site.columns:
        return None

    def visible(traces: Traces) -> None:
        array = traces.states.setdefault("fans_failed", np.full((site.rows, site.nodes, site.slots), np.nan))
        array[rows_of(site, label), n] = 1

    return visible


def rack(scene: Scene, nodes: list[int]) -> Fault | None:
    """The air or loop of a rack: CRAC or door (+5 to 14 K), or a pump of the CDU (flow down, water up)."""
    rng, site = scene.rng, scene.site
    free = [r for r in range(int(site.rack_of.max()) + 1) if set(np.flatnonzero(site.rack_of == r)) <= set(nodes)]
    free = [r for r in free if np.sum(site.rack_of == r) > 1]
    start, rise, end = window(scene)
    free = [r for r in free if loaded(scene, (start, end), [int(n) for n in np.flatnonzero(site.rack_of == r)])]
    if not free:
        return None
    mine = np.flatnonzero(site.rack_of == free[int(rng.integers(len(free)))])
    wet = bool(site.liquid[mine].all())
    rise = max(rise, float(rng.uniform(60, 400)))  # no room warms at once
    warm, flow = float(rng.uniform(4, 10) if wet else rng.uniform(5, 14)), float(rng.uniform(0.35, 0.7) if wet else 1)
    part = np.linspace(1.2, 0.75, len(mine)) if not wet else np.ones(len(mine))
    what = "CDU pump" if wet else str(rng.choice(["CRAC", "door", "containment"]))
    note = f"{what}: +{warm:.1f} K{f', flow {flow:.0%}' if wet else ''}, ramp {rise / 60:.0f} min"
    note += f", inlet {'un' if site.no_inlet[mine].all() else ''}measured"
    label = label_of(rise, (start, end), Label("thermal", "rack", [(int(n), None) for n in mine], start, end, note))
    curve = ramp(site, start, rise, end)

    def physical(eff: Effects) -> None:
        eff.inlet[:, mine] += curve[:, None] * warm * part[None, :]
        eff.flow[:, mine] *= (1 - curve * (1 - flow))[:, None]

    return Fault(label, (start, end or 9e9), physical, check=rise_check(site, label, "die", 2.5))


def hbm(scene: Scene, nodes: list[int]) -> Fault | None:
    """HBM alone: the pad or paste of one stack; +6 to 22 K at its load."""
    rng, site, units = scene.rng, scene.site, scene.units
    if "memory_temp_c" not in site.columns:
        return None
    start, rise, end = window(scene)
    choice = [c for c in loaded(scene, (start, end), nodes) if site.boards[c[0]].hbm]
    if not choice:
        return None
    n, k, kind = choice[int(rng.integers(len(choice)))]
    when = slice(site.step(start), site.step(end or site.seconds))
    used = 0.15 + (scene.load.dram[when, n, k] * scene.load.demand[when, n, k]).mean()
    gain = float(rng.uniform(6, 22)) / float(units.p_memory[n, k] * used * units.r_hbm[n, k])
    limit = "driver's limit known" if "inventory_memory_max" in site.columns else "no limit known"
    note = f"one stack: R x{1 + gain:.1f}, ramp {rise / 60:.0f} min, load {kind}, {limit}"
    label = label_of(rise, (start, end), Label("thermal", "hbm", [(n, k)], start, end, note))
    label.severity = round(gain, 3)
    curve = gain * ramp(site, start, rise, end)

    def physical(eff: Effects) -> None:
        eff.r_hbm[:, n, k] += curve

    return Fault(label, (start, end or 9e9), physical, check=rise_check(site, label, "hbm", 3.5))


def members_of(nodes: list[int]) -> list[Member]:
    """Whole nodes as members."""
    return [(n, None) for n in nodes]
