"""Faults of hardware, one function a cause. Each gives True where it found a place, and writes its label."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from drover_simulator.strangers.d import engine
from drover_simulator.strangers.d.jobs import Job
from drover_simulator.strangers.d.plan import Plan

Made = Callable[[Plan], bool]
NOBODY = "pid='<unknown>', name=<unknown>, "


def window(plan: Plan, low: float = 600, high: float = 5400, late: bool = False) -> tuple[float, float]:
    """When a fault begins and ends; faults that end jobs come late."""
    rng, span = plan.site.rng, plan.site.span
    a = float(rng.uniform(0.45 if late else 0.1, 0.92 if late else 0.85)) * span
    return a, min(a + float(rng.uniform(low, high)), span)


def pick(
    plan: Plan, a: float, b: float, *, sync: bool = False, least: int = 1, need: Callable[[int], bool] | None = None
) -> tuple[int, Job] | None:
    """A GPU in use with nothing else wrong from a to b, and its job."""
    rng = plan.site.rng
    jobs = [j for j in plan.running(a, b, sync, least) if plan.job_free(j, a, b) and j.kind != "notebook"]
    for _ in range(12):
        if not jobs:
            return None
        job = jobs[int(rng.integers(len(jobs)))]
        gpu = int(rng.choice(job.members))
        if plan.free(gpu, a, b) and (need is None or need(gpu)):
            return gpu, job
    return None


def killable(plan: Plan, gpus: object, a: float) -> bool:
    """Whether the jobs there may end at `a`: nothing that was placed already needs them later."""
    for job in plan.jobs:
        if job.start < a < job.end and np.isin(job.members, np.atleast_1d(gpus)).any():
            if not plan.job_free(job, a - 300, plan.site.span) or any(
                y > a for g in job.members for _, y in plan.taken.get(int(g), ())
            ):
                return False
    return True


def _slow(
    plan: Plan, least: int = 4, need: Callable[[int], bool] | None = None
) -> tuple[float, float, int, Job] | None:
    for _ in range(3):
        a, b = window(plan)
        found = pick(plan, a, min(b, a + 900), sync=True, least=least, need=need)
        if found is not None:
            gpu, job = found
            b = min(b, job.end)
            plan.take(gpu, a, b)
            plan.take_job(job, a, b)
            return a, b, gpu, job
    return None


# ---- stragglers ----
def slow_clock(plan: Plan) -> bool:
    found = _slow(plan)
    if not found:
        return False
    a, b, gpu, _ = found
    x = float(plan.site.rng.uniform(0.5, 0.88))
    plan.edits.during(a, b, "fcap", gpu, x)
    if plan.site.rng.random() < 0.6:
        plan.edits.during(a, b, "mute", gpu, 1)
    plan.label("straggler", "clock", a, b, gpu=gpu, severity=round(1 - x, 3))
    return True


def slow_power(plan: Plan) -> bool:
    found = _slow(plan)
    if not found:
        return False
    a, b, gpu, _ = found
    rng = plan.site.rng
    x = float(rng.uniform(0.45, 0.75))
    if rng.random() < 0.6:
        plan.edits.during(a, b, "plim", gpu, x)
    else:  # the board's supply asks for it: HW power brake
        plan.edits.during(a, b, "brake", gpu, x)
    plan.label("straggler", "power_cap", a, b, gpu=gpu, severity=round(1 - x, 3))
    return True


def _too_hot(plan: Plan, gpu: int, over: float) -> float:
    """By how much resistance must grow for a busy GPU to stand `over` degrees past its slowdown, did it not slow down."""
    site, board = plan.site, plan.site.board(gpu)
    rise = engine.resistance(site)[gpu] * 0.75 * board.tdp_w
    sink = 0.55 * (1.0 if site.liquid else 0.76)
    return (board.t_slow + over - site.room_c - 3 - 0.225 * rise) / rise / (0.225 + sink)


def slow_heat(plan: Plan) -> bool:
    found = _slow(plan)
    if not found:
        return False
    a, b, gpu, _ = found
    x = _too_hot(plan, gpu, float(plan.site.rng.uniform(5, 22)))
    plan.edits.during(a, b, "rth", gpu, x)
    plan.label("straggler", "thermal", a, b, gpu=gpu, severity=round(x - 1, 3))
    return True


def slow_hbm(plan: Plan) -> bool:
    found = _slow(plan)
    if not found:
        return False
    a, b, gpu, _ = found
    x = float(plan.site.rng.uniform(0.4, 0.75))
    plan.edits.during(a, b, "memclk" if plan.site.rng.random() < 0.5 else "hbm", gpu, x)
    plan.label("straggler", "hbm", a, b, gpu=gpu, severity=round(1 - x, 3))
    return True


def slow_nvlink(plan: Plan) -> bool:
    found = _slow(plan, need=lambda g: plan.site.board(g).links > 0)
    if not found:
        return False
    a, b, gpu, _ = found
    rng, links = plan.site.rng, plan.site.board(gpu).links
    gone = int(rng.integers(max(1, links // 6), links * 2 // 3 + 1))
    if rng.random() < 0.5:
        plan.edits.during(a, b, "nvl", gpu, 1 - gone / links)
        plan.state("gpu", "nvlink_active_links", gpu, a, b, links - gone)
    else:
        plan.edits.during(a, b, "nvl", gpu, float(rng.uniform(0.25, 0.6)))
        plan.rate("gpu", "nvlink_replays", gpu, a, b, float(rng.uniform(0.5, 40)))
        plan.rate("gpu", "nvlink_crc_errors", gpu, a, b, float(rng.uniform(2, 150)))
        plan.rate("gpu", "nvlink_recoveries", gpu, a, b, float(rng.uniform(0.002, 0.05)))
    plan.label("straggler", "nvlink", a, b, gpu=gpu, severity=round(gone / links, 3))
    return True


def slow_pcie(plan: Plan) -> bool:
    found = _slow(plan)
    if not found:
        return False
    a, b, gpu, _ = found
    rng, board = plan.site.rng, plan.site.board(gpu)
    x = float(rng.choice([0.5, 0.25, 0.125, 0.0625]))
    plan.edits.during(a, b, "pcie", gpu, x * (0.25 if board.links else 1.0))
    if x >= 0.25 and rng.random() < 0.5:
        plan.state("gpu", "pcie_generation", gpu, a, b, max(1, board.pcie + int(np.log2(x))))
    else:
        plan.state("gpu", "pcie_width", gpu, a, b, board.lanes * x)
    if rng.random() < 0.4:
        plan.rate("gpu", "pcie_replays", gpu, a, b, float(rng.uniform(0.2, 10)))
    plan.label("straggler", "pcie", a, b, gpu=gpu, severity=round(1 - x, 3))
    return True


def slow_nic(plan: Plan) -> bool:
    site = plan.site
    if not site.ports:
        return False
    for _ in range(3):
        a, b = window(plan)
        found = pick(plan, a, min(b, a + 900), sync=True, least=9)
        if found and site.port_of(found[0]) is not None:
            break
    else:
        return False
    gpu, job = found
    b, port, rng = min(b, job.end), site.port_of(gpu), site.rng
    assert port is not None
    served = [g for g in site.gpus_of(int(site.node_of[gpu])) if site.port_of(g) == port]
    plan.take(served, a, b)
    plan.take_job(job, a, b)
    x = float(rng.choice([0.5, 0.25, 0.1]))
    plan.edits.during(a, b, "nic", served, x * 0.8)
    if rng.random() < 0.5:
        plan.state("link", "rate_gbps", port, a, b, site.boards[site.ports[port][0]].nic_gbps * x)
        plan.label(
            "straggler",
            "nic",
            a,
            b,
            members=[plan.place(g) for g in served],
            severity=round(1 - x, 3),
            scope="gpu",
            link=site.ports[port][1],
        )
        return True
    for column, most in (
        ("out_of_sequence", 300),
        ("packet_sequence_errors", 300),
        ("ack_timeouts", 3),
        ("rx_errors", 20),
        ("symbol_errors", 30),
    ):
        plan.rate("link", column, port, a, b, float(rng.uniform(0.1, 1) * most))
    plan.label(
        "straggler",
        "nic",
        a,
        b,
        members=[plan.place(g) for g in served],
        severity=round(1 - x, 3),
        scope="gpu",
        link=site.ports[port][1],
    )
    return True


def slow_host(plan: Plan) -> bool:
    found = _slow(plan, least=9) or _slow(plan, least=4)
    if not found:
        return False
    a, b, gpu, job = found
    site, rng = plan.site, plan.site.rng
    node = int(site.node_of[gpu])
    mine = [g for g in job.members if site.node_of[g] == node]
    plan.take(mine, a, b)
    plan.edits.during(a, b, "host", mine, float(rng.uniform(4, 16)))
    if rng.random() < 0.7:  # a daemon gone wild, or cores held at a low clock: the second shows in nothing but waiting
        plan.edits.during(a, b, "cpu", node, float(rng.uniform(0.2, 0.7)))
    plan.label("straggler", "host", a, b, node=node)
    return True


def slow_unexplained(plan: Plan) -> bool:
    found = _slow(plan)
    if not found:
        return False
    a, b, gpu, _ = found
    x = float(plan.site.rng.uniform(1.12, 1.6))
    plan.edits.during(a, b, "unx", gpu, x)
    plan.label("straggler", "unexplained", a, b, gpu=gpu, severity=round(x - 1, 3))
    return True


# ---- hangs ----
def hang(plan: Plan) -> bool:
    for _ in range(4):
        a, _b = window(plan, late=True)
        lasts = float(plan.site.rng.choice([600, 600, 1800])) + float(plan.site.rng.uniform(0, 60))
        found = pick(plan, a, a + 300, sync=True, least=4, need=lambda g: killable(plan, g, a))
        if found:
            break
    else:
        return False
    gpu, job = found
    b = min(a + lasts, plan.site.span, job.end)
    plan.take(gpu, a, b)
    plan.take_job(job, a, b)
    end = plan.kill(gpu, a, job, lasts, again=plan.site.rng.random() < 0.6, lost=set())
    how = plan.site.rng.random()
    plan.edits.during(
        a, end, "spin", gpu, 2.0 if how < 0.6 else 3.0
    )  # stuck in the host, or in a kernel that never ends
    plan.label("hang", "rank_stopped", a, b, gpu=gpu)
    return True


# ---- heat ----
def cooling(plan: Plan) -> bool:
    a, b = window(plan, 1800, 14400)
    found = pick(plan, a, min(a + 1500, b))
    if not found:
        return False
    gpu, _ = found
    rng = plan.site.rng
    x = float(rng.uniform(1.1, 1.6))
    if rng.random() < 0.5:
        plan.edits.ramp(a, b, "rth", gpu, 1.0, x)  # paste pumps out, dust, a plate clogs
        how = "creeping"
    else:
        plan.edits.set(a, "rth", gpu, x)
        how = "sudden"
    plan.edits.set(b, "rth", gpu, 1.0)
    plan.take(gpu, a, b)
    plan.label("thermal", "cooling", a, b, gpu=gpu, severity=round(x - 1, 3), how=how)
    return True


def fan(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    a, b = window(plan, 1800, 10000)
    found = pick(plan, a, min(a + 900, b))
    if not found:
        return False
    node = int(site.node_of[found[0]])
    gpus = site.gpus_of(node)
    if not plan.free(gpus, a, b):
        return False
    plan.take(gpus, a, b)
    x = float(rng.uniform(0.45, 0.8))
    plan.edits.during(a, b, "air", node, x)  # of a liquid node: the pump or a valve
    if not site.liquid:
        dead = rng.random() < 0.6
        plan.scales.append(("node", "fan_min_rpm", node, a, b, 0.0 if dead else float(rng.uniform(0.2, 0.6))))
        if dead:
            plan.state("node", "fans_failed", node, a, b, 1)
    plan.label("thermal", "fan", a, b, node=node, severity=round(1 - x, 3))
    return True


def rack_heat(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    racks = {r: [k for k in range(site.n) if site.racks[k] == r] for r in site.racks}
    many = [m for m in racks.values() if len(m) > 1]
    if not many:
        return False
    a, b = window(plan, 1500, 9000)
    mine = many[int(rng.integers(len(many)))]
    gpus = np.concatenate([site.gpus_of(k) for k in mine])
    if not plan.free(gpus, a, b):
        return False
    plan.take(gpus, a, b)
    x = float(rng.uniform(7, 18))
    up = float(rng.uniform(60, 900))
    plan.edits.ramp(a, a + up, "warm", np.array(mine), 0.0, x)  # a CRAC, a CDU or a blanking panel
    plan.edits.ramp(b, b + 600, "warm", np.array(mine), x, 0.0)
    plan.label(
        "thermal", "rack", a, b, members=[[site.names[k], None] for k in mine], severity=round(x, 1), scope="rack"
    )
    return True


def hbm_heat(plan: Plan) -> bool:
    if "memory_temp_c" in plan.site.drop["gpu"]:
        return False
    a, b = window(plan, 1800, 9000)
    found = pick(plan, a, min(a + 1500, b))
    if not found:
        return False
    x = float(plan.site.rng.uniform(1.8, 4.5))
    plan.edits.during(a, b, "rhbm", found[0], x)
    plan.take(found[0], a, b)
    plan.label("thermal", "hbm", a, b, gpu=found[0], severity=round(x - 1, 2))
    return True


# ---- memory ----
def _any_gpu(
    plan: Plan, low: float = 600, high: float = 7200, *, late: bool = False, need: Callable[[int], bool] | None = None
) -> tuple[float, float, int] | None:
    for _ in range(4):
        a, b = window(plan, low, high, late)
        found = pick(
            plan, a, min(a + 300, b), need=lambda g: (need is None or need(g)) and (not late or killable(plan, g, a))
        )
        if found:
            plan.take(found[0], a, plan.site.span if late else b)
            return a, b, found[0]
    return None


def ecc_storm(plan: Plan) -> bool:
    found = _any_gpu(plan)
    if not found:
        return False
    a, b, gpu = found
    rng = plan.site.rng
    rate = float(10 ** rng.uniform(-0.7, 2.5))
    column = "ecc_dram_corrected" if rng.random() < 0.8 else "ecc_sram_corrected"
    plan.rate("gpu", column, gpu, a, b, rate, rate * float(rng.uniform(0.5, 4)))
    if rate > 30 and rng.random() < 0.5:
        plan.event(a + float(rng.uniform(20, 200)), gpu, 92, "High single-bit ECC error rate", NOBODY)
    plan.label("memory", "ecc_storm", a, b, gpu=gpu, severity=round(rate, 2))
    return True


def _row(plan: Plan) -> str:
    return f"0x{int(plan.site.rng.integers(1 << 30)):012x}"


def remaps(plan: Plan) -> bool:
    if plan.site.boards[0].name.startswith("T4"):
        return False
    found = _any_gpu(plan, 2400, 12000, need=lambda g: plan.site.board(g).hbm)
    if not found:
        return False
    a, b, gpu = found
    rng = plan.site.rng
    times = np.sort(np.concatenate([[a], rng.uniform(a, b, int(rng.integers(6, 30)))]))
    plan.count("gpu", "remapped_rows_corrected", gpu, times)
    plan.rate("gpu", "ecc_dram_corrected", gpu, a, b, float(rng.uniform(0.01, 0.5)))
    for k, t in enumerate(times):
        if rng.random() < 0.8:
            plan.event(
                float(t),
                gpu,
                63,
                f"Row Remapper: New row ({_row(plan)}) marked for remapping, reset gpu to activate.",
                NOBODY,
            )
        if k % 3 == 2:
            plan.adds.append(("gpu", "remap_banks_max", gpu, float(t), plan.site.span, -1.0))
    plan.state("gpu", "row_remap_pending", gpu, float(times[0]), plan.site.span, 1)
    plan.take(gpu, b, plan.site.span)
    plan.label("memory", "remaps_pile_up", a, None, gpu=gpu, severity=len(times))
    return True


def _bits(plan: Plan, gpu: int, a: float) -> dict[str, object]:
    """An ECC burst ahead of a hard fault of memory, in about half of the cases."""
    rng = plan.site.rng
    if rng.random() < 0.5 or a < 2400:
        return {}
    before = float(rng.uniform(600, 2400))
    plan.taken[gpu].append((a - before - 300, a))
    if rng.random() < 0.5 and plan.site.board(gpu).hbm:
        times = np.sort(rng.uniform(a - before, a, int(rng.integers(2, 7))))
        plan.count("gpu", "remapped_rows_corrected", gpu, times)
        plan.rate("gpu", "ecc_dram_corrected", gpu, float(times[0]), a, 0.05)
        return {"precursor": "remap", "precursor_start": float(times[0])}
    plan.rate("gpu", "ecc_dram_corrected", gpu, a - before, a, 0.05, float(rng.uniform(0.5, 20)))
    return {"precursor": "ecc", "precursor_start": a - before}


def remap_failed(plan: Plan) -> bool:
    if plan.site.boards[0].name.startswith("T4"):
        return False
    found = _any_gpu(plan, late=True)
    if not found:
        return False
    a, b, gpu = found
    ahead = _bits(plan, gpu, a)
    plan.state("gpu", "row_remap_failed", gpu, a, plan.site.span, 1)
    plan.count("gpu", "ecc_dram_uncorrected", gpu, [a])
    plan.adds.append(("gpu", "remap_banks_none", gpu, a, plan.site.span, 1.0))
    if plan.site.rng.random() < 0.85:
        plan.event(
            a, gpu, 64, f"Row Remapper: Failed to remap row {_row(plan)} (no spare row left in its bank)", NOBODY
        )
    plan.label("memory", "remap_failed", a, None, gpu=gpu, **ahead)
    return True


def uncorrectable(plan: Plan) -> bool:
    found = _any_gpu(plan, late=True)
    if not found:
        return False
    a, b, gpu = found
    ahead = _bits(plan, gpu, a)
    rng, hbm = plan.site.rng, plan.site.board(gpu).hbm
    plan.count("gpu", "ecc_dram_uncorrected", gpu, a + np.arange(int(rng.integers(1, 4))) * 20.0)
    spot = f"partition {int(rng.integers(0, 10))}, subpartition {int(rng.integers(0, 2))}"
    plan.event(
        a,
        gpu,
        48,
        f"An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at {spot}.",
        NOBODY,
    )
    if hbm:
        plan.event(
            a + 1, gpu, 63, f"Row Remapper: New row ({_row(plan)}) marked for remapping, reset gpu to activate.", NOBODY
        )
        plan.count("gpu", "remapped_rows_uncorrected", gpu, [a + 1])
        plan.state("gpu", "row_remap_pending", gpu, a, plan.site.span, 1)
        plan.event(a + 1, gpu, 94, "Contained: SM (0x1). RST: No, D-RST: No")
    plan.state("gpu", "recovery_action", gpu, a, plan.site.span, 1)
    job = plan.job_at(gpu, a)
    if job is not None:
        plan.event(a + 2, gpu, 45, "Ch 00000008")
        plan.take_job(job, a, a + 600)
        plan.kill(gpu, a, job, float(rng.uniform(30, 240)), again=True, lost={gpu})
    plan.label("memory", "uncorrectable", a, None, gpu=gpu, **ahead)  # until its reset
    return True


def sram(plan: Plan) -> bool:
    found = _any_gpu(plan, late=True)
    if not found:
        return False
    a, b, gpu = found
    rng = plan.site.rng
    plan.rate("gpu", "ecc_sram_corrected", gpu, a - 1200, b, float(rng.uniform(0.01, 0.2)))
    plan.count("gpu", "ecc_sram_uncorrected", gpu, a + np.cumsum(rng.exponential(60, int(rng.integers(3, 9)))))
    plan.state("gpu", "sram_threshold_exceeded", gpu, a, plan.site.span, 1)
    if rng.random() < 0.7:
        plan.event(
            a,
            gpu,
            48,
            "An uncorrectable double bit error (DBE) has been detected on GPU in the L2 cache, slice 3.",
            NOBODY,
        )
        if plan.site.board(gpu).blackwell:
            plan.event(a, gpu, 172, "Uncorrectable SRAM error", NOBODY)
    plan.label("memory", "sram_threshold", a, None, gpu=gpu, precursor="ecc", precursor_start=a - 1200)
    return True


# ---- links ----
def _port(plan: Plan, a: float, b: float, kills: bool = False) -> tuple[int, list[int], list[list[object]]] | None:
    """A port in use, the GPUs it serves, and its label's members."""
    site = plan.site
    if not site.ports:
        return None
    for _ in range(8):
        port = int(site.rng.integers(len(site.ports)))
        node = site.ports[port][0]
        served = [int(g) for g in site.gpus_of(node) if site.port_of(g) == port]
        gpus = served or [int(g) for g in site.gpus_of(node)]
        if plan.free(gpus, a, b) and (not kills or killable(plan, gpus, a)):
            plan.take(gpus, a, b)
            return port, served, [plan.place(g) for g in served] or [[site.names[node], None]]
    return None


