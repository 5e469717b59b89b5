"""Detect heat that slows GPUs, failing cooling, and racks that get hot air.

Cooling is measured by the thermal resistance (core - inlet) / power, in degC/W, of a GPU at steady load. It does not
depend on load or room, so a GPU is compared with others of its SKU and slot and with its own past. The temperature
limit is the driver's own margin, never a fixed value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from drover_collector.detectors._lib.examples import Example, play, small_fleet
from drover_collector.detectors._lib.metrics import (
    Ints,
    boards,
    column,
    counter_share,
    jobs_of_nodes,
    margin_c,
)
from drover_collector.detectors._lib.robust import Bools, group_medians, middle
from drover_collector.detectors._lib.texts import listing, place
from drover_collector.detectors._lib.window import Window, onset_ms
from drover_collector.detectors.thermal.cooling import (
    HELD_BY_HEAT,
    LEAST_ALIKE,
    SLOWED_SHARE,
    Cooling,
    Places,
    cooling,
    gross,
    resistances,
)
from drover_collector.detectors.thermal.heat_model import HeatModel, Rise
from drover_collector.detectors.thermal.memory_heat import MemoryHeat, MemoryLimits
from drover_collector.fleet.buckets import Floats
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import (
    Evidence,
    Finding,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)

NAME = "thermal"
VERSION = 1
QUIET_MS = 300_000  # hysteresis: a core cools within a minute

RESISTANCE_OWN_RATIO = 1.20  # against its past of before a restart, where it was reported then
LEARN_BUCKETS = 30  # steady buckets before a GPU's own past counts
RESTORED = 10**9  # as `learnt`: the past is of before a restart
OWN_RATE = 0.001  # of the past's exponential mean: hours, as the model needs half an hour to find a small rise
LEARN_RATE = 0.02  # of a rack's inlet: about 8 min at 10 s
PERSIST = 2  # buckets
MARGIN_CRITICAL_C = -2.0  # slowdown offset of H100, GB200, GB300, L40 (NVSentinel); B200 has -3
INLET_HELD_MS = 600_000  # for which a reading of an inlet counts: some are read less often than GPUs
RACK_RISE_C = 4.0  # inlet of a whole rack above its own past
RACK_OVER_C = 4.0  # and above the other racks' median: day and load change all racks together
RACK_LIMIT_C = 35.0  # ASHRAE class A2: highest allowable inlet
RACK_LEARN = 18  # buckets before a rack is judged: the first readings are no past
RACK_SHARE = 0.75  # of a rack's nodes that must show it
NODE_SHARE = 0.5  # of a node's GPUs with bad cooling: fans or coolant of the node, not a heat sink
NODE_RISE = 1.12  # median of a node's GPUs over their peers elsewhere: all get too little air
# This ratio is enough by itself, if most GPUs are as many degrees over their peers. Nodes differ by where they stand;
# what is less is found against the node's own past.
NODE_RATIO, NODE_OVER_C = 1.35, 10.0
NODE_GPUS = 4  # judged GPUs of the node, at least
# Required time where a single bad GPU was reported before. When the job of most peers pauses for seconds, their cores
# cool while power hardly shows it, and all others seem 10 to 30 % warmer until the peers are warm again (time constants
# of 15 to 60 s).
NODE_RISE_MS = 60_000


@dataclass(slots=True)
class RackInlets:
    """Inlets of racks, arrays [R].

    Attributes:
        past: usual inlet, degC. learnt: buckets in it. streak: buckets in a row that were too warm.
        since_ms: rack that is reported -> since when.
    """

    past: Floats
    learnt: Ints
    streak: Ints
    since_ms: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, racks: int) -> RackInlets:
        return cls(np.full(racks, np.nan), np.zeros(racks, np.int64), np.zeros(racks, np.int64))


@dataclass(slots=True)
class ThermalState:
    places: Places = field(default_factory=Places)
    model: HeatModel | None = None
    memory: MemoryHeat | None = None
    past: Floats = field(default_factory=lambda: np.zeros(0))  # own resistance, degC/W, [G]
    learnt: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # buckets in `past`
    streak_slow: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    streak_bad: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    streak_warm: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # half of the GPUs over NODE_RISE, [N]
    since_ms: dict[int, int] = field(default_factory=dict)  # flagged GPU -> onset
    # GPU that cools badly -> (its headline, when last flagged); the headline stays while the load is too unsteady.
    headlines: dict[int, tuple[str, int]] = field(default_factory=dict)
    limits: MemoryLimits = field(default_factory=MemoryLimits)
    inlet: Floats = field(default_factory=lambda: np.zeros(0))  # newest known, degC, [N]
    inlet_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    racks: RackInlets = field(default_factory=lambda: RackInlets.of(0))
    reopened: Sequence[Incident] = ()  # open when the collector started


def restored(incidents: Sequence[Incident], _index: FleetIndex | None = None, _started_ms: int = 0) -> ThermalState:
    """Return state with the past of GPUs and racks with open incidents: a bad heat sink must not become their past."""
    return ThermalState(reopened=[i for i in incidents if NAME in i.detectors and i.closed_ms is None])


def _resume(index: FleetIndex, s: ThermalState) -> None:
    for incident in s.reopened:
        nodes = [index.node_number[node] for node, _ in incident.members if node in index.node_number]
        for e in incident.evidence if nodes else ():
            if e.metric == "inlet_temp_c" and incident.scope == "rack" and e.expected is not None:
                s.racks.past[index.rack[nodes[0]]] = e.expected
                s.racks.learnt[index.rack[nodes[0]]] = RACK_LEARN
        past: Mapping[str, float] = incident.snapshot_of(NAME).get("past", {}) if nodes else {}
        for slot, resistance in past.items():
            g = index.gpu(incident.members[0][0], int(slot))
            if g is not None:
                s.past[g], s.learnt[g] = resistance, RESTORED
        usual = incident.snapshot_of(NAME).get("memory")  # absent or empty: not known
        g = index.gpu(incident.node or "", incident.gpu) if incident.gpu is not None else None
        if s.memory is not None and usual and g is not None:
            s.memory.restore(g, usual, incident.since_ms)
    s.reopened = ()


def detect(window: Window, state: ThermalState | None, now_ms: int) -> tuple[list[Finding], ThermalState]:
    index = window.index
    s = state if state is not None else ThermalState()
    if len(s.past) != index.gpu_count or len(s.inlet) != index.node_count:
        s.model = HeatModel(index.gpu_node.astype(np.int64), index.rack.astype(np.int64), len(index.racks))
        s.memory = MemoryHeat(index.gpu_node.astype(np.int64))
        s.past = np.full(index.gpu_count, np.nan)
        s.learnt = np.zeros(index.gpu_count, np.int64)
        s.streak_slow = np.zeros(index.gpu_count, np.int64)
        s.streak_bad = np.zeros(index.gpu_count, np.int64)
        s.streak_warm = np.zeros(index.node_count, np.int64)
        s.inlet = np.full(index.node_count, np.nan)
        s.inlet_ms = np.zeros(index.node_count, np.int64)
        s.racks = RackInlets.of(len(index.racks))
        _resume(index, s)
    if not window.fresh:
        return [], s
    found = list(_racks(window, s, now_ms))
    hot_racks = {rack for rack, streak in enumerate(s.racks.streak.tolist()) if streak >= PERSIST}
    found += _gpus(window, s, hot_racks, now_ms)
    if s.model is not None:
        hot = np.flatnonzero(s.model.rise.hot_racks).tolist()
        warm = [rack for rack in hot if index.racks[rack] and rack not in hot_racks]
        found += [_warm_rack(window, s.model, rack, now_ms) for rack in warm]
    found += _hot_memory(window, s, now_ms)
    return found, s


def could_not_judge(window: Window) -> list[str]:
    have, result = window.newest.gpu, []
    if "gpu_temp_c" not in have or "power_w" not in have:
        result.append("cooling: the data lacks gpu_temp_c or power_w")
    if "throttle_thermal_sw_us" not in have and "throttle_thermal_hw_us" not in have:
        result.append("slowdown by heat: the data lacks throttle_thermal_sw_us and throttle_thermal_hw_us")
    if "inlet_temp_c" not in window.newest.node:
        result.append("hot racks: the data lacks inlet_temp_c")
    return result


def _inlets(window: Window, s: ThermalState) -> Floats:
    """Return each node's inlet, degC, float64 [N]; NaN where no sensor was read lately."""
    now = window.newest.node.get("inlet_temp_c")
    if now is not None:
        known = ~np.isnan(now)
        s.inlet[known], s.inlet_ms[known] = now[known], window.newest.end_ms
    return np.where(window.newest.end_ms - s.inlet_ms <= INLET_HELD_MS, s.inlet, np.nan)


