"""The differential equations: power and leakage, clocks, die, sink, HBM, fans, air and loop, job pace.

One step at a time for all boards at once, each lag by its exact exponential, so that any step is stable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drover_simulator.strangers.e.boards import Array, Ints, Rng, Site, Small, Units
from drover_simulator.strangers.e.jobs import Load

GRID = np.linspace(0.1, 1.0, 181)
CUBE = GRID * (0.55 + 0.45 * GRID) ** 2  # f V^2 over its maximum, V linear in f (textbook)
SPIN = 0.3  # power of a rank that waits in a collective over that of one that computes (memory)


@dataclass
class Room:
    """The air or water that racks are given. `supply`: (steps, nodes) in C."""

    supply: Array
    recirculation: Array  # (nodes,): K at full rack load
    neighbour: float
    lag_s: float


@dataclass
class Effects:
    """What faults and planned changes do to the machines: arrays over steps."""

    r_die: Small  # K/W more
    r_sink: Small
    r_hbm: Small  # factor
    clock: Small  # highest clock over the maximum
    limit: Small  # W
    speed: Small  # factor of work done, clocks apart
    dead: Small  # 1: this rank does nothing
    inlet: Small  # (steps, nodes) K more
    flow: Small  # (steps, nodes) factor
    fan: Small  # (steps, nodes, fans) factor of speed
    fan_floor: Small  # (steps, nodes) lowest command


@dataclass
class Run:
    """What happened, at the ticks of rows; (rows, nodes, slots), the last three (rows, nodes)."""

    die: Small
    hbm: Small
    power: Small
    clock: Small  # over the maximum
    duty: Small
    energy: Array
    held_power: Array  # seconds held down
    held_soft: Array
    held_hard: Array
    inlet: Small
    fan_min: Small
    fan_mean: Small


def no_effects(site: Site, units: Units) -> Effects:
    """Return effects of nothing."""
    cube = (site.steps, site.nodes, site.slots)
    flat = cube[:2]

    def zero() -> Small:
        return np.zeros(cube, np.float32)

    def one() -> Small:
        return np.ones(cube, np.float32)

    limit = np.broadcast_to(units.limit.astype(np.float32), cube).copy()
    return Effects(
        zero(), zero(), one(), one(), limit, one(), zero(),
        np.zeros(flat, np.float32), np.ones(flat, np.float32),
        np.ones((*flat, site.fans), np.float32), np.zeros(flat, np.float32),
    )  # fmt: skip


def build_room(rng: Rng, site: Site) -> Room:
    """Day curve, CRAC saw-tooth and a slow wander for each room (or loop)."""
    t = np.arange(site.steps) * site.dt
    hour = (site.t0_ms / 3.6e6 + t / 3600) % 24
    rooms = max(1, int(site.rack_of.max() + 1) // 6)
    supply = np.zeros((site.steps, site.nodes))
    for room in range(rooms):
        mine = (site.rack_of * rooms // (site.rack_of.max() + 1)) == room
        period, swing = rng.uniform(600, 1200), rng.choice([0.0, 1.0, 1.0]) * rng.uniform(1, 3)
        rise = rng.uniform(0.3, 0.8)  # share of the cycle in which it warms
        phase = (t / period * (1 + 0.05 * np.sin(t / 2900)) + rng.random()) % 1
        saw = np.where(phase < rise, phase / rise, (1 - phase) / (1 - rise)) - 0.5
        day = rng.uniform(0, 2.5) * np.sin((hour - 9) / 24 * 2 * np.pi)
        wander = np.convolve(rng.normal(0, 1, site.steps + 400), np.hanning(400), "valid")[: site.steps]
        wander *= 0.4 / max(0.1, float(wander.std()))
        air = rng.uniform(18, 27) + day + swing * saw + wander
        water = rng.uniform(24, 38) + 0.3 * day + 0.15 * swing * saw + 0.4 * wander  # a CDU holds its set point
        supply[:, mine] = np.where(site.liquid[mine][None, :], water[:, None], air[:, None])
    height = rng.uniform(-0.3, 1.2, site.nodes)  # top of a rack gets warmer air
    supply += np.where(site.liquid, 0.2 * height, height)[None, :]
    back = np.where(site.liquid, rng.uniform(0.5, 1.5), rng.uniform(1, 6)) * rng.uniform(0.7, 1.3, site.nodes)
    return Room(supply, back, float(rng.uniform(0.1, 0.5)), float(rng.uniform(90, 420)))


class Plant:
    """State of all boards, fans and air; `step` moves it on."""

    def __init__(self, site: Site, units: Units, room: Room, load: Load) -> None:
        """Start cold; `simulate` lets it settle before the case begins."""
        self.site, self.units, self.room, self.load = site, units, room, load
        self.die = np.full(units.tdp.shape, 40.0)
        self.sink = self.die.copy()
        self.hbm = self.die.copy()
        self.ceiling = np.ones_like(self.die)
        self.power = units.tdp * 0.3
        self.warm = np.zeros(site.nodes)
        self.command = np.full(site.nodes, 0.5)
        self.integral = np.full(site.nodes, 0.4)
        self.fan = np.full((site.nodes, site.fans), 0.5)
        racks = int(site.rack_of.max()) + 1
        self.rack_power = np.bincount(site.rack_of, units.tdp.sum(axis=1), racks)
        self.sync = np.append(load.sync, False)

    def step(self, t: int, dt: float, noise: Array, eff: Effects) -> None:
        """Advance by `dt` with the load and the effects of step `t`."""
        inlet = self._air(t, dt, eff)
        self._fans(t, dt, eff)
        flow = (self.fan @ self.units.fan_share.T) * eff.flow[t][:, None]
        flow = np.where(self.site.liquid[:, None], 0.65 * eff.flow[t][:, None], flow)
        flow = np.maximum(flow, 0.08) / 0.65
        self._work(t, noise, eff)
        self._heat(t, dt, (inlet, flow), eff)
        self._throttle(dt)

    def _air(self, t: int, dt: float, eff: Effects) -> Array:
        site, room = self.site, self.room
        heat = np.bincount(site.rack_of, self.power.sum(axis=1), len(self.rack_power)) / self.rack_power
        nearby = (np.roll(heat, 1) + np.roll(heat, -1)) / 2
        goal = room.recirculation * ((1 - room.neighbour) * heat + room.neighbour * nearby)[site.rack_of]
        self.warm += (goal - self.warm) * (1 - np.exp(-dt / room.lag_s))
        self.inlet = room.supply[t] + self.warm + eff.inlet[t]
        return np.asarray(self.inlet + self.units.preheat)

    def _fans(self, t: int, dt: float, eff: Effects) -> None:
        site = self.site
        hottest = (self.die - self.units.slow).max(axis=1) + 87  # laws are set by distance to the limit
        if site.fan_law == "pi":
            error = hottest - site.fan_target_c
            self.integral = np.clip(self.integral + error * 0.00025 * dt, 0.15, 1)
            goal = self.integral + 0.012 * error
        elif site.fan_law == "steps":
            goal = np.interp(np.round(hottest / 4) * 4, [45, 60, 70, 80], [0.35, 0.5, 0.75, 1.0])
        else:
            goal = np.full(site.nodes, site.fan_fixed)
        goal = np.clip(np.maximum(goal, eff.fan_floor[t]), 0.28, 1.0)
        self.command += (goal - self.command) * (1 - np.exp(-dt / 12))
        self.fan = self.command[:, None] * self.units.fan_unit * eff.fan[t]

    def _work(self, t: int, noise: Array, eff: Effects) -> None:
        units, load = self.units, self.load
        demand = load.demand[t] * (1 - eff.dead[t])
        leak = units.leak * np.exp((self.die - 60) / units.leak_c)
        memory = units.p_memory * load.dram[t] * demand
        idle = units.p_idle * np.where(load.processes[t] > 0, self.site.idle_context, 1.0)
        last = getattr(self, "duty", np.ones_like(self.die))
        act = np.maximum(load.kernel[t] * demand * (last + (1 - last) * SPIN) * noise, 1e-3)
        left = np.maximum(eff.limit[t] - leak - memory - idle, 1.0) / (act * units.c_dyn)
        by_power = np.interp(left, CUBE, GRID)
        top = np.minimum(eff.clock[t], self.ceiling)
        clock = np.minimum(top, by_power)
        clock = np.where(self.die > units.hard, np.minimum(clock, 0.5), clock)
        clock = np.maximum(np.floor(clock * units.clock / 15 + 0.5) * 15 / units.clock, 0.12)
        self.capped = (by_power < top - 0.005) & (demand > 0.02)
        speed = np.maximum(eff.speed[t] * units.speed / (load.bound[t] / clock + 1 - load.bound[t]), 1e-6)
        self.duty = self._pace(t, speed)
        act = load.kernel[t] * demand * (self.duty + (1 - self.duty) * SPIN) * noise
        self.power = idle + leak + memory + units.c_dyn * act * np.interp(clock, GRID, CUBE)
        still = np.where(load.processes[t] > 0, self.site.context_clock, 0.15)
        self.clock = np.where(demand > 0.02, clock, np.minimum(still, clock))
        self.demand = demand

    def _pace(self, t: int, speed: Array) -> Array:
        """Share of time in which each rank works; the slowest of a synchronous job makes the others wait."""
        load = self.load
        job: Ints = load.job[t].astype(np.int64)
        mine = speed / load.share[t]
        pace = np.full(len(self.sync), np.inf)
        np.minimum.at(pace, job.ravel(), mine.ravel())
        return np.where(self.sync[job], pace[job] / mine, 1.0)

    def _heat(self, t: int, dt: float, air: tuple[Array, Array], eff: Effects) -> None:
        units = self.units
        inlet, flow = air
        carried = (self.power @ units.upstream) / np.maximum(flow * 0.65, 0.1)
        local = inlet[:, None] + carried
        r_sink = (units.r_sink + eff.r_sink[t]) * flow**-units.flow_power
        tau = units.tau_sink * r_sink / units.r_sink
        self.sink += (local + self.power * r_sink - self.sink) * (1 - np.exp(-dt / tau))
        goal = self.sink + self.power * (units.r_die + eff.r_die[t])
        self.die += (goal - self.die) * (1 - np.exp(-dt / units.tau_die))
        memory = units.p_memory * (0.15 + self.load.dram[t] * self.demand)
        goal = 0.75 * self.die + 0.25 * self.sink + memory * units.r_hbm * eff.r_hbm[t] + 2
        self.hbm += (goal - self.hbm) * (1 - np.exp(-dt / 14))

    def _throttle(self, dt: float) -> None:
        over = np.maximum(self.die - self.units.slow, self.hbm - self.units.memory_max)
        down = np.clip(over * 0.004 * dt, -0.02, 0.05)
        self.ceiling = np.clip(self.ceiling - down, 0.3, 1.0)


def simulate(plant: Plant, eff: Effects, seed: int) -> Run:
    """Run the case; the same `seed` gives the same noise whatever the effects are."""
    site = plant.site
    rng = np.random.default_rng([seed, 77])
    shape = (site.rows, site.nodes, site.slots)
    kept = {name: np.zeros(shape, np.float32) for name in ("die", "hbm", "power", "clock", "duty")}
    sums = {name: np.zeros(shape) for name in ("energy", "held_power", "held_soft", "held_hard")}
    flat = {name: np.zeros(shape[:2], np.float32) for name in ("inlet", "fan_min", "fan_mean")}
    for _ in range(150):
        plant.step(0, 20.0, np.ones(shape[1:]), eff)
    noise, total = np.ones(shape[1:]), {name: np.zeros(shape[1:]) for name in sums}
    keep = np.exp(-site.dt / 20)
    for t in range(site.steps):
        noise = 1 + (noise - 1) * keep + rng.normal(0, 0.02 * np.sqrt(1 - keep**2), shape[1:])
        plant.step(t, site.dt, noise, eff)
        total["energy"] += plant.power * site.dt
        total["held_power"] += plant.capped * site.dt
        total["held_soft"] += (plant.ceiling < 0.995) * (plant.demand > 0.02) * site.dt
        total["held_hard"] += (plant.die > plant.units.hard) * site.dt
        if t % site.sub == site.sub - 1:
            r = t // site.sub
            for name, array in kept.items():
                array[r] = getattr(plant, name)
            for name, sum_ in sums.items():
                sum_[r] = total[name]
            flat["inlet"][r] = plant.inlet
            flat["fan_min"][r], flat["fan_mean"][r] = plant.fan.min(axis=1), plant.fan.mean(axis=1)
    return Run(
        kept["die"], kept["hbm"], kept["power"], kept["clock"], kept["duty"],
        sums["energy"], sums["held_power"], sums["held_soft"], sums["held_hard"],
        flat["inlet"], flat["fan_min"], flat["fan_mean"],
    )  # fmt: skip