def _slowed(plan: Plan, served: list[int], a: float, b: float, x: float) -> None:
    """A port that carries less slows the jobs that need it."""
    plan.edits.during(a, b, "nic", served, x)
    for job in plan.jobs:
        if job.start < b and a < job.end and np.isin(job.members, served).any():
            plan.take_job(job, max(a, job.start), min(b, job.end))


def ib_errors(plan: Plan) -> bool:
    a, b = window(plan, 900, 7200)
    found = _port(plan, a, b)
    if not found:
        return False
    port, served, members = found
    rng = plan.site.rng
    rate = float(10 ** rng.uniform(-1, 1.8))
    grow = float(rng.uniform(0.5, 5))
    for column, factor in (
        ("symbol_errors", 1.0),
        ("rx_errors", 0.4),
        ("local_integrity_errors", 0.02),
        ("link_error_recoveries", 0.004),
        ("packet_sequence_errors", 0.3),
        ("out_of_sequence", 0.4),
    ):
        plan.rate("link", column, port, a, b, rate * factor, rate * factor * grow)
    if rate > 10:
        _slowed(plan, served, a, b, float(rng.uniform(0.6, 0.95)))
    plan.label(
        "link", "ib_errors", a, b, members=members, severity=round(rate, 2), scope="link", link=plan.site.ports[port][1]
    )
    return True