def _gpus(window: Window, s: ThermalState, hot_racks: set[int], now_ms: int) -> Iterator[Finding]:
    index = window.index
    inlets = _inlets(window, s)
    now = cooling(window, inlets, s.places)
    resistance, expected, count, steady, settled = now.resistance, now.expected, now.count, now.steady, now.settled
    with np.errstate(invalid="ignore", divide="ignore"):
        over_peers = np.where(count >= LEAST_ALIKE, resistance / expected, np.nan)
    rise = _follow(window, s, inlets)
    read = ~np.isnan(inlets)[index.gpu_node]
    bad = gross(window, now, over_peers, read) | rise.hot | _still_bad(index, s, now, inlets)
    bad |= rise.hot_nodes[index.gpu_node] & ~np.isnan(rise.warmer_c)
    # Where no inlet is read, warm air looks like a warm node: that is for the model, against the past.
    rises = np.where(steady & read, over_peers, np.nan)
    bad |= _hot_nodes(index, rises, (resistance - expected) * column(window, "power_w"))
    s.streak_warm = _warm_for(index, rises, s.streak_warm)
    # Do not learn from a throttled GPU either: its present state would become its past.
    learn = settled & ~bad & (s.streak_bad == 0) & (s.streak_slow == 0)
    if s.model is not None:
        learn &= ~s.model.suspects
    s.past = np.where(learn & np.isnan(s.past), resistance, s.past)
    rate = np.maximum(1 / (s.learnt + 1), OWN_RATE)
    s.past = np.where(learn, s.past + rate * (resistance - s.past), s.past)
    s.learnt = np.where(learn, s.learnt + 1, s.learnt)

    shares = [counter_share(window, name) for name in HELD_BY_HEAT]
    held = np.fmax(*shares)
    margin = margin_c(window)
    slowed = (held >= SLOWED_SHARE) | (margin <= MARGIN_CRITICAL_C)
    s.streak_bad = np.where(bad, s.streak_bad + 1, np.where(steady | now.light, 0, s.streak_bad * slowed))
    s.streak_slow = np.where(slowed, s.streak_slow + 1, 0)
    flagged = (s.streak_bad >= PERSIST) | (s.streak_slow >= PERSIST)
    for g in [g for g in s.since_ms if not flagged[g]]:
        del s.since_ms[g]
    for g in [g for g, (_, last_ms) in s.headlines.items() if window.newest.end_ms - last_ms > QUIET_MS]:
        del s.headlines[g]  # its incident is over
    known_past = np.where(s.learnt >= LEARN_BUCKETS, s.past, np.nan)
    _note_onsets(window, s, flagged, inlets, np.where(np.isnan(known_past), expected, known_past))
    facts = _Facts(resistance, expected, count, known_past, rise, margin, held, *shares)
    for n in np.unique(index.gpu_node[flagged]).tolist():
        gpus = [g for g in range(int(index.first_gpu[n]), int(index.first_gpu[n + 1])) if flagged[g]]
        poor = [g for g in gpus if s.streak_bad[g] >= PERSIST]
        if int(index.rack[n]) in hot_racks and not poor:
            continue  # hot air, reported once for the rack
        if rise.hot_nodes[n] or _is_node_fault(window, s, n, gpus, rises):
            yield _node_finding(window, s, n, gpus, poor, facts, now_ms)
        else:
            for g in gpus:
                yield _gpu_finding(window, s, g, g in poor, facts, now_ms)


