"""Clocks of nodes, and a mix of all that is not heat."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from drover_simulator.strangers.e.boards import Array, Bools, Site
from drover_simulator.strangers.e.faults_heat import Fault, Scene, Traces, loaded, rows_of
from drover_simulator.strangers.e.jobs import Label, Member
from drover_simulator.strangers.e.physics import Effects, Run

Maker = Callable[[Scene, list[int]], Fault | None]
SYNCHRONOUS = ("train", "moe", "pipeline")


def times(scene: Scene) -> tuple[float, float | None]:
    """Start and end of a sudden fault; most stay."""
    long = scene.site.seconds
    start = float(scene.rng.uniform(0.12, 0.75)) * long
    end = start + float(scene.rng.uniform(1800, 5400))
    return start, None if end > long - 300 or scene.rng.random() < 0.35 else end


def blank(site: Site) -> Array:
    """An empty trace."""
    return np.full((site.rows, site.nodes, site.slots), np.nan)


def add_counts(traces: Traces, site: Site, name: str) -> Array:
    """The increments of a counter, made when first asked for."""
    return traces.counts.setdefault(name, np.zeros((site.rows, site.nodes, site.slots)))


def hide(
    traces: Traces, site: Site, n: int, k: int | None, span: tuple[float, float | None], some: Bools | None = None
) -> None:
    """Rows that do not come; `some`: which of the case's rows, if not all."""
    if traces.gone is None or traces.node_gone is None:
        traces.gone, traces.node_gone = blank(site), np.zeros((site.rows, site.nodes))
    when = slice(site.row(span[0]), site.row(site.seconds if span[1] is None else span[1]) + (span[1] is None))
    if some is not None and k is not None:
        traces.gone[when, n, k] = np.where(some[when], 1, traces.gone[when, n, k])
        return
    if k is None:
        traces.gone[when, n] = 1
        traces.node_gone[when, n] = 1
    else:
        traces.gone[when, n, k] = 1


def job_dies(scene: Scene, nodes: list[int], start: float) -> Callable[[Effects | None, Traces | None], None]:
    """Synchronous jobs with GPUs on `nodes` die with them, and start again on what is left after 5 to 25 minutes."""
    site, load = scene.site, scene.load
    now = load.job[min(site.step(start), site.steps - 1)].astype(int)
    jobs = {int(j) for j in now[nodes].ravel() if j < len(load.jobs) and load.jobs[int(j)].kind in SYNCHRONOUS}
    back = start + 10 + float(scene.rng.uniform(300, 1500))
    mates = np.isin(now, sorted(jobs))

    def apply(eff: Effects | None, traces: Traces | None) -> None:
        if eff is not None:
            eff.dead[site.step(start + 5) : site.step(back)][:, mates] = 1
        if traces is not None:
            no_process(traces, site, mates, (start + 15, back))

    return apply


def no_process(traces: Traces, site: Site, which: Bools, span: tuple[float, float]) -> None:
    """Show that processes of some boards are gone for a while."""
    when = slice(site.row(span[0]), site.row(span[1]))
    traces.states.setdefault("compute_processes", blank(site))[when][:, which] = 0
    traces.states.setdefault("framebuffer", blank(site))[when][:, which] = 0.005