def _down(plan: Plan, port: int, a: float, b: float) -> None:
    plan.state("link", "link_up", port, a, b, 0)
    plan.scales.append(("link", "bytes", port, a, b, 0.0))
    plan.count("link", "link_downed", port, [a])
    node, name = plan.site.ports[port][:2]
    plan.kernel(a, node, None, "link", f"mlx5_core: {name} port 1: Link down")
    plan.kernel(b, node, None, "link", f"mlx5_core: {name} port 1: Link up")


def flap(plan: Plan) -> bool:
    a, b = window(plan, 600, 4000)
    found = _port(plan, a, b)
    if not found:
        return False
    port, served, members = found
    rng, t, dt = plan.site.rng, a, plan.site.dt
    while t < b:
        lasts = max(float(rng.exponential(25) + 4), dt * float(rng.uniform(0.3, 1.2)))
        _down(plan, port, t, min(t + lasts, b))
        for column in ("symbol_errors", "rx_errors", "ack_timeouts"):
            plan.rate("link", column, port, t, t + lasts, 3.0)
        if served:
            plan.edits.during(t, t + lasts, "nic", served, 0.05)  # NCCL retries and waits
        t += lasts + float(rng.exponential(240) + 30)
    for job in plan.jobs:
        if job.start < b and a < job.end and np.isin(job.members, served).any():
            plan.take_job(job, a, b)
    plan.label("link", "ib_flap", a, b, members=members, scope="link", link=plan.site.ports[port][1])
    return True