def _still_bad(index: FleetIndex, s: ThermalState, now: Cooling, inlets: Floats) -> Bools:
    """Return GPUs that a restart of the collector found badly cooled, and that still are, bool [G].

    The model begins again at a restart, and a bad heat sink must not become the GPU's past.
    """
    restored = s.learnt >= RESTORED
    if not restored.any():
        return restored
    with np.errstate(invalid="ignore", divide="ignore"):
        over_past = np.where(now.settled & (s.learnt >= LEARN_BUCKETS), now.resistance / s.past, np.nan)
    unread = np.isnan(inlets)
    if unread.any():
        over_past = over_past / _room(index, over_past, unread)
    return np.asarray(restored & now.steady & (over_past >= RESISTANCE_OWN_RATIO))


def _follow(window: Window, s: ThermalState, inlets: Floats) -> Rise:
    """Return what the newest block of the model showed."""
    assert s.model is not None
    temp, power, limit = (column(window, name) for name in ("gpu_temp_c", "power_w", "power_limit_w"))
    newest = window.newest
    index = window.index
    kind = boards(window) * len(index.pools) + index.pool  # one pool may be cooled by air, another by liquid
    s.model.layout.job, s.model.layout.board = jobs_of_nodes(window), kind
    s.model.advance(newest.end_ms, newest.length_ms, temp, power, limit, inlets)
    if s.memory is not None:
        memory = column(window, "memory_temp_c")
        active, used = column(window, "dram_active_ratio"), column(window, "memory_util_ratio")
        traffic = np.where(np.isnan(active), used, active)
        s.memory.advance(newest.end_ms, memory, temp, s.model.load, traffic)
    return s.model.rise