def clock_wrong(scene: Scene, nodes: list[int]) -> Fault | None:
    """A node's clock off by more than 5 s: a step, a slow drift (a dead chrony, 400 to 4000 ppm), back again."""
    rng, site = scene.rng, scene.site
    if not site.has_node or "clock" not in site.columns or not nodes:
        return None
    n, (start, end) = int(rng.choice(nodes)), times(scene)
    sign, t = float(rng.choice([-1, 1])), (np.arange(site.rows) + 1) * site.interval
    way = str(rng.choice(["step", "drift", "step and slew back"]))
    size = float(np.exp(rng.uniform(np.log(7), np.log(4000))))
    begun = start
    if way == "drift":
        begun = float(rng.uniform(0.05, 0.3)) * site.seconds
        rate = max(float(np.exp(rng.uniform(np.log(4e-4), np.log(4e-3)))), 9 / (site.seconds - begun))
        off, start = np.maximum(t - begun, 0) * rate, begun + 5 / rate
        end = None if end is None or end < start + 1800 else end
        note = f"drift of {rate * 1e6:.0f} ppm"
    elif way == "step":
        off, note = np.where(t >= start, size, 0.0), f"step of {size:.0f} s"
    else:
        size, back = float(rng.uniform(8, 60)), float(rng.uniform(3000, 9000))
        off = np.where(t >= start, np.clip(size * (1 - (t - start) / back), 0, None), 0.0)
        end, note = min(start + back * (1 - 5 / size), site.seconds), f"step of {size:.0f} s, slewed back"
    off = np.where(t > (end or 9e9), np.where(way == "step and slew back", off, 0.0), off) * sign
    label = Label("liveness", "clock_wrong", [(n, None)], start, end, note, hardware=True)

    def visible(traces: Traces) -> None:
        if traces.clock is None:
            traces.clock = np.zeros((site.rows, site.nodes))
        traces.clock[:, n] += off
        seen = np.flatnonzero(np.abs(off) > 5)
        if len(seen):
            text = f"clock differs from the collector's by {off[seen[0]]:+.1f} s"
            traces.lines.append((float(t[seen[0]]) + 8, n, None, "lifecycle", "clock_wrong", text))

    return Fault(label, (begun, end or 9e9), visible=visible)


def _straggler(cause: str) -> Maker:
    def make(scene: Scene, nodes: list[int]) -> Fault | None:
        rng, site, (start, end) = scene.rng, scene.site, times(scene)
        choice = [c for c in loaded(scene, (start, end), nodes) if c[2] in SYNCHRONOUS]
        if not choice:
            return None
        n, k, kind = choice[int(rng.integers(len(choice)))]
        size = float(rng.uniform(0.05, 0.35))
        label = Label("straggler", cause, [(n, k)], start, end, f"{size:.0%}, load {kind}", hardware=True)
        when = slice(site.step(start), site.step(end or site.seconds))

        def physical(eff: Effects) -> None:
            if cause == "clock":
                eff.clock[when, n, k] = 1 - size
            elif cause == "power_cap":
                eff.limit[when, n, k] *= 1 - min(0.6, 1.6 * size + 0.1)
            else:
                eff.speed[when, n, k] *= 1 - size

        def loss(without: Run, run: Run) -> float:
            rows = rows_of(site, label)
            return 1 - _pace(scene, (n, k), rows, (without, run))

        def check(without: Run, run: Run) -> float:
            return loss(without, run) / 0.03

        return Fault(label, (start, end or 9e9), physical, check=check, weigh=loss)

    return make


def _pace(scene: Scene, who: tuple[int, int], rows: slice, runs: tuple[Run, Run]) -> float:
    """Speed of a job with the fault over that without, by the duty of its other ranks (corrected for their clock)."""
    site, (n, k) = scene.site, who
    step = rows.start * site.sub
    job = scene.load.job[step]
    mates = job == job[n, k]
    mates[n, k] = False
    without, run = runs[0].duty[rows][:, mates], runs[1].duty[rows][:, mates]
    return float(np.median(run.mean(axis=1) / np.maximum(without.mean(axis=1), 0.05)))


def rank_stopped(scene: Scene, nodes: list[int]) -> Fault | None:
    """One rank of a job stops; the others spin in a collective."""
    rng, site, (start, _) = scene.rng, scene.site, times(scene)
    choice = [c for c in loaded(scene, (start, None), nodes) if c[2] in SYNCHRONOUS]
    if not choice:
        return None
    n, k, kind = choice[int(rng.integers(len(choice)))]
    index = int(scene.load.job[site.step(start), n, k])
    if index >= len(scene.load.jobs) or scene.load.jobs[index].kind not in SYNCHRONOUS:
        return None
    job = scene.load.jobs[index]
    if (job.end or site.seconds) - start < 1200:
        return None
    label = Label("hang", "rank_stopped", [(n, k)], start, job.end, f"load {kind}", hardware=True)
    when = slice(site.step(start), site.step(job.end or site.seconds))

    def physical(eff: Effects) -> None:
        eff.dead[when, n, k] = 1
        eff.speed[when, n, k] = 1e-6

    return Fault(label, (start, job.end or 9e9), physical)