def port_down(plan: Plan) -> bool:
    a, b = window(plan, 900, 9000, late=True)
    found = _port(plan, a, b, kills=True)
    if not found:
        return False
    port, served, members = found
    rng = plan.site.rng
    ahead: dict[str, object] = {}
    if rng.random() < 0.5 and a > 2400:
        before = float(rng.uniform(600, 2000))
        for column, factor in (("symbol_errors", 1.0), ("rx_errors", 0.4), ("out_of_sequence", 0.4)):
            plan.rate("link", column, port, a - before, a, 0.05 * factor, float(rng.uniform(1, 8)) * factor)
        ahead = {"precursor": "link_errors", "precursor_start": a - before}
    _down(plan, port, a, b)
    jobs = [j for j in plan.jobs if j.sync and j.net and j.start + 60 < a < j.end and np.isin(j.members, served).any()]
    for job in jobs:  # IB without a second path: NCCL ends with an error after its retries
        plan.take_job(job, a, a + 900)
        node = plan.site.ports[port][0]
        plan.kill(
            served[0], a, job, float(rng.uniform(60, 400)), again=True, lost=set(map(int, plan.site.gpus_of(node)))
        )
    plan.label("link", "port_down", a, b, members=members, scope="link", link=plan.site.ports[port][1], **ahead)
    return True


