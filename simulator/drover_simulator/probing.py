"""Answer probe requests for simulated nodes, with figures from the physics of the fleet and its faults.

Values of healthy boards are from data sheets and public measurements, as in
`drover_collector.probes.judging.references`. Board, speed and faults of each unit are those of the fleet. A figure is
what the board would reach now with nothing else running.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from drover_agent.probes import PROBES, Level, of_level
from drover_core.model.events import Member, ProbeResult
from drover_proto import telemetry_pb2 as pb
from drover_simulator.fleet import SimulatedFleet

# SKU -> bf16 TFLOP/s at the highest clock, copy in HBM in GB/s (read plus written).
_PEAKS = {"H100-SXM": (960.0, 2950.0), "H200-SXM": (960.0, 4300.0), "A100-SXM": (300.0, 1730.0)}
_GEMM = {"gemm_bf16": 1.0, "gemm_fp16": 0.98, "gemm_fp8": 1.8, "gemm_tf32": 0.5, "gemm_fp32": 0.065, "gemm_fp64": 0.067}
_PCIE = {"pcie_h2d": 0.87, "pcie_d2h": 0.87, "pcie_both": 1.6}  # of one direction's raw rate
_NVLINK = {"p2p": 0.80, "allreduce": 0.85, "allgather": 0.85, "alltoall": 0.75}  # of all links' raw rate
_LAUNCH = {"launch": 4.5, "launch_wait": 11.0}  # us
_NODE = {"host_memory": 350.0, "disk_write": 3.0, "disk_read": 6.0, "disk_random": 400_000.0}
_WRONG = {"sdc": "1 product differs", "memory_pattern": "1 word differs", "train_step": "the loss differs"}
_UNSUPPORTED = "unsupported: no simulated board has it"
_NEED_RESET = frozenset({("xid", "uncontained_ecc")})  # the driver creates no context on such a GPU
_BAD_ROWS = frozenset({("memory", "row_remap_failure"), ("memory", "uncorrectable")})  # still in use
REPEATS = 5
REPEAT_SD = 0.002  # from run to run
HBM_UNIT_SD = 0.004  # between units

Figure = tuple[int | None, int | None, float | None, bool | None]  # slot, the other of a pair, value, right


class Prober:
    """Answers for all nodes of a fleet. The same request gets the same figures.

    Args:
        corrupting: (node, slot) of GPUs that compute a wrong product at times, in addition to the fleet's faults.
    """

    def __init__(self, fleet: SimulatedFleet, seed: int, corrupting: Collection[Member] = ()) -> None:
        self._fleet, self._seed, self._corrupting = fleet, seed, frozenset(corrupting)

    def answer(self, node: str, request: pb.ProbeRequest) -> list[ProbeResult]:
        """Return all results of a request, the closing one last, as the probe service of the node would."""
        level = request.level or Level.QUICK.value
        base = ProbeResult("", node, None, "", self._fleet.now_ms, None, None, "", request=request.id, level=level)
        n = self._fleet.hardware.number[node]
        base = replace(base, device=self._fleet.hardware.sku_of_node[n].model)
        first, count = int(self._fleet.hardware.first_gpu[n]), self._fleet.spec.nodes[n].gpus
        held = {slot: job for slot in range(count) if (job := self._job(first + slot)) is not None}
        why_not = self._left_out(first, count)
        asked = list(request.gpus) or [slot for slot in range(count) if slot not in held and slot not in why_not]
        names = list(request.probes) or ([p.name for p in of_level(Level(level))] if level in list(Level) else [])
        if self._fleet.modifiers.hung[n]:
            return [
                _closing(base, "refused", "the NVIDIA driver does not say which GPUs there are: it does not answer")
            ]
        if refusal := self._refusal(names, asked, held, why_not, count):
            return [_closing(base, "refused", refusal)]
        rng = np.random.default_rng([self._seed, zlib.crc32(request.id.encode())])
        found: list[ProbeResult] = []
        for name in names:
            for gpu, peer, value, ok in self._figures(name, n, asked, rng):
                measured = None if value is None else value * (1 + REPEAT_SD * float(rng.standard_normal()))
                detail = _WRONG[name] if ok is False else _UNSUPPORTED if value is None else ""
                once = ok is not None or value is None
                result = replace(
                    base, id=f"{request.id}/{len(found)}", gpu=gpu, peer=peer, probe=name, value=measured, ok=ok,
                    unit=PROBES[name].unit, repeats=1 if once else REPEATS, spread=None if once else REPEAT_SD,
                    detail=detail,
                )  # fmt: skip
                found.append(result)
        detail = "" if request.gpus else "; ".join(f"left out: GPU {slot}: {why}" for slot, why in why_not.items())
        return [*found, replace(_closing(base, "done", detail), seconds=float(len(names)))]

    def _left_out(self, first: int, count: int) -> dict[int, str]:
        """Return slot -> why the driver cannot use the GPU."""
        mod, why = self._fleet.modifiers, {}
        for slot in range(count):
            if mod.lost[first + slot]:
                why[slot] = "the driver says of it: GPU is lost"
            elif not _NEED_RESET.isdisjoint(self._fleet.faults_on(first + slot)):
                why[slot] = "the driver says of it: GPU requires reset"
        return why

    def _job(self, gpu: int) -> str | None:
        steps = self._fleet.steps
        return steps.name_of(int(steps.job_of[gpu]))

    def _refusal(
        self, names: list[str], asked: list[int], held: dict[int, str], why_not: dict[int, str], count: int
    ) -> str:
        if unknown := [name for name in names if name not in PROBES]:
            return f"no probe is called {unknown[0]!r}"
        if not names:
            return "no such level"
        if missing := [slot for slot in asked if slot >= count]:
            return f"GPU {missing[0]}: there is none"
        if busy := [slot for slot in asked if slot in held]:
            return f"GPU {busy[0]}: held by job {held[busy[0]]}"
        if lost := [slot for slot in asked if slot in why_not]:
            return f"GPU {lost[0]}: {why_not[lost[0]]}"
        if not asked and why_not:
            return "; ".join(f"GPU {slot}: {why}" for slot, why in why_not.items())
        return "" if asked else "no GPU is free"

    def _figures(self, name: str, n: int, slots: list[int], rng: np.random.Generator) -> Iterator[Figure]:
        fleet, hw, mod = self._fleet, self._fleet.hardware, self._fleet.modifiers
        first = int(hw.first_gpu[n])
        g = np.array([first + slot for slot in slots])
        everyone = np.ones(hw.gpus)
        clock = fleet.physics.clock_for(everyone, everyone.astype(bool), mod)[g]
        clock = np.minimum(clock, fleet.physics.coolable_clock(float(fleet.node_columns()["inlet_temp_c"][n]), mod)[g])
        bf16, hbm = _PEAKS[hw.sku_of_node[n].name]
        links = (mod.nvlink_speed * (1 - mod.nvlinks_down / np.maximum(hw.nvlinks, 1)) * hw.nvlink_bytes_per_s / 1e9)[g]
        bad = [(hw.names[n], slot) in self._corrupting or bool(mod.corrupting[first + slot]) for slot in slots]
        idle_host = 1 - float(mod.host_busy[n])
        if name in _GEMM:
            yield from _each(slots, (_GEMM[name] * bf16 * clock * hw.speed[g]).tolist())
        elif name.startswith("hbm"):
            unit = 1 + HBM_UNIT_SD * np.random.default_rng([self._seed, 31]).standard_normal(hw.gpus)[g]
            yield from _each(slots, (hbm * mod.memory_speed[g] * unit).tolist())
        elif name in _PCIE:
            rate = _PCIE[name] * hw.pcie_bytes_per_s[g] / 1e9 * mod.pcie_speed()[g]
            yield from _each(slots, rate.tolist())
        elif name == "p2p":
            for i, a in enumerate(slots):
                for j, b in enumerate(slots):
                    if i != j:
                        yield a, b, _NVLINK[name] * float(min(links[i], links[j])), None
        elif name in _NVLINK:
            if len(slots) > 1:
                yield None, None, _NVLINK[name] * float(links.min()), None
        elif name in _NODE:
            yield None, None, _NODE[name] * idle_host, None
        elif name in ("sdc", "memory_pattern"):
            size = 1e6 if name == "sdc" else 0.9 * float(hw.memory_bytes[first])
            if name == "memory_pattern":
                rows = [not _BAD_ROWS.isdisjoint(fleet.faults_on(first + slot)) for slot in slots]
                bad = [wrong or row for wrong, row in zip(bad, rows, strict=True)]
            yield from ((slot, None, size, not wrong) for slot, wrong in zip(slots, bad, strict=True))
        elif name in _LAUNCH:
            yield from (
                (slot, None, _LAUNCH[name] * (1 + 0.03 * abs(float(rng.standard_normal()))), None) for slot in slots
            )
        elif name == "train_step":
            speed = 2e5 * float((clock * hw.speed[g]).min())  # sharded over all: as fast as the slowest
            yield (None if len(slots) > 1 else slots[0]), None, speed, not any(bad)
        elif name == "soak":
            yield from _each(slots, (hw.resistance * mod.resistance)[g].tolist())
        else:  # such as FP4, which Hopper's tensor cores lack
            yield from ((slot, None, None, None) for slot in slots)


def _each(slots: list[int], values: list[float]) -> Iterator[Figure]:
    return ((slot, None, value, None) for slot, value in zip(slots, values, strict=True))


def _closing(base: ProbeResult, end: str, detail: str) -> ProbeResult:
    return replace(base, id=f"{base.request}/end", end=end, detail=detail)