def _memory(cause: str) -> Maker:
    def make(scene: Scene, nodes: list[int]) -> Fault | None:
        rng, site, (start, _) = scene.rng, scene.site, times(scene)
        choice = [c for c in loaded(scene, (start, None), nodes) if site.boards[c[0]].hbm]
        if "ecc" not in site.columns or not choice:
            return None
        n, k, _ = choice[int(rng.integers(len(choice)))]
        label = Label("memory", cause, [(n, k)], start, None, cause.replace("_", " "), hardware=True)
        early = start - float(rng.uniform(900, 2400))
        if cause != "ecc_storm" and rng.random() < 0.4:
            label.precursor, label.precursor_start = "ecc", early
        at, pre, rate = site.row(start), site.row(max(early, 0)), float(np.exp(rng.uniform(0, 4)))
        draws = rng.poisson(rate * site.interval * rng.gamma(0.5, 2, site.rows))
        piles = np.flatnonzero(rng.random(site.rows) < site.interval / 700)

        def visible(traces: Traces) -> None:
            if label.precursor or cause == "ecc_storm":
                add_counts(traces, site, "ecc_dram_corrected")[pre if label.precursor else at :, n, k] += draws[
                    pre if label.precursor else at :
                ]
            if cause == "uncorrectable":
                add_counts(traces, site, "ecc_dram_uncorrected")[at, n, k] += 1
                add_counts(traces, site, "remapped_rows_uncorrected")[at + 1 :, n, k][:1] += 1
                traces.states.setdefault("row_remap_pending", blank(site))[at + 1 :, n, k] = 1
                text = f"NVRM: Xid (PCI:0000:{0x19 + 17 * k:02x}:00): 94, pid=71234, name=python3, Contained: SM (0x1)."
                traces.lines.append((start + 1, n, k, "xid", "94", text))
            elif cause == "remaps_pile_up":
                for row in [at, *piles[piles > at]]:
                    add_counts(traces, site, "remapped_rows_corrected")[row, n, k] += 1
            elif cause == "sram_threshold":
                add_counts(traces, site, "ecc_sram_uncorrected")[at, n, k] += 4
                traces.states.setdefault("sram_threshold_exceeded", blank(site))[at:, n, k] = 1
            elif cause == "remap_failed":
                traces.states.setdefault("row_remap_failed", blank(site))[at:, n, k] = 1
                text = f"NVRM: Xid (PCI:0000:{0x19 + 17 * k:02x}:00): 64, pid='<unknown>', Row Remapper: failed"
                traces.lines.append((start + 1, n, k, "xid", "64", text))

        return Fault(label, (early if label.precursor else start, 9e9), visible=visible)

    return make