def pcie_down(plan: Plan) -> bool:
    found = _any_gpu(plan, 900, 9000)
    if not found:
        return False
    a, b, gpu = found
    rng, board = plan.site.rng, plan.site.board(gpu)
    x = float(rng.choice([0.5, 0.5, 0.25, 0.0625]))
    if x >= 0.25 and rng.random() < 0.5:
        plan.state("gpu", "pcie_generation", gpu, a, b, max(1, board.pcie + int(np.log2(x))))
    else:
        plan.state("gpu", "pcie_width", gpu, a, b, board.lanes * x)
    plan.edits.during(a, b, "pcie", gpu, x)
    plan.rate("node", "pcie_aer_correctable", int(plan.site.node_of[gpu]), a - 60, a + 30, 0.5)
    plan.label("link", "pcie_downgrade", a, b, gpu=gpu, severity=round(1 - x, 3))
    return True


def replays(plan: Plan) -> bool:
    found = _any_gpu(plan, 900, 7200)
    if not found:
        return False
    a, b, gpu = found
    rate = float(10 ** plan.site.rng.uniform(-0.3, 1.6))
    plan.rate("gpu", "pcie_replays", gpu, a, b, rate, rate * 1.5)
    plan.rate("node", "pcie_aer_correctable", int(plan.site.node_of[gpu]), a, b, rate * 0.8)
    plan.label("link", "pcie_replays", a, b, gpu=gpu, severity=round(rate, 2))
    return True


def nvlink(plan: Plan) -> bool:
    found = _any_gpu(plan, 900, 7200, need=lambda g: plan.site.board(g).links > 0)
    if not found:
        return False
    a, b, gpu = found
    site, rng = plan.site, plan.site.rng
    board, link = site.board(gpu), int(rng.integers(0, site.board(gpu).links))
    rate = float(10 ** rng.uniform(-0.5, 2.2))
    plan.rate("gpu", "nvlink_crc_errors", gpu, a, b, rate)
    plan.rate("gpu", "nvlink_replays", gpu, a, b, rate * 0.3)
    plan.rate("gpu", "nvlink_recoveries", gpu, a, b, rate * 0.002)
    if board.blackwell:
        plan.state("gpu", "nvlink_effective_ber", gpu, a, b, float(10 ** rng.uniform(-12.5, -8)))
    if rng.random() < 0.5:
        t = a + float(rng.uniform(0, 0.5)) * (b - a)
        if board.blackwell:
            plan.event(
                t,
                gpu,
                149,
                f"NETIR_LINK_EVT Fatal   XC0 i0 Link {link:02d} (0x004505c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
                "",
            )
        else:
            plan.event(
                t,
                gpu,
                74,
                f"NVLink: fatal error detected on link {link}(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)",
                NOBODY,
            )
            sw = f"nvidia-nvswitch{int(rng.integers(0, 4))}: SXid (PCI:0000:05:00.0): 20034, Fatal, Link {int(rng.integers(0, 60))} LTSSM Fault Up"
            plan.kernel(t + 0.2, int(site.node_of[gpu]), None, "20034", sw, "sxid")
        plan.state("gpu", "nvlink_active_links", gpu, t, b, board.links - 1)
        plan.edits.during(t, b, "nvl", gpu, 0.8)
        job = plan.job_at(gpu, t)
        if job is not None and job.sync and plan.job_free(job, t, t + 600) and rng.random() < 0.6:
            plan.take_job(job, t, t + 600)
            plan.kill(gpu, t, job, float(rng.uniform(60, 600)), again=True, lost={gpu})
    plan.label("link", "nvlink", a, b, gpu=gpu, severity=round(rate, 2))
    return True


def _pressure(plan: Plan, port: int, a: float, b: float, share: float) -> None:
    """Back-pressure on a port: waits for credits on IB, marks and notices on RoCE."""
    rng = plan.site.rng
    if plan.site.fabric == "ib":
        plan.rate("link", "tx_wait", port, a, b, share * 2e8)
    else:
        plan.rate("link", "cnp_handled", port, a, b, share * float(rng.uniform(1e3, 8e3)))
        plan.rate("link", "cnp_sent", port, a, b, share * float(rng.uniform(300, 3e3)))
        plan.rate("link", "out_of_sequence", port, a, b, share * 2)
    plan.rate("link", "tx_discards", port, a, b, share * float(rng.uniform(0.2, 6)))


def congestion(plan: Plan) -> bool:
    for _ in range(3):
        a, b = window(plan, 900, 5400)
        got = pick(plan, a, min(a + 600, b), sync=True, least=9)
        if got and plan.site.port_of(got[0]) is not None and got[1].net:
            break
    else:
        return False
    gpu, job = got
    port = plan.site.port_of(gpu)
    assert port is not None
    b = min(b, job.end)
    served = [int(g) for g in plan.site.gpus_of(int(plan.site.node_of[gpu])) if plan.site.port_of(g) == port]
    plan.take(served, a, b)
    share = float(plan.site.rng.uniform(0.3, 0.85))
    _slowed(plan, served, a, b, 1 - share)
    _pressure(plan, port, a, b, share)
    plan.label(
        "link",
        "congestion_port",
        a,
        b,
        members=[plan.place(g) for g in served],
        severity=round(share, 2),
        scope="link",
        link=plan.site.ports[port][1],
    )
    return True