def _hot_memory(window: Window, s: ThermalState, now_ms: int) -> Iterator[Finding]:
    """Report GPUs whose HBM alone is too warm: against its own past, or at the driver's limit of its board."""
    if s.memory is None:
        return
    temps, end_ms = column(window, "memory_temp_c"), window.newest.end_ms
    s.limits.advance(window, temps)
    for g in np.flatnonzero(s.memory.hot | (s.limits.streak >= PERSIST)).tolist():
        node, gpu = window.index.member(g)
        warmer, temp, since = float(s.memory.warmer_c[g]), float(temps[g]), s.memory.since_ms(g)
        than = "its node's other GPUs say" if s.memory.by_peers[g] else "before at such a load"
        text = f"its HBM is {warmer:.1f} degC warmer against the core than {than}"
        now = "" if np.isnan(temp) else f", {temp:.0f} degC"
        if not s.memory.hot[g]:
            streak = min(int(s.limits.streak[g]), len(window.buckets))
            since = window.buckets[len(window.buckets) - streak].start_ms
            text = f"its HBM has reached the driver's limit of {s.limits.known_c[g]:.0f} degC"
        yield Finding(
            NAME, IncidentKind.THERMAL, "hbm", "gpu", node, gpu, ((node, gpu),), now_ms, since, Severity.WARNING, 0.75,
            RecommendedAction.ADVISE, f"{place(node, gpu)} has hot memory: {text}{now}.",
            "Give the node no new long job. When it is free, check this GPU's heat sink, and run a memory test.",
            (Evidence(text, "memory_temp_c", None if np.isnan(temp) else temp, None, None, None, since, end_ms),),
            window.job_of(g), snapshot={"memory": s.memory.usual(g)},
        )  # fmt: skip