def _link(cause: str) -> Maker:
    def make(scene: Scene, nodes: list[int]) -> Fault | None:
        rng, site, (start, end) = scene.rng, scene.site, times(scene)
        pcie = cause in ("pcie_downgrade", "pcie_replays")
        if not nodes or (not site.has_link if not pcie else "pcie" not in site.columns):
            return None
        choice = loaded(scene, (start, end), nodes)
        if not choice:
            return None
        n, k, _ = choice[int(rng.integers(len(choice)))]
        early = start - float(rng.uniform(900, 2400))
        label = Label("link", cause, [(n, k)], start, end, cause.replace("_", " "), hardware=True)
        ramped = cause in ("ib_errors", "port_down") and rng.random() < 0.4
        if ramped:
            label.precursor, label.precursor_start = "link_errors", early
        when, pre = rows_of(site, label), slice(site.row(max(early, 0)), site.row(start))
        rate = float(np.exp(rng.uniform(1, 5)))
        draws = rng.poisson(rate * site.interval * rng.gamma(1, 1, site.rows)).astype(np.float64)

        def visible(traces: Traces) -> None:
            if cause == "pcie_downgrade":
                traces.states.setdefault("pcie_width", blank(site))[when, n, k] = 8 if rate > 12 else 4
            elif cause == "pcie_replays":
                add_counts(traces, site, "pcie_replays")[when, n, k] += draws[when]
            else:
                errors = traces.ports.setdefault("symbol_errors", np.zeros((site.rows, site.nodes, site.slots)))
                errors[pre, n, k] += draws[pre] * (0.1 if ramped else 0)
                errors[when, n, k] += draws[when] * (cause == "ib_errors")
                if cause == "port_down":
                    traces.ports.setdefault("link_up", blank(site))[when, n, k] = 0
                    text = f"mlx5_core 0000:{0x18 + 17 * k:02x}:00.0: Port: 1 Link DOWN"
                    traces.lines.append((start, n, None, "kernel", "nic_link", text))

        return Fault(label, (early if ramped else start, end or 9e9), visible=visible)

    return make


def _dies(cause: str) -> Maker:
    """A GPU falls off the bus, a GPU's rows end, a node's rows end, a driver hangs."""

    def make(scene: Scene, nodes: list[int]) -> Fault | None:
        rng, site, (start, end) = scene.rng, scene.site, times(scene)
        if not nodes:
            return None
        n, k = int(rng.choice(nodes)), int(rng.integers(site.slots))
        if cause in ("silent", "driver_hung"):
            end = end if cause == "silent" else None
            label = Label("liveness", cause, [(n, None)], start, end, cause.replace("_", " "), hardware=True)
            return Fault(label, (start, end or 9e9), visible=_node_quiet(site, label))
        code = str(rng.choice(["79", "119"])) if cause == "xid" else ""
        label = Label("xid" if code else "liveness", code or cause, [(n, k)], start, None, "GPU lost", hardware=True)
        early, patchy = max(0.0, start - float(rng.uniform(900, 2400))), rng.random(site.rows) < 0.45
        if rng.random() < 0.4:
            label.precursor, label.precursor_start = "telemetry", early
        dies = job_dies(scene, [n], start)

        def visible(traces: Traces) -> None:
            dies(None, traces)
            _gpu_quiet(traces, site, label, patchy)

        def physical(eff: Effects) -> None:
            dies(eff, None)
            eff.dead[site.step(start) :, n, k] = 1

        return Fault(label, (label.precursor_start or start, 9e9), physical, visible)

    return make


def _node_quiet(site: Site, label: Label) -> Callable[[Traces], None]:
    """Rows of a node end; of a hung driver those of its GPUs, and the agent says so."""
    n = label.members[0][0]

    def visible(traces: Traces) -> None:
        if label.cause == "silent":
            hide(traces, site, n, None, (label.start, label.end))
            if label.end is not None:
                traces.lines.append((label.end, n, None, "lifecycle", "agent_started", "started"))
            return
        text = "calls into NVML do not return"
        traces.lines.append((label.start + 30, n, None, "lifecycle", "driver_hung", text))
        for slot in range(site.slots):
            hide(traces, site, n, slot, (label.start, None))

    return visible


def _gpu_quiet(traces: Traces, site: Site, label: Label, patchy: Bools) -> None:
    """Rows of a GPU end, after its XID if it had one; before that they may come partly."""
    (n, k), start = label.members[0], label.start
    slot = int(k or 0)
    if label.precursor:
        hide(traces, site, n, slot, (label.precursor_start or 0.0, start), patchy)
    texts = {
        "79": "79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "119": "119, pid=81123, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU!",
    }
    if label.kind == "xid":
        bus = f"NVRM: Xid (PCI:0000:{0x19 + 17 * slot:02x}:00): "
        traces.lines.append((start, n, slot, "xid", label.cause, bus + texts[label.cause]))
    traces.lines.append((start + 25, n, slot, "lifecycle", "gpu_lost", "GPU is lost"))
    hide(traces, site, n, slot, (start + (20 if label.kind == "xid" else 0), None))