def hot_switch(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    leaves: dict[str, list[int]] = {}
    for k, (_, _, first, leaf) in enumerate(site.ports):
        if first >= 0:
            leaves.setdefault(leaf, []).append(k)
    many = [ports for ports in leaves.values() if len({site.ports[p][0] for p in ports}) >= 3]
    if not many:
        return False
    for _ in range(4):
        a, b = window(plan, 900, 5400)
        ports = many[int(rng.integers(len(many)))]
        nodes = sorted({site.ports[p][0] for p in ports})
        gpus = [int(g) for k in nodes for g in site.gpus_of(k) if site.port_of(g) in ports]
        if plan.free(gpus, a, b):
            break
    else:
        return False
    plan.take(gpus, a, b)
    share = float(rng.uniform(0.3, 0.7))
    _slowed(plan, gpus, a, b, 1 - share)
    for port in ports:
        _pressure(plan, port, a, b, share * float(rng.uniform(0.5, 1.1)))
    plan.label(
        "link",
        "hot_switch",
        a,
        b,
        members=[[site.names[k], None] for k in nodes] + [plan.place(g) for g in gpus],
        severity=round(share, 2),
        scope="leaf",
        leaf=site.ports[ports[0]][3],
    )
    return True


# ---- XIDs ----
def off_bus(plan: Plan) -> bool:
    found = _any_gpu(plan, late=True)
    if not found:
        return False
    a, b, gpu = found
    site, rng = plan.site, plan.site.rng
    node, job = int(site.node_of[gpu]), plan.job_at(gpu, a)
    ahead: dict[str, object] = {}
    if rng.random() < 0.35 and a > 1800:  # mostly there is none
        before = float(rng.uniform(300, 1500))
        if rng.random() < 0.5:
            plan.edits.ramp(a - before, a, "rth", gpu, 1.0, _too_hot(plan, gpu, float(rng.uniform(-12, 3))))
            ahead = {"precursor": "heat", "precursor_start": a - before}
        else:
            plan.thin.append(("gpu", gpu, a - before, a, 0.6))
            ahead = {"precursor": "telemetry", "precursor_start": a - before}
    if rng.random() < 0.5:
        plan.rate("node", "pcie_aer_correctable", node, a - 120, a, 0.3)
        plan.count("node", "pcie_aer_fatal", node, [a])
    plan.event(a, gpu, 79, "GPU has fallen off the bus.", NOBODY)
    if rng.random() < 0.6:
        plan.event(a + 1, gpu, 154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", "")
    plan.silent.append(("gpu", gpu, a, site.span))
    plan.state("node", "source_nvml_outcome", node, a, site.span, 1)
    if job is not None:
        plan.take_job(job, a, a + 900)
        plan.kill(gpu, a, job, float(rng.uniform(30, 700)), again=True, lost=set(map(int, site.gpus_of(node))))
    plan.take(gpu, a, site.span)
    plan.label("xid", "fallen_off_bus", a, None, gpu=gpu, **ahead)
    return True


def gsp(plan: Plan) -> bool:
    found = _any_gpu(plan, late=True)
    if not found:
        return False
    a, b, gpu = found
    site, rng = plan.site, plan.site.rng
    node, job = int(site.node_of[gpu]), plan.job_at(gpu, a)
    code, t = int(rng.choice([119, 119, 120])), a
    while t < b and t < a + 1200:
        if code == 119:
            plan.event(
                t,
                gpu,
                119,
                f"Timeout after {int(rng.choice([6, 45]))}s of waiting for RPC response from GPU{int(site.slot_of[gpu])} GSP! Expected function 76 (GSP_RM_CONTROL) (0x20802a02 0x8).",
            )
        else:
            plan.event(
                t, gpu, 120, "GSP task exception: load access fault (cause:0xd) @ pc:0x1a4d2c, partition:4#0, task:3"
            )
        t += float(rng.exponential(90) + 8)
    plan.event(a + 2, gpu, 154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "")
    plan.state("gpu", "recovery_action", gpu, a, site.span, 1)
    plan.state("node", "source_nvml_read_s", node, a, b, float(rng.uniform(3, 10)))
    plan.state("node", "source_nvml_outcome", node, a, b, 2)
    plan.thin.append(("gpu", gpu, a, site.span, float(rng.uniform(0.5, 1.0))))
    if job is not None:
        plan.take_job(job, a, a + 900)
        end = plan.kill(gpu, a, job, float(rng.uniform(120, 1200)), again=True, lost=set(map(int, site.gpus_of(node))))
        plan.edits.during(a, end, "spin", gpu, 3.0)
    plan.take(gpu, a, site.span)
    plan.label("xid", "gsp_timeout", a, None, gpu=gpu)
    return True


def nvlink5(plan: Plan) -> bool:
    found = _any_gpu(plan, late=True, need=lambda g: plan.site.board(g).blackwell)
    if not found:
        return False
    a, b, gpu = found
    site, rng = plan.site, plan.site.rng
    link = int(rng.integers(0, 18))
    job = plan.job_at(gpu, a)
    if rng.random() < 0.6:
        plan.event(
            a,
            gpu,
            149,
            f"NETIR_LINK_EVT Fatal   XC0 i0 Link {link:02d} (0x004505c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
            "",
        )
    else:
        plan.event(
            a,
            gpu,
            145,
            f"RLW_SRC_TRACK Fatal   XC0 i0 Link {link:02d} (0x000000e2 0x00000001 0x00000000 0x00000000 0x00000000 0x00000000)",
            "",
        )
    plan.event(a + 0.3, gpu, 154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "")
    plan.state("gpu", "recovery_action", gpu, a, site.span, 1)
    plan.state("gpu", "nvlink_active_links", gpu, a, site.span, 17)
    plan.state("gpu", "nvlink_effective_ber", gpu, a, site.span, float(10 ** rng.uniform(-11, -8)))
    if job is not None:
        plan.event(a + 1, gpu, 45, f"Ch 0000000{int(rng.integers(1, 9))} caused by previous Xid 149")
        plan.take_job(job, a, a + 900)
        plan.kill(gpu, a, job, float(rng.uniform(30, 600)), again=True, lost={gpu})
    plan.label("xid", "nvlink5", a, None, gpu=gpu)
    return True


def spi(plan: Plan) -> bool:
    found = _any_gpu(plan, late=True)
    if not found:
        return False
    a, b, gpu = found
    rng, job = plan.site.rng, plan.job_at(found[2], found[0])
    plan.event(a, gpu, 122, "SPI PMU RPC Read Fail", NOBODY)
    if rng.random() < 0.85:
        plan.event(
            a + 0.05,
            gpu,
            31,
            "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_3 faulted @ 0x7f5c_2a000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
        )
        if job is not None:
            plan.event(a + 0.4, gpu, 43, "Ch 00000010")
            plan.take_job(job, a, a + 600)
            plan.kill(gpu, a, job, float(rng.uniform(20, 200)), again=True, lost={gpu})
    plan.label("xid", "spi_failure", a, min(b, a + 3600), gpu=gpu)
    return True


def uncontained(plan: Plan) -> bool:
    found = _any_gpu(plan, late=True)
    if not found:
        return False
    a, b, gpu = found
    site, rng = plan.site, plan.site.rng
    ahead = _bits(plan, gpu, a)
    job = plan.job_at(gpu, a)
    for k in range(int(rng.integers(1, 30))):
        plan.event(a + 0.2 * k, gpu, 95, "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No")
    plan.count("gpu", "ecc_sram_uncorrected" if rng.random() < 0.5 else "ecc_dram_uncorrected", gpu, [a])
    plan.event(a + 1, gpu, 154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "")
    plan.state("gpu", "recovery_action", gpu, a, site.span, 1)
    if job is not None:
        plan.event(a + 2, gpu, 45, "Ch 00000008")
        plan.take_job(job, a, a + 600)
        plan.kill(gpu, a, job, float(rng.uniform(20, 200)), again=True, lost={gpu})
    plan.label("xid", "uncontained_ecc", a, None, gpu=gpu, **ahead)
    return True


# ---- who no longer reports ----
def silent(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    for _ in range(5):
        a, b = window(plan, 600, 7200, late=True)
        node = int(rng.integers(site.n))
        gpus = site.gpus_of(node)
        if plan.free(gpus, a, b) and killable(plan, gpus, a):
            break
    else:
        return False
    plan.take(gpus, a, b)
    _lose(plan, [node], a, b)
    plan.label("liveness", "silent", a, b, node=node)
    return True


def _lose(plan: Plan, nodes: list[int], a: float, b: float) -> None:
    site, rng = plan.site, plan.site.rng
    gone = {int(g) for k in nodes for g in site.gpus_of(k)}
    for job in list(plan.jobs):
        if job.start < a < job.end and np.isin(job.members, list(gone)).any():
            plan.take_job(job, a, a + 900)
            plan.kill(None, a, job, float(rng.uniform(60, 900)), again=True, lost=gone)
    for node in nodes:
        plan.reboot(node, a, b - a, clean=False)


def rack_power(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    racks = {r: [k for k in range(site.n) if site.racks[k] == r] for r in site.racks}
    many = [m for m in racks.values() if 2 <= len(m) <= max(2, site.n // 2)]
    if not many:
        return False
    for _ in range(4):
        a, b = window(plan, 900, 7200, late=True)
        mine = many[int(rng.integers(len(many)))]
        gpus = np.concatenate([site.gpus_of(k) for k in mine])
        if plan.free(gpus, a, b) and killable(plan, gpus, a):
            break
    else:
        return False
    plan.take(gpus, a, b)
    _lose(plan, mine, a, b)
    plan.label("liveness", "rack_power", a, b, members=[[site.names[k], None] for k in mine], scope="rack")
    return True


def gpu_lost(plan: Plan) -> bool:
    found = _any_gpu(plan, late=True)
    if not found:
        return False
    a, b, gpu = found
    site, rng = plan.site, plan.site.rng
    job = plan.job_at(gpu, a)
    ahead: dict[str, object] = {}
    if rng.random() < 0.4 and a > 1800:
        plan.thin.append(("gpu", gpu, a - 900, a, 0.5))
        ahead = {"precursor": "telemetry", "precursor_start": a - 900}
    plan.silent.append(("gpu", gpu, a, site.span))
    if job is not None:
        plan.take_job(job, a, a + 900)
        plan.kill(gpu, a, job, float(rng.uniform(60, 900)), again=True, lost={gpu})
    plan.take(gpu, a, site.span)
    plan.label("liveness", "gpu_lost", a, None, gpu=gpu, **ahead)
    return True


def driver_hung(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    for _ in range(5):
        a, b = window(plan, 900, 6000, late=True)
        node = int(rng.integers(site.n))
        gpus = site.gpus_of(node)
        if plan.free(gpus, a, b) and killable(plan, gpus, a):
            break
    else:
        return False
    plan.take(gpus, a, b)
    plan.silent.append(("gpus", node, a, b))
    plan.state("node", "source_nvml_outcome", node, a, b, 2)
    plan.state("node", "agent_sources_hung", node, a, b, 1)
    plan.adds.append(("node", "source_nvml_read_s", node, a, b, -1.0))  # grows with time
    for job in list(plan.jobs):
        if job.start < a < job.end and np.isin(job.members, gpus).any():
            plan.take_job(job, a, a + 900)
            plan.kill(None, a, job, float(rng.uniform(60, 900)), again=True, lost=set(map(int, gpus)))
    plan.kernel(a + 122, node, None, "hung_task", "INFO: task nvidia-smi:48211 blocked for more than 120 seconds.")
    if rng.random() < 0.6:
        plan.boots.append((node, b))
    plan.label("liveness", "driver_hung", a, b, node=node)
    return True


def clock_wrong(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    a, b = window(plan, 1800, 9000)
    node = int(rng.integers(site.n))
    if not plan.free(site.gpus_of(node), a, b):
        return False
    plan.take(site.gpus_of(node), a, b)
    offset = float(rng.choice([-1, 1]) * 10 ** rng.uniform(1.3, 2.8))
    plan.shifts.append((node, a, b, offset))
    plan.label("liveness", "clock_wrong", a, b, node=node, severity=round(abs(offset), 1))
    return True


# ---- drift ----
def _other_driver(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    if not site.inventories or site.n < 4:
        return False
    node = int(rng.integers(site.n))
    other = str(rng.choice(["535.216.03", "550.127.08", "560.35.03", "570.148.08"]))
    a = float(rng.uniform(0.2, 0.7)) * site.span
    if (
        rng.random() < 0.5
        or not plan.free(site.gpus_of(node), a, a + 900)
        or not killable(plan, site.gpus_of(node), a)
        or not plan.clear_node(node, a)
    ):
        plan.facts.append((-3600.0, node, "driver_version", other))
        plan.label("drift", "driver", 0, None, node=node)
        return True
    plan.take(site.gpus_of(node), a, a + 900)
    lasts = float(rng.uniform(240, 700))
    plan.reboot(node, a, lasts)
    plan.facts.append((a + lasts, node, "driver_version", other))
    plan.label("drift", "driver", a + lasts, None, node=node)
    return True


def vbios(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    if not site.inventories or site.n < 4:
        return False
    gpu = int(rng.integers(site.g))
    plan.facts.append((-3600.0, int(site.node_of[gpu]), f"gpu{int(site.slot_of[gpu])}.vbios", "96.00.30.00.01"))
    plan.label("drift", "vbios", 0, None, gpu=gpu)
    return True


def _limit(plan: Plan, cause: str) -> bool:
    site, rng = plan.site, plan.site.rng
    whole = rng.random() < 0.5
    a = 0.0 if rng.random() < 0.5 else float(rng.uniform(0.1, 0.7)) * site.span
    b = site.span
    found = pick(plan, max(a, 700.0), max(a, 700.0) + 600)
    if not found or site.n < 2:
        return False
    gpu, job = found
    gpus = site.gpus_of(int(site.node_of[gpu])) if whole else np.array([gpu])
    if not plan.free(gpus, a, b):
        return False
    plan.take(gpus, a, b, 0)
    for j in plan.jobs:
        if j.sync and np.isin(j.members, gpus).any():
            plan.take_job(j, a, b)
    x = float(rng.uniform(0.55, 0.85))
    key = {"clock_limit": "fcap", "power_limit": "plim"}[cause]
    plan.edits.set(a if a else -1.0, key, gpus, x)
    node = int(site.node_of[gpu])
    for g in gpus:
        slot, board = int(site.slot_of[g]), site.board(int(g))
        if cause == "power_limit":
            plan.facts.append((a - 5, node, f"gpu{slot}.power_limit_set_w", f"{board.tdp_w * x:.0f}"))
        else:
            plan.facts.append((a - 5, node, f"gpu{slot}.sm_clock_max_mhz", f"{board.clock * x:.0f}"))
    if whole:
        plan.label("drift", cause, a, None, node=node, severity=round(1 - x, 3))
    else:
        plan.label("drift", cause, a, None, gpu=gpu, severity=round(1 - x, 3))
    return True


def clock_limit(plan: Plan) -> bool:
    return _limit(plan, "clock_limit")


def power_limit(plan: Plan) -> bool:
    return _limit(plan, "power_limit")


def ecc_mode(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    if site.n < 2:
        return False
    gpu = int(rng.integers(site.g))
    if not plan.free(gpu, 0, site.span):
        return False
    plan.take(gpu, 0, site.span)
    plan.facts.append((-3600.0, int(site.node_of[gpu]), f"gpu{int(site.slot_of[gpu])}.ecc_mode", "disabled"))
    for column in (
        "ecc_sram_corrected",
        "ecc_sram_uncorrected",
        "ecc_dram_corrected",
        "ecc_dram_uncorrected",
        "sram_threshold_exceeded",
    ):
        plan.state("gpu", column, gpu, -1, site.span + 1, float("nan"))  # not supported without ECC
    if not site.board(gpu).hbm:
        plan.scales.append(
            ("gpu", "framebuffer_total_bytes", gpu, -1, site.span + 1, 1.0667)
        )  # GDDR6 gives its parity back
    plan.label("drift", "ecc_mode", 0, None, gpu=gpu)
    return True


# ---- idle ----
def unused(plan: Plan) -> bool:
    """A job holds GPUs that it never uses."""
    site, rng = plan.site, plan.site.rng
    for _ in range(6):
        jobs = [j for j in plan.jobs if j.used and j.start < 0.6 * site.span and j.end > j.start + 2400 and j.end > 2400 and len(j.members) <= 32
                and j.id not in plan.jobs_taken and plan.free(j.members, j.start, j.end)]  # fmt: skip
        if not jobs:
            return False
        job = jobs[int(rng.integers(len(jobs)))]
        job.used, job.listed, job.memory = False, job.listed, float(rng.choice([0.01, 0.03, 0.6]))
        a, b = max(job.start, 0.0), min(job.end, site.span)
        plan.take(job.members, a, b)
        plan.take_job(job, a, b)
        plan.label(
            "idle",
            "never_used",
            a,
            b,
            members=[plan.place(int(g)) for g in job.members],
            scope="job",
            job=job.id if job.listed else None,
        )
        return True
    return False


def left_over(plan: Plan) -> bool:
    """A process stays on a GPU after its job."""
    site, rng = plan.site, plan.site.rng
    ended = [j for j in plan.jobs if 600 < j.end < 0.85 * site.span]
    for k in rng.permutation(len(ended)):
        job = ended[int(k)]
        gpu = int(rng.choice(job.members))
        later = [j.start for j in plan.jobs if gpu in j.members and j.start >= job.end]
        b = min([*later, site.span])
        if b - job.end < 900 or not plan.free(gpu, job.end, b):
            continue
        plan.take(gpu, job.end, b)
        plan.edits.during(job.end, b, "left", gpu, float(rng.uniform(0.1, 0.8)))
        plan.edits.during(job.end, b, "procs", gpu, 1.0)
        plan.label("idle", "left_over", job.end, b, gpu=gpu)
        return True
    return False


ALL: tuple[tuple[Made, float], ...] = (
    (slow_clock, 1.2), (slow_power, 1.2), (slow_heat, 1.0), (slow_hbm, 0.8), (slow_nvlink, 0.8), (slow_pcie, 0.8), (slow_nic, 0.9),
    (slow_host, 0.9), (slow_unexplained, 1.0), (hang, 2.2), (cooling, 1.6), (fan, 1.0), (rack_heat, 0.9), (hbm_heat, 0.7),
    (ecc_storm, 1.0), (remaps, 0.8), (remap_failed, 0.7), (uncorrectable, 1.0), (sram, 0.6), (ib_errors, 1.0), (flap, 0.9),
    (port_down, 0.8), (pcie_down, 0.8), (replays, 0.7), (nvlink, 0.9), (congestion, 0.7), (hot_switch, 0.6), (off_bus, 1.3),
    (gsp, 0.9), (nvlink5, 2.5), (spi, 0.5), (uncontained, 0.7), (silent, 0.9), (gpu_lost, 0.8), (driver_hung, 0.8), (clock_wrong, 0.6),
    (rack_power, 0.7), (_other_driver, 0.7), (vbios, 0.4), (clock_limit, 0.6),
    (power_limit, 0.7), (ecc_mode, 0.4), (unused, 0.6), (left_over, 0.6),
)  # fmt: skip


ENDS_JOBS = {
    hang,
    remap_failed,
    uncorrectable,
    sram,
    port_down,
    off_bus,
    gsp,
    nvlink5,
    spi,
    uncontained,
    silent,
    gpu_lost,
    driver_hung,
    rack_power,
    unused,
    _other_driver,
}

WIDE = {rack_power, silent, driver_hung, rack_heat, hot_switch, fan, clock_limit, power_limit}


def place(plan: Plan, count: int) -> int:
    """Place up to `count` faults, no cause more than three times; gives how many found a place.

    Those that end jobs come first, so that the others know which jobs there are; wide ones before narrow ones.
    """
    rng, made = plan.site.rng, 0
    weights = np.array([w for _, w in ALL])
    used = np.zeros(len(ALL))
    for _ in range(6):
        want: list[int] = []
        for _ in range(count - made):
            if not weights.sum():
                break
            k = int(rng.choice(len(ALL), p=weights / weights.sum()))
            want.append(k)
            used[k] += 1
            weights[k] *= 0.35 if used[k] < 3 else 0.0
        for k in sorted(want, key=lambda k: (ALL[k][0] not in ENDS_JOBS, ALL[k][0] not in WIDE)):
            if ALL[k][0](plan):
                made += 1
            else:
                weights[k] *= 0.5
        if made >= count:
            break
    return made