def _warm_rack(window: Window, model: HeatModel, rack: int, now_ms: int) -> Finding:
    """Report a rack whose GPUs say that its air is warmer, where no inlet does."""
    index, since = window.index, model.rack_since_ms(rack)
    names = [index.nodes[n].name for n in np.flatnonzero(index.rack == rack)]
    over = float(model.rise.rack_c[rack])
    text = f"the air at the GPUs of {listing(names)} is {over:.1f} degC warmer than before, beyond other racks'"
    return Finding(
        NAME, IncidentKind.THERMAL, "inlet", "rack", None, None, tuple((name, None) for name in names), now_ms, since,
        Severity.WARNING, 0.75, RecommendedAction.ADVISE,
        f"Rack {index.racks[rack]} gets hot air: its GPUs are {over:.1f} degC warmer than before at such loads.",
        "Check air handling or coolant of the room. The nodes are not at fault; give new jobs to other racks.",
        (Evidence(text, None, over, 0.0, None, len(names), since, window.newest.end_ms, key="air of the rack"),),
    )  # fmt: skip


def _note_onsets(window: Window, s: ThermalState, flagged: Bools, inlets: Floats, before: Floats) -> None:
    """Set the onset of GPUs that are flagged for the first time. `before`: their usual resistance, degC/W."""
    earlier: Floats | None = None
    for g in np.flatnonzero(flagged).tolist():
        if g in s.since_ms:
            continue
        first = len(window.buckets) - min(max(int(s.streak_bad[g]), int(s.streak_slow[g])), len(window.buckets))
        s.since_ms[g] = window.buckets[first].start_ms
        if s.model is not None and s.model.rise.hot[g]:
            s.since_ms[g] = s.model.since_ms(g)
        elif s.model is not None and s.model.rise.hot_nodes[window.index.gpu_node[g]]:
            s.since_ms[g] = s.model.node_since_ms(int(window.index.gpu_node[g]))
        elif s.streak_bad[g] >= PERSIST:  # the load may have been too unsteady to judge when it began
            earlier = resistances(window, inlets) if earlier is None else earlier
            s.since_ms[g] = onset_ms(window, first, earlier[:, g], float(before[g]))