def rack_power(scene: Scene, nodes: list[int]) -> Fault | None:
    """All nodes of a rack go silent at once."""
    site, (start, end) = scene.site, times(scene)
    racks = [r for r in set(site.rack_of.tolist()) if set(np.flatnonzero(site.rack_of == r).tolist()) <= set(nodes)]
    racks = [r for r in sorted(racks) if np.sum(site.rack_of == r) > 1]
    if not racks:
        return None
    mine = np.flatnonzero(site.rack_of == racks[int(scene.rng.integers(len(racks)))]).tolist()
    members: list[Member] = [(n, None) for n in mine]
    label = Label("liveness", "rack_power", members, start, end, "rack without power", hardware=True)

    dies = job_dies(scene, mine, start)

    def physical(eff: Effects) -> None:
        dies(eff, None)
        eff.dead[site.step(start) : site.step(end or site.seconds), mine] = 1

    def visible(traces: Traces) -> None:
        dies(None, traces)
        for n in mine:
            hide(traces, site, n, None, (start, end))
            if end is not None:
                traces.lines.append((end + 200, n, None, "lifecycle", "agent_started", "started"))

    return Fault(label, (start, end or 9e9), physical, visible)


def _drift(cause: str) -> Maker:
    def make(scene: Scene, nodes: list[int]) -> Fault | None:
        rng, site, units = scene.rng, scene.site, scene.units
        span = (0.0, None)
        pools = [n for n in nodes if site.pools.count(site.pools[n]) >= 4]
        busy = sorted({n for n, _, _ in loaded(scene, span, pools)})
        if not busy:
            return None
        n = busy[int(rng.integers(len(busy)))]
        k = int(rng.integers(site.slots))
        whole = cause == "driver"
        label = Label("drift", cause, [(n, None if whole else k)], 0.0, None, "from the start", hardware=True)
        share = float(rng.choice([0.7, 0.8, 0.86]))
        watts, mhz = units.limit[n, k] * share, np.floor(units.clock[n, k] * share / 15) * 15
        fact = {
            "driver": ("driver_version", "550.54.15"), "power_limit": (f"gpu{k}.power_limit_set_w", f"{watts:.0f}"),
            "clock_limit": (f"gpu{k}.sm_clock_max_mhz", f"{mhz:.0f}"), "vbios": (f"gpu{k}.vbios", "96.00.61.00.01"),
            "ecc_mode": (f"gpu{k}.ecc_mode", "disabled"),
        }[cause]  # fmt: skip

        def physical(eff: Effects) -> None:
            if cause == "power_limit":
                eff.limit[:, n, k] *= share
            elif cause == "clock_limit":
                eff.clock[:, n, k] = share

        def visible(traces: Traces) -> None:
            traces.facts.append((-1.0, n, dict([fact])))

        return Fault(label, (-9e9, 9e9), physical, visible)

    return make


OTHERS: dict[str, Maker] = {
    **{f"straggler {c}": _straggler(c) for c in ("power_cap", "clock", "unexplained", "host")},
    "hang": rank_stopped,
    **{
        f"memory {c}": _memory(c)
        for c in ("ecc_storm", "uncorrectable", "remaps_pile_up", "remap_failed", "sram_threshold")
    },
    **{f"link {c}": _link(c) for c in ("port_down", "ib_errors", "pcie_downgrade", "pcie_replays")},
    **{c: _dies(c) for c in ("silent", "gpu_lost", "driver_hung", "xid")},
    "rack_power": rack_power,
    **{f"drift {c}": _drift(c) for c in ("driver", "power_limit", "clock_limit", "vbios", "ecc_mode")},
}
