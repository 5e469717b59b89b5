"""Faults: what breaks, how hard, and what it leaves in telemetry, kernel log and labels.

Sizes: SC'22 (Sinha) for slow GPUs; Falcon (ATC'25) and MegaScale for stragglers of 3 to 35 %; Story of Two GPUs (SC'25) and
the Llama 3 report for rates of XIDs; NVIDIA's GPU memory error management guide for remaps. Other ranges are argued in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from drover_simulator.strangers.a import logs
from drover_simulator.strangers.a.boards import Fleet, has
from drover_simulator.strangers.a.effects import Effect, Effects
from drover_simulator.strangers.a.jobs import Job, Schedule
from drover_simulator.strangers.a.physics import DYN, X, Physics

MARGIN = 1200.0  # nothing on a node within 20 min after another fault's end


class Placer:
    """Keeps what is where; the causes are methods that return False where they do not fit."""

    def __init__(self, fleet: Fleet, schedule: Schedule, effects: Effects, rng: np.random.Generator) -> None:
        self.f, self.s, self.e, self.rng = fleet, schedule, effects, rng
        self.labels: list[dict[str, Any]] = []
        self.events: list[tuple[float, int, int | None, str, str, str]] = []
        self.inventory: list[tuple[float, int, dict[str, str]]] = []
        self.facts: dict[int, dict[str, str]] = {}
        self.watch: list[dict[str, Any]] = []
        self.busy: dict[int, list[tuple[float, float]]] = {n: [] for n in range(len(fleet.nodes))}
        self.used_pool_drift: set[int] = set()

    # ---- bookkeeping

    def free(self, node: int, t0: float, t1: float, margin: float = MARGIN) -> bool:
        return not any(a < t1 + margin and t0 < b + margin for a, b in self.busy[node])

    def take(self, nodes: Any, t0: float, t1: float) -> None:
        for n in np.unique(nodes):
            self.busy[int(n)].append((t0, t1))

    def label(
        self,
        kind: str,
        cause: str,
        t0: float,
        t1: float | None,
        members: list[tuple[int, int | None]],
        hardware: bool = True,
        **more: Any,
    ) -> dict[str, Any]:
        f = self.f
        shown = [[f.name(n), None if g is None else int(f.g_slot[g])] for n, g in members]
        end = None if t1 is None or t1 >= f.end else t1
        row = {
            "kind": kind,
            "node": shown[0][0],
            "gpu": shown[0][1],
            "start": t0,
            "end": end,
            "cause": cause,
            "hardware": hardware,
            "severity": 1.0,
            "members": shown,
            **more,
        }
        self.labels.append(row)
        return row

    def say(self, t: float, node: int, gpu: int | None, kind: str, code: str, text: str) -> None:
        if 0 <= t < self.f.end:
            self.events.append((t, node, gpu, kind, code, text))

    def window(self, low: float = 1800, high: float = 6600, lead: float = 0) -> tuple[float, float]:
        """A start and an end inside the case; one in four stays broken to the end."""
        end = self.f.end
        length = float(self.rng.uniform(low, min(high, max(low + 60, end * 0.6))))
        first = min(900.0, end * 0.08) + lead
        t0 = float(self.rng.uniform(first, max(first + 1, end - min(length, end * 0.5) - 60)))
        return t0, (end + 1 if self.rng.random() < 0.25 else t0 + length)

    def gpu(self, t0: float, t1: float, ok: Any = None) -> int | None:
        """A random GPU on a free node."""
        for g in self.rng.permutation(len(self.f.g_node))[:150]:
            if self.free(int(self.f.g_node[g]), t0, t1) and (ok is None or ok(int(g))):
                return int(g)
        return None

    def loaded(self, g: int, t0: float, t1: float) -> bool:
        """Whether a job loads this GPU through the first 30 min at least."""
        job = self.s.at(g, t0)
        return (
            job is not None
            and job.start + 900 < t0
            and job.end > min(t1, t0 + 2400, self.f.end)
            and job.kind != "single"
        )

    def sync_job(self, t0: float, t1: float, ok: Any = None) -> Job | None:
        for k in self.rng.permutation(len(self.s.jobs)):
            job = self.s.jobs[k]
            if (
                job.sync
                and len(job.gpus) >= 4
                and job.steady(t0, min(t1, self.f.end))
                and job.free(t0, t1)
                and (ok is None or ok(job))
            ):
                return job
        return None

    def die(self, gpus: Any, t: float, back: float, linger: float | None = None) -> None:
        """The jobs on these GPUs die at t (a service only loses these replicas)."""
        gpus, rng, seen = np.atleast_1d(np.asarray(gpus, int)), self.rng, []
        for g in gpus:
            job = self.s.at(int(g), t)
            if job is None or any(job is x for x in seen):
                continue
            seen.append(job)
            mine = job.gpus[np.isin(job.gpus, gpus)]
            if job.kind == "infer":
                part = np.isin(
                    np.arange(len(job.gpus)) // job.replica, np.flatnonzero(np.isin(job.gpus, mine)) // job.replica
                )
                self.e.add("stop", job.gpus[part], t, back, 1, "set")
                continue
            wait = float(rng.choice([20, 60, 300, 600])) if linger is None else linger
            self.s.kill(job, t, wait, mine, float(rng.uniform(200, 900)), back if back < self.f.end else None)

    def may_die(self, g: int, t: float) -> bool:
        job = self.s.at(g, t)
        return job is None or self.s.clear(job.gpus, t, job.end)

    def repair(self, node: int, gpu: int, t: float) -> None:
        """A GPU reset, or a reboot where nothing runs on the node: volatile counters start again."""
        if t >= self.f.end:
            return
        gap = float(self.rng.uniform(240, 720))
        if self.rng.random() < 0.6 and not self.s.on_node(node, t - gap - 60, t + 30):
            self.reboot(node, t - gap, gap)
        else:
            self.e.resets.append((t, np.array([gpu])))

    def reboot(self, node: int, t: float, gap: float) -> None:
        self.say(t, node, None, "lifecycle", "agent_stopped", "agent stopped: signal 15")
        for scope in ("lost_gpu_node", "lost_node", "lost_link_node"):
            self.e.add(scope, node, t, t + gap, 1.0, "set")
        self.e.resets.append((t + gap * 0.8, self.f.gpus(node)))
        self.e.resets_links.append((t + gap * 0.8, np.flatnonzero(self.f.l_node == node)))
        self.say(t + gap, node, None, "lifecycle", "agent_started", "agent started: version 0.9, boot new")

    def xid(self, t: float, g: int, code: int, text: str | None = None) -> None:
        n = int(self.f.g_node[g])
        job = self.s.at(g, t - 1)
        pid = job.pid + int(self.f.g_slot[g]) if job is not None else 0
        self.say(
            t, n, int(self.f.g_slot[g]), "xid", str(code), text or logs.xid(self.rng, code, int(self.f.g_slot[g]), pid)
        )

    # ---- precursors

    def precursor(self, g: int, t0: float, lead: float, sorts: list[str], until: float = 0.0) -> dict[str, Any]:
        """One in three begins before it breaks. `lead` seconds were reserved by the caller (0: none)."""
        if lead <= 0 or not sorts:
            return {}
        rng, e, s = self.rng, self.e, t0 - lead
        board, sort = self.f.board(g), str(rng.choice(sorts))
        if sort == "ecc":  # bursts of corrected errors, 0.05 to 2 per second
            e.add(
                "ecc_dram_corrected",
                g,
                s,
                t0,
                float(rng.uniform(0.05, 2)),
                "add",
                period=float(rng.uniform(60, 400)),
                duty=0.4,
            )
        elif sort == "remap" and board.remap:
            for t in np.sort(rng.uniform(s, t0, int(rng.integers(2, 6)))):
                e.bump("remapped_rows_corrected", t, g)
                e.bump("ecc_dram_corrected", t, g, int(rng.integers(3, 60)))
            s = min(t for t, i, _ in e.bumps["remapped_rows_corrected"] if i == g and t >= s)
            e.add("row_remap_pending", g, s, max(until, t0 + 1), 1, "set")
        elif sort == "link_errors" and board.nvlinks and has(self.f, "nvlink_crc_errors"):
            e.add("nvlink_crc_errors", g, s, t0, float(rng.uniform(0.3, 20)), "add", ramp=lead)
            e.add("nvlink_replays", g, s, t0, float(rng.uniform(0.1, 3)), "add", ramp=lead)
        elif sort == "link_errors":
            e.add("pcie_replays", g, s, t0, float(rng.uniform(0.1, 5)), "add", ramp=lead)
        elif sort == "heat":
            e.add("r_ds", g, s, t0, float(rng.uniform(1.5, 2.2)), "mul", ramp=lead)
        elif sort == "telemetry":
            e.add("lost_gpu", g, s, t0, float(rng.uniform(0.15, 0.6)), "set")
        else:
            return {}
        return {"precursor": sort, "precursor_start": s}

    def lead(self) -> float:
        return float(self.rng.uniform(900, 3000)) if self.rng.random() < 0.6 else 0.0

    # ---- stragglers

    def straggler(self, cause: str) -> bool:
        f, e, rng = self.f, self.e, self.rng
        t0, t1 = self.window(2400, 6000)
        loss = float(np.exp(rng.uniform(np.log(0.04), np.log(0.35))))

        def fits(job: Job) -> bool:
            b = f.board(int(job.gpus[0]))
            if cause == "nvlink":
                return b.nvlinks > 0 and job.prof[2] > 0.02
            if cause == "nic":
                return b.nics > 0 and job.prof[5] > 0.03 and f.opt["link_file"]
            if cause == "host":
                return len(np.unique(f.g_node[job.gpus])) > 1
            if cause == "pcie":
                return job.prof[3] > 0.012
            return True

        t1 = min(t1, f.end)
        job = self.sync_job(t0, t1, fits)
        if job is None:
            t1 = min(t0 + 1900, f.end)
            job = self.sync_job(t0, t1, fits)
        if job is None or t1 - t0 < 1500:
            return False
        gpus = [int(g) for g in rng.permutation(job.gpus) if self.free(int(f.g_node[g]), t0, t1)]
        if job.kind in ("pipe", "moe"):  # a light stage's slowness is hidden by the heavy one: take a heavy rank
            heavy = {int(g) for g in job.gpus[job.load >= 0.9 * job.load.max()]}
            gpus = [g for g in gpus if g in heavy]
        if not gpus:
            return False
        g = gpus[0]
        n = int(f.g_node[g])
        idx = f.gpus(n)[np.isin(f.gpus(n), job.gpus)] if cause == "host" else np.array([g])
        if cause == "nic":
            idx = np.flatnonzero((f.g_link == f.g_link[g]) & np.isin(np.arange(len(f.g_link)), job.gpus))
        ramp = (
            float(rng.uniform(120, 900))
            if rng.random() < 0.25 and cause in ("hbm", "unexplained", "nic", "nvlink", "host")
            else 0.0
        )
        if cause == "thermal":
            loss, ramp = float(rng.uniform(0.08, 0.3)), min(float(rng.choice([0, 600, 1800])), (t1 - t0) / 3)
        self._slow(cause, job, idx, t0, t1, ramp, loss)
        start = t0
        members = [(n, None)] if cause == "host" else [(n, g)]
        row = self.label("straggler", cause, start, t1, members)
        self.watch.append(
            {
                "t0": t0 + ramp,
                "t1": t1,
                "idx": idx,
                "with": 0.0,
                "free": 0.0,
                "net": cause == "nic",
                "label": row,
                "goal": loss,
            }
        )
        self.take(n, t0, t1)
        job.held.append((t0, t1, cause))
        return True

    def _slow(self, cause: str, job: Job, idx: np.ndarray, t0: float, t1: float, ramp: float, loss: float) -> None:
        """Effects of a straggler; their size is solved when it begins, from the state of the job then."""
        f, e, rng = self.f, self.e, self.rng
        g = int(idx[0])
        n, board, members = int(f.g_node[g]), f.board(g), job.gpus
        extra: list[tuple[Effect, Any]] = []  # what shows it: effect, function of the size

        def more(ph: Physics) -> tuple[int, float]:
            """The rank that counts, and the seconds it must lose."""
            last = ph.last
            others = np.setdiff1d(members, idx)
            lead = int(idx[np.argmax(last["own"][idx])])
            te = float(last["te"][lead])
            goal = (float(last["own"][others].max()) + te) / (1 - loss) - te
            raw = last["tc"][lead] + last["tm"][lead] + last["tx"][lead] + last["tp"][lead] + last["th_"][lead]
            return lead, max(goal * (1 - job.bubble) - float(raw), 0.01 * float(raw))

        def solve(ph: Physics) -> Any:
            last = ph.last
            k, d = more(ph)
            tc, x = float(last["tc"][k]), float(last["x"][k])
            x_new = max(0.3, x * tc / max(tc + d, 1e-9))  # 0: the job pauses as the fault begins
            dyn = float(np.interp(x_new, X, DYN))
            p = f.p
            peak = float(last["static"][k] + p["dyn"][k] * last["inten"][k] * dyn)
            if cause == "clock":
                size = round(x_new * p["fmax"][k] / p["fstep"][k]) * p["fstep"][k] / p["fmax"][k]
            elif cause == "power_cap":
                size = x_new if brake else max(0.3 * board.tdp, round(peak + 0.5 * p["mem_w"][k]))
            elif cause == "thermal":
                t_new = float(last["slow"][k] + last["te"][k]) / (1 - loss)
                hot = peak + float(p["static"][k]) * 0.35
                busy = (
                    (tc + d) / t_new * last["inten"][k] * dyn
                    + 0.5 * last["tm"][k] / t_new * dyn
                    + last["spin"][k] * last["te"][k] / t_new
                )
                mean = (
                    last["static"][k]
                    + 0.6 * p["static"][k]
                    + p["dyn"][k] * busy
                    + p["mem_w"][k] * min(1.0, 0.35 * (tc + d) + 0.95 * last["tm"][k])
                )
                need = (p["t_soft"][k] + 0.5 - last["air"][k] - hot * p["r_ds"][k]) / mean
                size = float(np.clip(need * (1.0 if board.liquid else 1.19) / p["r_sa"][k], 1.15, 12))
            elif cause == "hbm":
                size = max(0.2, float(last["tm"][k] / (last["tm"][k] + d)))
            elif cause == "pcie":
                want = float(last["tp"][k] / (last["tp"][k] + d))
                size = min((0.5, 0.25, 0.125, 0.0625), key=lambda r: abs(np.log(r / want)))
            elif cause == "nvlink":
                size = max(0.15, float(last["tx"][k] / (last["tx"][k] + d)))
            elif cause == "nic":
                te = float(last["te"][k])
                size = max(0.08, te / (te + (float(last["slow"][k]) + te) * loss / (1 - loss)))
                if rate_drop:
                    size = min((0.5, 0.25, 0.125), key=lambda r: abs(np.log(r / size)))
            elif cause == "host":
                size = float((last["th_"][k] + d) / last["th_"][k])
            else:
                size = float(p["eff"][k] * tc / (tc + d))
            for effect, how in extra:
                effect.amount = how(size)
            return size

        brake = cause == "power_cap" and rng.random() < 0.35 and has(f, "throttle_brake_us")
        rate_drop = cause == "nic" and rng.random() < 0.4
        target = {
            "clock": "clk",
            "power_cap": "brake" if brake else "cap",
            "thermal": "r_sa",
            "hbm": "hbm",
            "pcie": "pcie",
            "nvlink": "nvl",
            "nic": "nic",
            "host": "host",
            "unexplained": "eff",
        }[cause]
        op = "set" if cause in ("clock", "power_cap") else "mul"
        e.add(target, idx, t0, t1, None, op, ramp=ramp, solve=solve)
        if cause == "unexplained":
            e.all["eff"][-1].solve = lambda ph: solve(ph) / f.p["eff"][idx]
        if cause == "pcie":  # x16 that trained to fewer lanes, and below x4 to a lower generation too
            extra += [
                (e.add("pcie_width", g, t0, t1, None, "set"), lambda r: max(4, int(16 * r))),
                (e.add("pcie_generation", g, t0, t1, None, "set"), lambda r: board.pcie_gen - (r < 0.2) - (r < 0.1)),
            ]
            e.bump("pcie_replays", t0, g, int(rng.integers(1, 200)))
        if cause == "nvlink":
            if rng.random() < 0.5 and has(f, "nvlink_active_links"):
                extra.append(
                    (e.add("nvlink_active_links", g, t0, t1, None, "set"), lambda r: max(1, round(board.nvlinks * r)))
                )
            rate = float(np.exp(rng.uniform(np.log(0.5), np.log(300))))  # flits; one recovery costs milliseconds
            e.add("nvlink_crc_errors", g, t0, t1, rate, "add", ramp=ramp)
            e.add("nvlink_replays", g, t0, t1, rate * 0.4, "add", ramp=ramp)
            e.add("nvlink_recoveries", g, t0, t1, rate * 0.01, "add", ramp=ramp)
        if cause == "nic":
            link = int(f.g_link[g])
            if rate_drop:
                extra.append((e.add("rate_gbps", link, t0, t1, None, "set"), lambda r: board.nic_gbps * r))
            else:
                e.add("out_of_sequence", link, t0, t1, float(rng.uniform(2, 200)), "add", ramp=ramp)
                e.add("packet_sequence_errors", link, t0, t1, float(rng.uniform(2, 150)), "add", ramp=ramp)
                e.add("ack_timeouts", link, t0, t1, float(rng.uniform(0.02, 1)), "add", ramp=ramp)
                e.add("symbol_errors", link, t0, t1, float(rng.uniform(0.5, 50)), "add", ramp=ramp)
                e.add("rx_errors", link, t0, t1, float(rng.uniform(0.1, 5)), "add", ramp=ramp)
            e.add("tx_wait_share", link, t0, t1, float(rng.uniform(0.05, 0.3)), "add", ramp=ramp)
        if cause == "host":
            e.add("cpu_util_ratio", n, t0, t1, float(rng.uniform(0.25, 0.6)), "add", ramp=ramp)
            if rng.random() < 0.3:
                e.add("edac_corrected", n, t0, t1, float(rng.uniform(0.1, 5)), "add")
        if cause == "hbm" and rng.random() < 0.4:
            e.add("ecc_dram_corrected", g, t0, t1, float(rng.uniform(0.1, 5)), "add")

    # ---- hang

    def rank_stopped(self) -> bool:
        t0, t1 = self.window(1800, 2700)
        t1 = min(t1, t0 + 2700, self.f.end)  # NCCL's watchdog: 10 min by default, 30 and more in large jobs
        job = self.sync_job(
            t0, t1, lambda j: self.s.clear(j.gpus, t0, j.end) and self.free(int(self.f.g_node[j.gpus[0]]), t0, t1)
        )
        if job is None:
            return False
        ok = [g for g in self.rng.permutation(job.gpus) if self.free(int(self.f.g_node[g]), t0, t1)]
        if not ok:
            return False
        g = int(ok[0])
        self.e.add("stop", g, t0, t1, 1, "set")
        old_end, gpus = job.end, job.gpus
        job.phases.append((t0, t1, "hang", 1.0))
        job.end = min(old_end, t1)
        if old_end > t1 + 900:
            self.s.phases(self.s.make(gpus, job.kind, t1 + float(self.rng.uniform(120, 600)), old_end, like=job))
        job.held.append((t0, t1, "hang"))
        self.label("hang", "rank_stopped", t0, t1, [(int(self.f.g_node[g]), g)])
        self.take(self.f.g_node[job.gpus], t0, t1)
        return True

    # ---- thermal

    def cooling(self) -> bool:
        rng, lead = self.rng, self.lead()
        t0, t1 = self.window(2400, 7000, lead)
        g = self.gpu(t0 - lead, t1, lambda k: self.loaded(k, t0, t1))
        if g is None:
            return False
        job = self.s.at(g, t0)  # 10 to 60 %; a service at part load would hide less than a third
        factor = float(rng.uniform(1.32 if job is not None and job.kind == "infer" else 1.1, 1.6))
        ramp = float(rng.choice([0.0, rng.uniform(600, 3600)]))
        pre: dict[str, Any] = {}
        if lead:  # the paste creeps first, then it gives way
            self.e.add("r_sa", g, t0 - lead, t0, 1 + (factor - 1) * 0.4, ramp=lead)
            self.e.add("r_ds", g, t0 - lead, t0, 1 + (factor - 1) * 0.4, ramp=lead)
            pre, ramp = {"precursor": "heat", "precursor_start": t0 - lead}, 0.0
        self.e.add("r_sa", g, t0, t1, factor, ramp=ramp)
        self.e.add("r_ds", g, t0, t1, factor, ramp=ramp)
        self.take(self.f.g_node[g], t0 - lead, t1)
        self.label("thermal", "cooling", t0, t1, [(int(self.f.g_node[g]), g)], **pre, severity=round(factor - 1, 3))
        return True

    def hbm_heat(self) -> bool:
        t0, t1 = self.window(2400, 7000)
        g = self.gpu(t0, t1, lambda k: bool(self.f.p["hbm"][k]) and self.loaded(k, t0, t1))
        if g is None:
            return False
        factor, ramp = float(self.rng.uniform(3, 9)), float(self.rng.choice([0.0, 1800.0]))
        self.e.add("hbm_hot", g, t0, t1, float(self.rng.uniform(9, 20)), "add", ramp=max(ramp, 60))  # K on one stack
        self.e.add("r_hs", g, t0, t1, factor, ramp=ramp)
        self.take(self.f.g_node[g], t0, t1)
        self.label("thermal", "hbm", t0, t1, [(int(self.f.g_node[g]), g)], severity=round(factor - 1, 3))
        return True

    def fan(self) -> bool:
        t0, t1 = self.window(2400, 7000)
        f = self.f
        g = self.gpu(t0, t1, lambda k: not f.board(k).liquid and self.loaded(k, t0, t1))
        if g is None:
            return False
        n = int(f.g_node[g])
        left = float(self.rng.uniform(0.45, 0.72))  # one or two of 6 to 8 fans, or a wall of them at half speed
        self.e.add("flow", n, t0, t1, left)
        if self.rng.random() < 0.7:
            self.e.add("fans_failed", n, t0, t1, int(self.rng.integers(1, 3)), "add")
            self.e.add("fan_min", n, t0, t1, 0.0)
        else:
            self.e.add("fan_min", n, t0, t1, float(self.rng.uniform(0.3, 0.7)))
        self.take(n, t0, t1)
        self.label("thermal", "fan", t0, t1, [(n, None)], severity=round(1 / left**0.8 - 1, 3))
        return True

    def rack(self) -> bool:
        f, rng = self.f, self.rng
        t0, t1 = self.window(2400, 6000)
        for r in rng.permutation(int(f.node_rack.max()) + 1):
            nodes = np.flatnonzero(f.node_rack == r)
            if (
                2 <= len(nodes) <= max(2, 0.5 * len(f.nodes))
                and all(self.free(int(n), t0, t1) for n in nodes)
                and sum(self.loaded(int(f.first[n]), t0, t1) for n in nodes) >= len(nodes) * 0.5
            ):
                up, ramp = float(rng.uniform(7, 15)), float(rng.uniform(60, 1200))  # a door, a CRAC, a CDU valve
                self.e.add("rack", int(r), t0, t1, up, "add", ramp=ramp)
                self.take(nodes, t0, t1)
                self.label("thermal", "rack", t0, t1, [(int(n), None) for n in nodes], severity=round(up / 35, 3))
                return True
        return False

    # ---- memory

    def memory(self, cause: str) -> bool:
        f, e, rng, lead = self.f, self.e, self.rng, self.lead()
        t0, t1 = self.window(2000, 7000, lead)
        if cause in ("remap_failed", "sram_threshold"):
            t1 = f.end + 1  # stays until the board is replaced
        elif cause == "remaps_pile_up":
            t1 = max(t1, t0 + 3000)
        kills = cause in ("uncorrectable", "remap_failed") or (cause == "sram_threshold" and rng.random() < 0.5)
        needs_remap = cause in ("remap_failed", "remaps_pile_up", "sram_threshold")
        g = self.gpu(
            t0 - lead,
            t1,
            lambda k: (
                (f.board(k).remap or not needs_remap)
                and (cause != "ecc_storm" or self.loaded(k, t0, t1))
                and (cause != "sram_threshold" or f.board(k).tdp > 360)
                and (not kills or self.may_die(k, t0))
            ),
        )
        if g is None:
            return False
        n, board = int(f.g_node[g]), f.board(g)
        pre = self.precursor(
            g,
            t0,
            lead,
            ["ecc", "remap"] if board.remap and cause != "ecc_storm" else ["ecc"] if cause != "ecc_storm" else [],
            t1,
        )
        if cause == "ecc_storm":
            ramp = float(rng.choice([0.0, 1200.0]))
            rate = float(np.exp(rng.uniform(np.log(0.5), np.log(100))))  # a weak row under load: 1e3 to 1e5 an hour
            e.add(
                "ecc_dram_corrected",
                g,
                t0,
                t1,
                rate,
                "add",
                ramp=ramp,
                period=float(rng.choice([0, 90, 300])),
                duty=0.6,
            )
            for t in rng.uniform(t0, min(t1, f.end), int(rng.integers(0, 4))):
                self.xid(t, g, 92)
        elif cause == "uncorrectable":
            code = int(rng.choice([48, 94, 95])) if board.remap else 48
            e.bump("ecc_dram_uncorrected", t0, g, int(rng.integers(1, 3)))
            self.xid(t0 + 0.2, g, code)
            if board.remap:
                self.xid(t0 + 0.4, g, 63)
                e.bump("remapped_rows_uncorrected", t0, g)
                e.add("row_remap_pending", g, t0, t1, 1, "set")
            else:
                self.xid(
                    t0 + 0.4,
                    g,
                    63,
                    logs.head(0, 63, int(f.g_slot[g]))
                    + "Dynamic Page Retirement: New page retired, reboot to activate (0x00000000001f3a52).",
                )
            self.xid(t0 + 1.0, g, 154) if board.blackwell else None
            e.add("recovery_action", g, t0, t1, 1, "set")
        elif cause == "remap_failed":
            e.bump("ecc_dram_uncorrected", t0, g)
            e.add("row_remap_failed", g, t0, f.end + 1, 1, "set")
            e.add("remap_banks_none", g, t0, f.end + 1, 1, "add")
            e.add("recovery_action", g, t0, t1, 1, "set")
            self.xid(t0 + 0.2, g, 48)
            self.xid(t0 + 0.5, g, 64)
        elif cause == "remaps_pile_up":
            times = np.sort(rng.uniform(t0, min(t1, f.end), int(rng.integers(6, 20))))
            times[0] = t0
            for t in times:
                e.bump("remapped_rows_corrected" if rng.random() < 0.75 else "remapped_rows_uncorrected", t, g)
                e.bump("ecc_dram_corrected", t, g, int(rng.integers(5, 400)))
                e.add("remap_banks_max", g, t, f.end + 1, -int(rng.integers(1, 3)), "add")
                if rng.random() < 0.5:
                    self.xid(t + 0.3, g, 63)
            e.add("row_remap_pending", g, t0, t1, 1, "set")
        else:
            for t in np.sort(rng.uniform(t0, min(t1, f.end), int(rng.integers(3, 12)))):
                e.bump("ecc_sram_corrected", t, g, int(rng.integers(1, 5)))
            e.bump("ecc_sram_uncorrected", t0, g, int(rng.integers(1, 12)))
            e.add("sram_threshold_exceeded", g, t0, f.end + 1, 1, "set")
            if kills:
                self.xid(t0 + 0.2, g, 95)
        self.take(n, t0 - lead, t1)
        self.label("memory", cause, t0, t1, [(n, g)], **pre)
        if kills:
            self.die(g, t0, t1)
        if cause in ("uncorrectable", "ecc_storm"):
            self.repair(n, g, t1)
        return True

    # ---- links

    def link(self, cause: str) -> bool:
        f, e, rng, lead = self.f, self.e, self.rng, self.lead()
        t0, t1 = self.window(2000, 6600, lead)
        if cause == "nvlink":
            g = (
                self.gpu(t0 - lead, t1, lambda k: f.board(k).nvlinks > 0 and self.loaded(k, t0, t1))
                if has(f, "nvlink_crc_errors")
                else None
            )
            if g is None:
                return False
            pre = self.precursor(g, t0, lead, ["link_errors"])
            rate, ramp = float(np.exp(rng.uniform(np.log(1), np.log(500)))), float(rng.choice([0.0, 900.0]))
            e.add("nvlink_crc_errors", g, t0, t1, rate, "add", ramp=ramp)
            e.add("nvlink_replays", g, t0, t1, rate * 0.3, "add", ramp=ramp)
            e.add("nvlink_recoveries", g, t0, t1, max(0.003, rate * 0.005), "add", ramp=ramp)
            e.add("nvl_ber", g, t0, t1, 10 ** float(rng.uniform(-11, -8)), "set", ramp=1)
            if rng.random() < 0.3:
                e.add("nvlink_active_links", g, t0 + ramp, t1, f.board(g).nvlinks - int(rng.integers(1, 4)), "set")
                e.add("nvl", g, t0 + ramp, t1, 0.85)
                if not f.board(g).blackwell:
                    text = f"nvidia-nvswitch{int(rng.integers(0, 4))}: SXid (PCI:0000:c{int(rng.integers(1, 7))}:00.0): 20034, Fatal, Link {int(rng.integers(0, 64))} LTSSM Fault Up"
                    self.say(t0 + ramp + 0.2, int(f.g_node[g]), None, "sxid", "20034", text)
            self.take(f.g_node[g], t0 - lead, t1)
            self.label("link", cause, t0, t1, [(int(f.g_node[g]), g)], **pre)
            return True
        if cause in ("pcie_downgrade", "pcie_replays"):
            g = self.gpu(t0 - lead, t1, lambda k: self.loaded(k, t0, t1))
            if g is None:
                return False
            n, slot, pre = int(f.g_node[g]), int(f.g_slot[g]), {}
            if cause == "pcie_downgrade":
                pre = (
                    self.precursor(g, t0, lead, ["link_errors"])
                    if not f.board(g).nvlinks or not has(f, "nvlink_crc_errors")
                    else {}
                )
                width, gen = int(rng.choice([8, 8, 4, 1])), f.board(g).pcie_gen - int(rng.choice([0, 0, 1, 2]))
                e.add("pcie_width", g, t0, t1, width, "set")
                e.add("pcie_generation", g, t0, t1, max(1, gen), "set")
                e.add("pcie", g, t0, t1, max(0.05, width / 16 * 0.5 ** (f.board(g).pcie_gen - gen)))
                self.say(t0 + 0.1, n, slot, "kernel", "pcie", logs.pcie(rng, slot))
                e.bump("pcie_replays", t0, g, int(rng.integers(3, 500)))
            else:
                ramp, rate = float(rng.choice([0.0, 900.0])), float(np.exp(rng.uniform(np.log(0.5), np.log(60))))
                e.add("pcie_replays", g, t0, t1, rate, "add", ramp=ramp)
                e.add("pcie_aer_correctable", n, t0, t1, rate * 0.7, "add", ramp=ramp)
                for t in np.sort(rng.uniform(t0, min(t1, f.end), int(rng.integers(2, 12)))):
                    self.say(t, n, slot, "kernel", "aer", logs.aer(rng, slot))
            self.take(n, t0 - lead, t1)
            self.label("link", cause, t0, t1, [(n, g)], **pre)
            return True
        if not f.opt["link_file"]:
            return False
        if cause == "hot_switch":
            return self._hot_switch(t0, t1)
        ports = [int(p) for p in rng.permutation(len(f.l_node)) if self.free(int(f.l_node[p]), t0 - lead, t1)]
        for port in ports[:80]:
            n = int(f.l_node[port])
            served = np.flatnonzero(f.g_link == port)
            g = int(served[0])
            if cause == "ib_errors" and (f.roce or not has(f, "symbol_errors")):
                return False
            if cause == "port_down" and not self.may_die(g, t0):
                continue
            job = self.s.at(g, t0)
            if cause in ("congestion_port", "ib_flap") and not (
                job is not None and job.prof[5] > 0.02 and job.steady(t0, min(t0 + 1800, f.end))
            ):
                continue
            members = [(n, g)] if len(served) == 1 else [(n, None)]
            pre: dict[str, Any] = {}
            if cause != "ib_errors" and cause != "congestion_port" and lead:
                e.add(
                    "rx_errors" if f.roce else "symbol_errors",
                    port,
                    t0 - lead,
                    t0,
                    float(rng.uniform(0.5, 20)),
                    "add",
                    ramp=lead,
                )
                e.add(
                    "packet_sequence_errors" if f.roce else "local_integrity_errors",
                    port,
                    t0 - lead,
                    t0,
                    float(rng.uniform(0.02, 1)),
                    "add",
                    ramp=lead,
                )
                pre = {"precursor": "link_errors", "precursor_start": t0 - lead}
            dev = str(f.l_name[port])
            if cause == "port_down":
                e.add("link_up", port, t0, t1, 0, "set")
                e.bump("link_downed", t0, port)
                e.add("traffic", port, t0, t1, 0.0)
                self.say(t0 + 0.1, n, None, "kernel", "nic_link", logs.nic(dev, False))
                self.say(t1, n, None, "kernel", "nic_link", logs.nic(dev, True))
                self.die(g, t0 + 1, t1, linger=float(rng.uniform(60, 400)))
            elif cause == "ib_flap":
                t = t0
                while t < min(t1, f.end):
                    down = float(rng.uniform(2, 25))
                    e.add("link_up", port, t, t + down, 0, "set")
                    e.add("traffic", port, t, t + down, 0.1)
                    e.add("nic", served, t, t + down, 0.05)
                    e.bump("link_downed", t, port)
                    e.bump("link_error_recoveries", t, port, int(rng.integers(1, 4)))
                    self.say(t + 0.1, n, None, "kernel", "nic_link", logs.nic(dev, False))
                    self.say(t + down, n, None, "kernel", "nic_link", logs.nic(dev, True))
                    t += float(rng.uniform(60, 500))
            elif cause == "ib_errors":
                ramp, rate = float(rng.choice([0.0, 1200.0])), float(np.exp(rng.uniform(np.log(0.3), np.log(60))))
                e.add("symbol_errors", port, t0, t1, rate, "add", ramp=ramp)
                e.add("local_integrity_errors", port, t0, t1, rate * 0.1, "add", ramp=ramp)
                e.add("rx_errors", port, t0, t1, rate * 0.2, "add", ramp=ramp)
                e.add("link_error_recoveries", port, t0, t1, rate * 0.01, "add", ramp=ramp)
            else:
                self._congest(np.array([port]), t0, t1, float(rng.uniform(0.15, 0.5)), float(rng.uniform(0.5, 0.85)))
            self.take(n, t0 - lead, t1)
            self.label("link", cause, t0, t1, members, **pre)
            return True
        return False

    def _congest(self, ports: np.ndarray, t0: float, t1: float, wait: float, rel: float) -> None:
        """Credits run out for 15 to 50 % of the time; retries, and CNPs where the fabric is RoCE."""
        e, rng, f = self.e, self.rng, self.f
        spread = rng.lognormal(0, 0.25, len(ports))
        e.add("tx_wait_share", ports, t0, t1, wait * spread, "add")
        e.add("out_of_sequence", ports, t0, t1, float(rng.uniform(5, 200)) * spread, "add")
        e.add("packet_sequence_errors", ports, t0, t1, float(rng.uniform(2, 80)) * spread, "add")
        e.add("ack_timeouts", ports, t0, t1, float(rng.uniform(0.01, 0.3)) * spread, "add")
        if f.roce:
            e.add("tx_discards", ports, t0, t1, float(rng.uniform(0, 3)) * spread, "add")
            e.add("cnp_handled", ports, t0, t1, float(rng.uniform(500, 20000)) * spread, "add")
            e.add("cnp_sent", ports, t0, t1, float(rng.uniform(100, 5000)) * spread, "add")
        e.add("nic", np.flatnonzero(np.isin(f.g_link, ports)), t0, t1, rel)

    def _hot_switch(self, t0: float, t1: float) -> bool:
        f = self.f
        for leaf in self.rng.permutation(int(f.node_leaf.max()) + 1):
            nodes = np.flatnonzero(f.node_leaf == leaf)
            ports = np.flatnonzero(np.isin(f.l_node, nodes))
            if (
                len(nodes) < 2
                or len(nodes) > 0.6 * len(f.nodes)
                or not len(ports)
                or not all(self.free(int(n), t0, t1) for n in nodes)
            ):
                continue
            busy = sum(
                1
                for n in nodes
                if (j := self.s.at(int(f.first[n]), t0)) is not None and j.prof[5] > 0.02 and j.end > t0 + 1800
            )
            if busy < 2:
                continue
            some = ports[self.rng.random(len(ports)) < 0.85]
            self._congest(some, t0, t1, float(self.rng.uniform(0.1, 0.35)), float(self.rng.uniform(0.6, 0.9)))
            self.take(nodes, t0, t1)
            self.label("link", "hot_switch", t0, t1, [(int(n), None) for n in nodes])
            return True
        return False

    # ---- xid

    def fatal_xid(self) -> bool:
        f, e, rng, lead = self.f, self.e, self.rng, self.lead()
        t0, t1 = self.window(1800, 6000, lead)
        g = self.gpu(t0 - lead, t1, lambda k: self.may_die(k, t0))
        if g is None:
            return False
        n, slot, board = int(f.g_node[g]), int(f.g_slot[g]), f.board(g)
        codes = (
            [79, 79, 119, 62]
            + ([74, 74] if board.nvlinks and not board.blackwell else [])
            + ([145, 149, 149] if board.blackwell else [])
            + ([120, 95, 140] if board.remap else [48])
        )
        code = int(rng.choice(codes))
        sorts = {
            79: ["link_errors", "heat", "telemetry"],
            74: ["link_errors"],
            149: ["link_errors"],
            145: ["link_errors"],
            95: ["ecc", "remap"],
            48: ["ecc"],
            140: ["ecc"],
            119: ["telemetry"],
            120: ["telemetry"],
            62: ["heat", "telemetry"],
        }[code]
        if board.nvlinks and has(f, "nvlink_crc_errors") and code == 79:
            sorts = sorts[1:]
        if not self.loaded(g, t0 - lead, t0):
            sorts = [s for s in sorts if s != "heat"]
        pre = self.precursor(g, t0, lead, sorts, t1)
        self.xid(t0, g, code)
        for k in range(int(rng.integers(0, 3))):
            self.xid(t0 + 2.0 + 6 * k, g, code if code in (119, 74) else 45)
        if code == 79 or (code in (119, 62) and rng.random() < 0.5):
            e.add("lost_gpu", g, t0, t1, 1.0, "set")
            self.say(
                t0 + float(rng.uniform(1, 15)),
                n,
                slot,
                "lifecycle",
                "gpu_lost",
                f"GPU {slot} no longer answers: NVML error 15 (GPU is lost)",
            )
            self.say(t0 + 0.3, n, slot, "kernel", "nvrm", logs.nvrm(slot)) if code == 79 else None
            if t1 < f.end:
                self.say(t1, n, slot, "lifecycle", "gpu_back", f"GPU {slot} answers again")
        if code in (74, 145, 149):
            e.add("nvlink_active_links", g, t0, t1, board.nvlinks - 1, "set")
            e.bump("nvlink_recoveries", t0, g, 1)
            e.bump("nvlink_crc_errors", t0, g, int(rng.integers(10, 5000)))
        if code in (95, 48):
            e.bump("ecc_dram_uncorrected", t0, g, 1)
        if code == 140:
            e.bump("ecc_sram_uncorrected", t0, g, 1)
        e.add("recovery_action", g, t0, t1, 2 if code == 79 else 1, "set")
        if has(f, "recovery_action") and rng.random() < 0.6 and code != 79:
            self.xid(t0 + 1.5, g, 154)
        e.add("dead", g, t0, t1, 1, "set")
        self.take(n, t0 - lead, t1)
        self.label("xid", f"xid_{code}", t0, t1, [(n, g)], **pre)
        self.die(g, t0, t1)
        self.repair(n, g, t1)
        return True

    # ---- liveness

    def liveness(self, cause: str) -> bool:
        f, e, rng = self.f, self.e, self.rng
        t0, t1 = self.window(1800, 6000)
        if cause == "rack_power":
            for r in rng.permutation(int(f.node_rack.max()) + 1):
                nodes = np.flatnonzero(f.node_rack == r)
                gpus = np.flatnonzero(np.isin(f.g_node, nodes))
                if (
                    2 <= len(nodes) <= 0.4 * len(f.nodes)
                    and all(self.free(int(n), t0, t1) for n in nodes)
                    and all(self.may_die(int(g), t0) for g in gpus)
                ):
                    for n in nodes:
                        self._dark(int(n), t0, t1)
                    self.die(gpus, t0, t1, linger=120.0)
                    self.take(nodes, t0, t1)
                    self.label("liveness", cause, t0, t1, [(int(n), None) for n in nodes])
                    return True
            return False
        g = self.gpu(
            t0,
            t1,
            lambda k: (
                cause == "clock_wrong"
                or all(self.may_die(int(q), t0) for q in (f.gpus(int(f.g_node[k])) if cause != "gpu_lost" else [k]))
            ),
        )
        if g is None:
            return False
        n, slot = int(f.g_node[g]), int(f.g_slot[g])
        members: list[tuple[int, int | None]] = [(n, None)]
        if cause == "silent":
            off = bool(rng.random() < 0.6)
            self._dark(n, t0, t1, off)
            if off:
                self.die(f.gpus(n), t0, t1, linger=120.0)
        elif cause == "gpu_lost":
            members = [(n, g)]
            e.add("lost_gpu", g, t0, t1, 1.0, "set")
            e.add("dead", g, t0, t1, 1, "set")
            if rng.random() < 0.7:
                self.say(
                    t0 + float(rng.uniform(1, 12)),
                    n,
                    slot,
                    "lifecycle",
                    "gpu_lost",
                    f"GPU {slot} no longer answers: NVML error 15 (GPU is lost)",
                )
                self.say(t1, n, slot, "lifecycle", "gpu_back", f"GPU {slot} answers again")
            self.die(g, t0, t1)
        elif cause == "driver_hung":
            e.add("lost_gpu", f.gpus(n), t0, t1, 1.0, "set")
            e.add("nvml_hung", n, t0, t1, 1, "set")
            e.add("cpu_util_ratio", n, t0, t1, 0.05, "add")
            self.say(t0 + 30, n, None, "lifecycle", "driver_hung", "calls into the driver do not return for 30 s")
            self.say(
                t0 + 122,
                n,
                None,
                "kernel",
                "hung_task",
                "INFO: task nvidia-smi:%d blocked for more than 120 seconds." % rng.integers(2000, 99999),
            )
            self.say(t1, n, None, "lifecycle", "driver_back", "the driver answers again")
            self.die(f.gpus(n), t0, t1)
        else:
            off = float(rng.choice([-1, 1]) * np.exp(rng.uniform(np.log(7), np.log(240))))
            e.add("clock_off", n, t0, t1, off, "add")
            self.say(t0 + 20, n, None, "lifecycle", "clock_wrong", f"the node's clock is {off:+.1f} s off")
        self.take(n, t0, t1)
        begins = t0 + min(off, 0.0) if cause == "clock_wrong" else t0  # rows carry the node's own time
        self.label("liveness", cause, begins, t1, members)
        return True

    def _dark(self, n: int, t0: float, t1: float, dies: bool = True) -> None:
        for scope in ("lost_gpu_node", "lost_node", "lost_link_node"):
            self.e.add(scope, n, t0, t1, 1.0, "set")
        if not dies:
            return  # only the agent or its network is gone; the jobs go on
        self.e.add("dead", self.f.gpus(n), t0, t1, 1, "set")
        if t1 < self.f.end:
            self.e.resets.append((t1 - 1, self.f.gpus(n)))
            self.e.resets_links.append((t1 - 1, np.flatnonzero(self.f.l_node == n)))
            self.say(t1, n, None, "lifecycle", "agent_started", "agent started: version 0.9, boot new")

    # ---- drift and idle

    def drift(self, cause: str) -> bool:
        """Something set differently from its peers, from the start or since a reboot during the case."""
        f, e, rng = self.f, self.e, self.rng
        if not f.opt["inventory"]:
            return False
        mid = rng.random() < 0.5
        t0 = float(rng.uniform(0.1, 0.7) * f.end) if mid else 0.0
        end = f.end + 1
        peers = np.bincount(f.node_pool)[f.node_pool]
        need_load = cause in ("power_limit", "clock_limit")
        g = self.gpu(
            t0, end, lambda k: peers[f.g_node[k]] >= 4 and (not need_load or not mid or self.loaded(k, t0, end))
        )
        if g is None:
            return False
        n, slot, board = int(f.g_node[g]), int(f.g_slot[g]), f.board(g)
        whole = cause == "driver" or rng.random() < 0.35
        gpus = f.gpus(n) if whole else np.array([g])
        facts: dict[str, str] = {}
        if cause in ("driver", "vbios") and mid and self.s.on_node(n, t0 - 900, t0 + 5):
            mid, t0 = False, 0.0  # a driver or VBIOS changes only with a reboot; here the node was busy
            if not self.free(n, t0, end):
                return False
        if cause == "driver":
            old = f.drivers[n]
            facts["driver_version"] = str(
                rng.choice([d for d in ("535.161.08", "550.90.07", "570.86.15", "575.57.08") if d != old])
            )
            e.add("eff", gpus, t0, end, float(rng.uniform(0.96, 0.995)))
        for q in gpus:
            key = f"gpu{f.g_slot[q]}."
            if cause == "vbios":
                facts[key + "vbios"] = str([v for v in (*board.vbios, "96.00.30.00.01") if v != f.g_vbios[q]][0])
                e.add("r_sa", q, t0, end, 1.03)
            elif cause == "power_limit":
                watts = round(float(f.p["cap"][q] * rng.uniform(0.6, 0.88))) if q == gpus[0] else watts
                facts[key + "power_limit_set_w"] = str(watts)
                e.add("cap", q, t0, end, watts, "set")
            elif cause == "clock_limit":
                mhz = int(board.fmax * rng.uniform(0.55, 0.85) // 15 * 15) if q == gpus[0] else mhz
                facts[key + "sm_clock_max_mhz"] = str(mhz)
                e.add("clk", q, t0, end, mhz / board.fmax, "set")
            elif cause == "ecc_mode":
                facts[key + "ecc_mode"] = "disabled"
                e.add("ecc_off", q, t0, end, 1, "set")
        if mid and cause in ("driver", "vbios"):
            self.reboot(n, t0 - 400, 400)
        self.inventory.append((t0, n, facts))
        self.take(n, t0, end)
        for job in self.s.on_node(n, t0, end):
            if need_load and job.sync:
                job.held.append((max(t0, job.start), job.end, cause))
        self.label("drift", cause, t0, None, [(n, None)] if whole else [(n, g)])
        return True

    def idle_held(self) -> bool:
        """A job that keeps its memory and does nothing: a notebook over lunch, a service without requests."""
        f, rng = self.f, self.rng
        length = float(rng.uniform(0.45, 0.9)) * f.end
        t0 = float(rng.uniform(0.02, 0.98) * (f.end - length))
        t1 = f.end + 1 if rng.random() < 0.5 else t0 + length
        for k in rng.permutation(len(self.s.jobs)):
            job = self.s.jobs[k]
            nodes = np.unique(f.g_node[job.gpus])
            if (
                job.kind == "bench"
                or len(nodes) > 3
                or not (job.start + 600 < t0 and job.end > min(t1, f.end))
                or job.held
                or not all(self.free(int(n), t0, t1) for n in nodes)
            ):
                continue
            job.phases.append((t0, t1, "gone", 1.0))
            job.held.append((t0, t1, "held"))
            self.take(nodes, t0, t1)
            self.label("idle", "held", t0, t1, [(int(f.g_node[g]), int(g)) for g in job.gpus])
            return True
        return False

    # ---- all

    def faults(self, count: int) -> None:
        menu = (
            [
                ("straggler", c)
                for c in ("thermal", "power_cap", "clock", "hbm", "pcie", "nvlink", "nic", "host", "unexplained")
            ]
            + [("hang", "rank_stopped")]
            + [("thermal", c) for c in ("cooling", "fan", "rack", "hbm", "cooling")]
            + [
                ("memory", c)
                for c in ("ecc_storm", "uncorrectable", "remap_failed", "remaps_pile_up", "sram_threshold")
            ]
            + [
                ("link", c)
                for c in (
                    "port_down",
                    "ib_flap",
                    "ib_errors",
                    "nvlink",
                    "pcie_downgrade",
                    "pcie_replays",
                    "congestion_port",
                    "hot_switch",
                )
            ]
            + [("xid", "fatal")] * 4
            + [("liveness", c) for c in ("silent", "gpu_lost", "driver_hung", "rack_power", "clock_wrong")]
            + [("drift", c) for c in ("driver", "vbios", "power_limit", "clock_limit", "ecc_mode")]
            + [("idle", "held")] * 2
        )
        order = [menu[i] for _ in range(8) for i in self.rng.permutation(len(menu))]
        placed = 0
        for kind, cause in order:
            if placed >= count:
                break
            done = False
            for _ in range(4):
                done = {
                    "straggler": lambda: self.straggler(cause),
                    "hang": self.rank_stopped,
                    "thermal": {"cooling": self.cooling, "fan": self.fan, "rack": self.rack, "hbm": self.hbm_heat}.get(
                        cause, self.cooling
                    ),
                    "memory": lambda: self.memory(cause),
                    "link": lambda: self.link(cause),
                    "xid": self.fatal_xid,
                    "liveness": lambda: self.liveness(cause),
                    "drift": lambda: self.drift(cause),
                    "idle": self.idle_held,
                }[kind]()
                if done:
                    break
            placed += done