def _is_node_fault(window: Window, s: ThermalState, n: int, gpus: list[int], rises: Floats) -> bool:
    """Return True if most of a node's GPUs are too warm, not only the flagged ones `gpus`."""
    index = window.index
    of_node = rises[int(index.first_gpu[n]) : int(index.first_gpu[n + 1])]
    known = of_node[~np.isnan(of_node)]
    alone_ms = NODE_RISE_MS if len(gpus) == 1 and gpus[0] in s.headlines else 0
    lasting = max(PERSIST, alone_ms // window.newest.length_ms)
    together = len(known) > 2 and middle(known) >= NODE_RISE and s.streak_warm[n] >= lasting
    return bool(together or len(gpus) > max(1, NODE_SHARE * index.nodes[n].gpus))


def _room(index: FleetIndex, over_past: Floats, unread: Bools) -> Floats:
    """Return the rise that a rack's air causes where no inlet is read, float64 [G], from 1: that of its coolest node.

    Args:
        over_past: each GPU's resistance over its own past, [G]. unread: nodes without an inlet, [N].
    """
    of_node, _ = group_medians(over_past, index.gpu_node.astype(np.int64), index.node_count)
    racked = np.array([bool(name) for name in index.racks], bool)[index.rack]
    least = np.full(len(index.racks), np.inf)
    np.fmin.at(least, index.rack, of_node)
    room = np.where(racked & np.isfinite(least[index.rack]), least[index.rack], of_node)
    return np.asarray(np.where(unread, np.fmax(room, 1.0), 1.0)[index.gpu_node])


def _hot_nodes(index: FleetIndex, over_peers: Floats, over_c: Floats) -> Bools:
    """Return GPUs that are warmer than their peers, on nodes where most are by NODE_RATIO and NODE_OVER_C; bool [G]."""
    known, hot = ~np.isnan(over_peers), (over_peers >= NODE_RATIO) & (over_c >= NODE_OVER_C)
    judged, many = (np.bincount(index.gpu_node[which], minlength=index.node_count) for which in (known, hot))
    return np.asarray(((judged >= NODE_GPUS) & (2 * many > judged))[index.gpu_node] & (over_peers >= NODE_RISE))


def _warm_for(index: FleetIndex, rises: Floats, before: Ints) -> Ints:
    """Return the buckets in a row in which half of a node's GPUs are warmer than their peers by NODE_RISE, int64 [N].

    Buckets with too few judged GPUs do not count.
    """
    known, warm = ~np.isnan(rises), rises >= NODE_RISE
    judged, many = (np.bincount(index.gpu_node[which], minlength=index.node_count) for which in (known, warm))
    return np.where(judged > 2, np.where(2 * many >= judged, before + 1, 0), before)


@dataclass(frozen=True, slots=True)
class _Facts:
    resistance: Floats
    expected: Floats
    count: Floats
    past: Floats
    rise: Rise
    margin: Floats
    held: Floats
    by_software: Floats
    by_hardware: Floats


def _known(value: float) -> float:
    """Return 0 for NaN; for one number a thousand times as fast as numpy's."""
    return 0.0 if value != value else float(value)


def _evidence(window: Window, g: int, since_ms: int, facts: _Facts) -> tuple[Evidence, ...]:
    fact = partial(Evidence, from_ms=since_ms, to_ms=window.newest.end_ms)
    result = []
    temp, power = column(window, "gpu_temp_c")[g], column(window, "power_w")[g]
    if facts.rise.hot[g]:
        warmer, own, slot = float(facts.rise.warmer_c[g]), float(facts.rise.own_c[g]), int(window.index.gpu_slot[g])
        than = "against its node's other GPUs" if facts.rise.by_peers[g] else "at such a load"
        text = f"core {warmer:.1f} degC warmer than this GPU was before {than}: {warmer / own:+.0%} of its heat"
        result.append(fact(text, None, float(temp), float(temp) - warmer, key=f"core of GPU {slot} at its load"))
    n = int(window.index.gpu_node[g])
    if facts.rise.hot_nodes[n]:
        text = f"the node's air is {facts.rise.node_c[n]:.1f} degC warmer at its GPUs than before, beyond other nodes'"
        result.append(fact(text, None, float(facts.rise.node_c[n]), 0.0, key="air of the node"))
    if not np.isnan(facts.resistance[g]) and not np.isnan(facts.expected[g]) and facts.expected[g] > 0:
        over = facts.resistance[g] / facts.expected[g] - 1
        result.append(
            fact(
                f"core {temp:.0f} degC at {power:.0f} W: {facts.resistance[g]:.3f} degC/W, {over:+.0%} against "
                f"{facts.expected[g]:.3f} of {facts.count[g] - 1:.0f} GPUs in the same place",
                "gpu_temp_c", float(temp), None, None, int(facts.count[g]) - 1,
            )
        )  # fmt: skip
    if not np.isnan(facts.past[g]) and not np.isnan(facts.resistance[g]):
        now, past, slot = float(facts.resistance[g]), float(facts.past[g]), int(window.index.gpu_slot[g])
        text = f"GPU {slot} had {past:.3f} degC/W in its own past and has {now:.3f} now: {now / past - 1:+.0%}"
        result.append(fact(text, None, now, past, key=f"own past of GPU {slot}"))
    if not np.isnan(facts.margin[g]):
        text = f"{facts.margin[g]:.0f} degC left to slowdown"
        result.append(fact(text, "thermal_margin_c", float(facts.margin[g]), 0.0))
    if _known(facts.held[g]) > 0:
        text = f"heat throttles its clocks for {facts.held[g]:.0%} of the time"
        sw, hw = _known(facts.by_software[g]), _known(facts.by_hardware[g])
        result.append(
            fact(text, HELD_BY_HEAT[1 if hw > sw else 0])
        )  # without the value: a share, not the counter's unit
    return tuple(result)


def _cools(s: ThermalState, g: int, poor: bool, facts: _Facts, evidence: Sequence[Evidence], end_ms: int) -> str:
    """Return how badly a GPU cools: now, else as last reported in the incident; "" if never."""
    text, _ = s.headlines.get(g, ("", 0))
    if poor and evidence and (not text or not np.isnan(facts.resistance[g])):
        text = evidence[0].text
    if text:
        s.headlines[g] = text, end_ms
    return text


def _gpu_finding(window: Window, s: ThermalState, g: int, poor: bool, facts: _Facts, now_ms: int) -> Finding:
    node, gpu = window.index.member(g)
    evidence = _evidence(window, g, s.since_ms[g], facts)
    slow = s.streak_slow[g] >= PERSIST
    critical = bool(facts.margin[g] <= MARGIN_CRITICAL_C)
    cools = _cools(s, g, poor, facts, evidence, window.newest.end_ms)
    what = f"is cooled badly: {cools}" if cools else "has reached its temperature limit"
    if poor and slow:
        what += f"; heat throttles its clocks for {_known(facts.held[g]):.0%} of the time"
    sure = poor and slow
    return Finding(
        NAME, IncidentKind.THERMAL, "cooling", "gpu", node, gpu, ((node, gpu),), now_ms, s.since_ms[g],
        Severity.CRITICAL if critical else Severity.WARNING, 0.95 if sure else 0.8,
        RecommendedAction.DRAIN if critical or sure else RecommendedAction.ADVISE, f"{place(node, gpu)} {what}.",
        "Drain the node when its work is done, then check heat sink, air baffles and coolant flow of this GPU."
        if critical or sure
        else "Give the node no new long job. Check this GPU's heat sink, air baffles and coolant flow when it is free.",
        evidence, window.job_of(g), lost_gpus=_known(facts.held[g]) if slow else None,
        snapshot=_snapshot(window, [g], facts),
    )  # fmt: skip


def _node_finding(
    window: Window, s: ThermalState, n: int, gpus: list[int], poor: list[int], facts: _Facts, now_ms: int
) -> Finding:
    node = window.index.nodes[n].name
    worst = max(gpus, key=lambda g: _known(float(facts.resistance[g])))
    slow = [g for g in gpus if s.streak_slow[g] >= PERSIST]
    verb = "is" if len(gpus) == 1 else "are"
    limit = "has reached its temperature limit" if len(gpus) == 1 else "have reached their temperature limits"
    rest = "all GPUs of the node are too warm" if len(gpus) > 1 else "the node's other GPUs are too warm too"
    what = f"{verb} cooled badly" if poor else limit
    return Finding(
        NAME, IncidentKind.THERMAL, "fan", "node", node, None, ((node, None),), now_ms,
        min(s.since_ms[g] for g in gpus), Severity.WARNING, 0.95 if poor and slow else 0.85,
        RecommendedAction.DRAIN if poor and slow else RecommendedAction.ADVISE,
        f"{_gpus_of(window, n, gpus)} of node {node} {what}, probably by fans or coolant flow: {rest}.",
        "Check fan speeds and coolant flow in the BMC now. "
        + ("Drain the node when its work is done." if poor and slow else "Give the node no new long job until then."),
        _evidence(window, worst, s.since_ms[worst], facts), window.job_of(worst),
        lost_gpus=sum(_known(facts.held[g]) for g in slow) if slow else None, snapshot=_snapshot(window, gpus, facts),
    )  # fmt: skip


def _snapshot(window: Window, gpus: list[int], facts: _Facts) -> dict[str, dict[str, float]]:
    """Return GPU slot -> its past resistance, degC/W, which a restart restores."""
    known = {str(int(window.index.gpu_slot[g])): float(facts.past[g]) for g in gpus if not np.isnan(facts.past[g])}
    return {"past": known} if known else {}


def _gpus_of(window: Window, n: int, gpus: list[int]) -> str:
    if len(gpus) == window.index.nodes[n].gpus > 1:
        return "All GPUs"
    return f"GPU {window.index.gpu_slot[gpus[0]]}" if len(gpus) == 1 else f"{len(gpus)} GPUs"


def _racks(window: Window, s: ThermalState, now_ms: int) -> Iterator[Finding]:
    """Report racks whose inlet rose above their own past and above the other racks."""
    index, inlets = window.index, window.newest.node.get("inlet_temp_c")
    if inlets is None:
        return
    racks = index.rack.astype(np.int64)
    medians, sizes = group_medians(inlets, racks, len(index.racks))
    past = np.where(np.isnan(s.racks.past), medians, s.racks.past)
    known = medians[~np.isnan(medians)]
    overall = middle(known) if len(known) >= 3 else float("nan")
    hot = (sizes >= 2) & (medians - past >= RACK_RISE_C) & ~(medians - overall < RACK_OVER_C)
    # Liquid may be as warm by design: it must have risen too.
    hot |= (sizes >= 2) & (medians >= RACK_LIMIT_C) & (medians - past >= RACK_RISE_C / 2)
    hot &= s.racks.learnt >= RACK_LEARN
    s.racks.learnt += ~np.isnan(medians)
    for rack in np.flatnonzero(hot).tolist():
        inside = racks == rack
        seen = inlets[inside & ~np.isnan(inlets)]
        rises = (seen - past[rack] >= RACK_RISE_C / 2) | (seen >= RACK_LIMIT_C)
        hot[rack] = rises.mean() >= RACK_SHARE
    s.racks.streak = np.where(hot, s.racks.streak + 1, 0)
    calm = ~hot & ~np.isnan(medians)
    rate = np.maximum(1 / np.maximum(s.racks.learnt, 1), LEARN_RATE)
    s.racks.past = np.where(calm, past + rate * (medians - past), past)
    for rack in np.flatnonzero(s.racks.streak >= PERSIST).tolist():
        since = s.racks.since_ms.setdefault(
            rack, window.buckets[-min(int(s.racks.streak[rack]), len(window.buckets))].start_ms
        )
        names = [index.nodes[n].name for n in np.flatnonzero(racks == rack)]
        over = float(medians[rack] - past[rack])
        evidence = Evidence(
            f"inlet of {listing(names)} is {medians[rack]:.1f} degC, {over:+.1f} against the rack's own past",
            "inlet_temp_c", float(medians[rack]), float(past[rack]), None, len(names), since, window.newest.end_ms,
        )  # fmt: skip
        yield Finding(
            NAME, IncidentKind.THERMAL, "inlet", "rack", None, None, tuple((name, None) for name in names), now_ms,
            since, Severity.WARNING, 0.85, RecommendedAction.ADVISE,
            f"Rack {index.racks[rack]} gets hot air: {medians[rack]:.1f} degC at its inlets, {over:+.1f} degC.",
            "Check air handling or coolant of the room. The nodes are not at fault; give new jobs to other racks.",
            (evidence,),
        )  # fmt: skip
    for rack in [rack for rack in s.racks.since_ms if s.racks.streak[rack] < PERSIST]:
        del s.racks.since_ms[rack]


def _bad_heat_sink(number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
    if number >= 3:
        gpu["gpu_temp_c"][21] = 26 + 0.09 * gpu["power_w"][21]
        gpu["thermal_margin_c"][21] = 87 - gpu["gpu_temp_c"][21]


def _hot_rack(number: int, gpu: dict[str, Floats], node: dict[str, Floats]) -> None:
    if number >= 22:
        node["inlet_temp_c"][:4] += 8
        gpu["gpu_temp_c"][:32] += 8


EXAMPLES = (
    Example("GPUs of one SKU with natural differences", lambda: play(small_fleet(), 8), frozenset()),
    Example(
        "one heat sink has lost contact",
        lambda: play(small_fleet(), 8, _bad_heat_sink),
        frozenset({("thermal", "cooling", "gpu", "warning")}),
    ),
    Example(
        "a rack gets hot air: one finding for it, none for its GPUs",
        lambda: play(small_fleet(16), 30, _hot_rack),
        frozenset({("thermal", "inlet", "rack", "warning")}),
    ),
)
