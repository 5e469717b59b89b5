"""Every fault leaves its signature and its label; what is drawn can be judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from drover_core.model.fleet import FleetSpec
from drover_core.times import from_iso
from drover_simulator.effects import EFFECTS
from drover_simulator.fault import Fault, FaultsError
from drover_simulator.faults import (
    demo_faults,
    draw_faults,
    dump_faults,
    load_faults,
)
from drover_simulator.fleet import SimulatedFleet, build_fleet
from drover_simulator.kinds import KINDS
from drover_simulator.workload import planned_jobs

START_MS = 1_767_225_600_000
SPEC = build_fleet(16, 3)
ONSET_S, END_S = 65.0, 565.0


class Seen:
    """A fleet before and after one fault hit the first node of its largest job; means over time."""

    def __init__(self, kind: str, cause: str) -> None:
        self.job = max(SimulatedFleet(SPEC, 3, [], START_MS).jobs, key=lambda j: len(j.members))
        self.node = self.job.members[0][0]
        row = KINDS[kind, cause]
        slot = 2 if row.scope == "gpu" else None
        middle = sum(row.severity) / 2
        fault = Fault(kind, cause, self.node, slot, ONSET_S, END_S, middle, row.ramp_s)
        self.fleet = SimulatedFleet(SPEC, 3, [fault], START_MS)
        hardware = self.fleet.hardware
        first = int(hardware.first_gpu[hardware.number[self.node]])
        self.gpu = first + (slot or 0)
        members = self.fleet.steps.gpus_of(self.job.id)
        self.peers = members[hardware.gpu_node[members] != hardware.gpu_node[self.gpu]]
        self.links = np.flatnonzero(hardware.link_node == hardware.gpu_node[self.gpu])
        self.members = members
        self.events = []
        self.before = self._mean(60.0)
        self._mean(65.0 + row.ramp_s - 60.0)
        self.soon = self._mean(45.0)  # before a job that hangs is ended
        self.after = self._mean(100.0)

    def _mean(self, seconds: float) -> dict[str, npt.NDArray[np.float64]]:
        rows = []
        for _ in range(round(seconds / 5)):
            self.fleet.step(5.0)
            self.events += self.fleet.take_events()
            rows.append({**self.fleet.gpu_columns(), **self.fleet.node_columns(), **self.fleet.link_columns()[1]})
        return {name: np.array([row[name] for row in rows]).mean(axis=0) for name in rows[0]}

    def gpu_to_peers(self, metric: str) -> float:
        return float(self.soon[metric][self.gpu] / np.median(self.soon[metric][self.peers]))

    def grown(self, metric: str, where: object = None) -> float:
        index = self.gpu if where is None else where
        return float(np.max(self.after[metric][index] - self.before[metric][index]))

    def xids(self) -> list[tuple[str, int | None, str]]:
        return [(e.node, e.gpu, e.code) for e in self.events if e.kind == "xid"]

    def has_xid(self, *codes: str) -> bool:
        return all((self.node, 2, code) in self.xids() for code in codes)

    def slowed(self) -> bool:
        """The job's peers compute for a smaller share of the time."""
        return bool(
            np.median(self.soon["tensor_active_ratio"][self.peers])
            < 0.97 * np.median(self.before["tensor_active_ratio"][self.peers])
        )

    def crashed(self) -> bool:
        job = next(j for j in self.fleet.jobs if j.id == self.job.id)
        return job.end_ms is not None

    def gone(self) -> bool:
        return bool(np.isnan(self.soon["power_w"][self.gpu]) and not np.isnan(self.soon["power_w"][self.gpu + 1]))


def hot(s: Seen) -> bool:
    return s.gpu_to_peers("gpu_temp_c") > 1.2 and s.soon["thermal_margin_c"][s.gpu] < 8


SIGNATURES: dict[tuple[str, str], Callable[[Seen], bool]] = {
    ("straggler", "power_cap"): lambda s: (
        s.slowed() and s.gpu_to_peers("sm_clock_mhz") < 0.9 and s.soon["power_limit_w"][s.gpu] < 650
    ),
    ("straggler", "clock"): lambda s: (
        s.slowed() and s.gpu_to_peers("sm_clock_mhz") < 0.9 and s.soon["power_limit_w"][s.gpu] == 700
    ),
    ("straggler", "thermal"): lambda s: s.slowed() and hot(s) and s.gpu_to_peers("sm_clock_mhz") < 0.98,
    ("straggler", "hbm"): lambda s: (
        s.slowed()
        and s.gpu_to_peers("memory_clock_mhz") < 0.7
        and s.gpu_to_peers("dram_active_ratio") < 0.9
        and s.gpu_to_peers("sm_active_ratio") > 1.03
    ),
    ("straggler", "pcie"): lambda s: (
        s.slowed()
        and s.soon["pcie_width"][s.gpu] < 16
        and s.grown("pcie_replays") > 50
        and s.gpu_to_peers("gpu_util_ratio") < 0.97
    ),
    ("straggler", "nvlink"): lambda s: (
        s.slowed() and s.soon["nvlink_active_links"][s.gpu] < 18 and s.gpu_to_peers("nvlink_tx_bytes_per_s") < 0.9
    ),
    ("straggler", "nic"): lambda s: (
        s.slowed() and s.soon["rate_gbps"][s.links].min() < 300 and s.grown("out_of_sequence", s.links) > 100
    ),
    ("straggler", "host"): lambda s: (
        s.slowed() and s.gpu_to_peers("gpu_util_ratio") < 0.97 and s.soon["cpu_util_ratio"][0] > 0.6
    ),
    ("hang", "rank_stopped"): lambda s: (
        s.soon["gpu_util_ratio"][s.gpu] < 0.05
        and np.median(s.soon["gpu_util_ratio"][s.peers]) > 0.97
        and np.median(s.soon["power_w"][s.peers]) < 0.6 * np.median(s.before["power_w"][s.peers])
        and np.median(s.soon["tensor_active_ratio"][s.peers]) < 0.01
    ),
    ("thermal", "cooling"): lambda s: hot(s) and s.grown("throttle_thermal_sw_us") > 1e6,
    ("thermal", "fan"): lambda s: all(
        s.soon["gpu_temp_c"][g] > s.before["gpu_temp_c"][g] + 8 for g in range(s.gpu, s.gpu + 8)
    ),
    ("memory", "row_remap_failure"): lambda s: (
        s.has_xid("64") and s.after["row_remap_failed"][s.gpu] == 1 and not s.crashed()
    ),
    ("memory", "uncorrectable"): lambda s: (
        s.has_xid("48", "63", "94") and s.after["row_remap_pending"][s.gpu] == 1 and s.crashed()
    ),
    ("memory", "ecc_storm"): lambda s: s.grown("ecc_dram_corrected") > 10_000,
    ("link", "nvlink"): lambda s: (
        s.has_xid("74") and s.grown("nvlink_crc_errors") > 1_000 and s.soon["nvlink_active_links"][s.gpu] < 18
    ),
    ("link", "ib_flap"): lambda s: (
        s.grown("link_downed", s.links) >= 1
        and min(s.soon["link_up"][s.links].min(), s.after["link_up"][s.links].min()) < 1
    ),
    ("xid", "fallen_off_bus"): lambda s: s.has_xid("79", "154") and s.gone() and s.crashed(),
    ("xid", "gsp_timeout"): lambda s: s.has_xid("119", "154") and s.gone() and s.crashed(),
    ("xid", "uncontained_ecc"): lambda s: s.has_xid("95") and s.grown("ecc_sram_uncorrected") > 0 and s.crashed(),
    ("liveness", "silent"): lambda s: (
        bool(np.isnan(s.soon["power_w"][s.gpu : s.gpu + 8]).all())
        and bool(np.isnan(s.soon["load1"][0]))
        and s.node in s.fleet.silent_nodes()
        and not any(e.node == s.node for e in s.events)
        and s.crashed()
    ),
    ("liveness", "gpu_lost"): lambda s: (
        s.gone() and "gpu_lost" in [e.code for e in s.events] and not s.has_xid("79") and s.crashed()
    ),
    ("liveness", "driver_hung"): lambda s: (
        bool(np.isnan(s.soon["power_w"][s.gpu : s.gpu + 8]).all())
        and not np.isnan(s.soon["load1"][0])
        and "driver_hung" in [e.code for e in s.events]
        and not s.crashed()
    ),
    ("xid", "application"): lambda s: (
        {node for node, _, _ in s.xids()} == {n for n, _ in s.job.members}
        and {code for _, _, code in s.xids()} <= {"13", "31", "43", "45"}
        and s.crashed()
    ),
    ("straggler", "workload"): lambda s: (
        s.slowed()
        and float(np.ptp(s.soon["tensor_active_ratio"][s.members]))
        > 2 * float(np.ptp(s.before["tensor_active_ratio"][s.members]))
        and float(np.ptp(s.soon["sm_clock_mhz"][s.members])) < 200
    ),
    ("hang", "data_stall"): lambda s: bool(np.all(s.soon["gpu_util_ratio"][s.members] < 0.6)) and not s.crashed(),
    ("straggler", "planned_power_cap"): lambda s: bool(
        np.all(s.soon["power_limit_w"][:64] < 600)
        and np.all(s.soon["power_w"][s.members] < s.before["power_w"][s.members] - 50)
        and np.median(s.soon["sm_clock_mhz"][s.members]) < 0.95 * np.median(s.before["sm_clock_mhz"][s.members])
    ),
    ("sdc", "wrong_results"): lambda s: not s.slowed(),  # only a probe shows it: test_simulated_probes.py
    ("thermal", "inlet"): lambda s: bool(np.all(s.soon["inlet_temp_c"][:8] > s.before["inlet_temp_c"][:8] + 6)),
}


def test_every_kind_has_its_effect_and_its_signature() -> None:
    assert set(EFFECTS) == set(KINDS) == set(SIGNATURES)


@pytest.mark.parametrize(("kind", "cause"), list(KINDS))
def test_signature_and_label(kind: str, cause: str) -> None:
    seen = Seen(kind, cause)
    assert SIGNATURES[kind, cause](seen)
    assert [(label.kind, label.cause, label.node) for label in seen.fleet.labels] == [(kind, cause, seen.node)]
    label = seen.fleet.labels[0].to_dict()
    assert label["hardware"] is KINDS[kind, cause].hardware
    assert from_iso(label["start"]) == START_MS + 65_000 and from_iso(label["end"]) == START_MS + 565_000
    expected = {
        "gpu": [[seen.node, 2]],
        "node": [[seen.node, None]],
        "rack": [[f"r01n{n:02d}", None] for n in range(1, 9)],
        "job": [[node, None] for node in dict.fromkeys(node for node, _ in seen.job.members)],
    }
    assert label["members"] == expected[label["scope"]]


def test_xid_79_in_the_order_of_the_field() -> None:
    seen = Seen("xid", "fallen_off_bus")
    mine = [e for e in seen.events if e.node == seen.node]
    assert (
        mine[0].message
        == ("NVRM: Xid (PCI:0000:3a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
        or mine[0].code == "aer"
    )
    assert [e.id for e in mine] == [f"{seen.node}/sim/{n}" for n in range(1, len(mine) + 1)]
    crash = [e for e in seen.events if e.code in ("43", "45")]
    assert {e.node for e in crash} == {node for node, _ in seen.job.members}
    assert min(e.ts_ms for e in crash) >= START_MS + 65_000 + 60_000
    while seen.fleet.now_s < 400:
        seen.fleet.step(10)
    again = next(j for j in seen.fleet.jobs if j.id == seen.job.id + "r1")
    assert {n for n, _ in again.members} == {n for n, _ in seen.job.members} - {seen.node}
    while seen.fleet.now_s < 600:
        seen.fleet.step(10)
    assert [e.code for e in seen.fleet.take_events()] == ["gpu_back"]
    assert not np.isnan(seen.fleet.gpu_columns()["power_w"][seen.gpu])
    assert seen.fleet.gpu_columns()["energy_j"][seen.gpu] < 1e6  # the driver was loaded again


def test_without_a_job_there_is_no_straggler() -> None:
    plan = planned_jobs(SPEC, 3, 1.0)
    idle = next(SPEC.nodes[g.nodes[0]].name for g, jobs in plan if not jobs)
    fleet = SimulatedFleet(SPEC, 3, [Fault("straggler", "clock", idle, 0, 5.0, 60.0, 0.3)], START_MS)
    fleet.step(10)
    assert fleet.labels == [] and [f.node for f in fleet.skipped] == [idle]


@pytest.mark.parametrize(("nodes", "seed"), [(5, 0), (8, 1), (8, 7), (32, 7), (32, 8), (64, 3), (200, 4)])
def test_the_demo_has_five_faults_that_do_not_hide_each_other(nodes: int, seed: int) -> None:
    spec = build_fleet(nodes, seed)
    faults = demo_faults(spec, seed)
    assert sorted((f.kind, f.cause) for f in faults) == [
        ("liveness", "silent"),
        ("memory", "row_remap_failure"),
        ("straggler", "power_cap"),
        ("thermal", "cooling"),
        ("xid", "fallen_off_bus"),
    ]
    assert len({f.node for f in faults}) == 5 and all(15 <= f.start_s <= 45 and f.end_s is None for f in faults)
    by_cause = {f.cause: f for f in faults}
    fleet = SimulatedFleet(spec, seed, faults, START_MS)

    def index(cause: str) -> int:
        return int(fleet.hardware.first_gpu[fleet.hardware.number[by_cause[cause].node]]) + (by_cause[cause].gpu or 0)

    slow, hot_, lost = index("power_cap"), index("cooling"), index("fallen_off_bus")
    job, hot_job = fleet.steps.job_at(slow), fleet.steps.job_at(hot_)
    assert job is not None and len(fleet.steps.gpus_of(job)) == max(len(j.members) for j in fleet.jobs)
    if nodes >= 8:
        assert hot_job is not None and len({job, hot_job, fleet.steps.job_at(lost)}) == 3
        assert fleet.steps.job_at(index("silent")) is None
    normal = fleet.physics.clock[slow]
    margins = []
    for _ in range(80):
        fleet.step(1.0)
        margins.append(fleet.gpu_columns()["thermal_margin_c"][hot_])
    assert len(fleet.labels) == 5 and fleet.skipped == []
    assert fleet.steps.job_at(slow) == job
    assert 0.68 < fleet.physics.clock[slow] / normal < 0.80
    if hot_job is not None:
        assert np.nanmin(margins) <= 2 and fleet.physics.held_thermal_sw_us[hot_] > 1e6


def test_the_demo_needs_five_nodes() -> None:
    with pytest.raises(FaultsError, match="five nodes"):
        demo_faults(build_fleet(4, 1), 1)


@pytest.mark.parametrize(("nodes", "hours", "seed"), [(64, 2.0, 7), (32, 1.0, 1), (8, 0.2, 2)])
def test_drawn_faults_meet_their_jobs_and_leave_each_other_alone(nodes: int, hours: float, seed: int) -> None:
    spec = build_fleet(nodes, seed)
    faults = draw_faults(spec, hours, seed)
    assert faults == draw_faults(spec, hours, seed) and faults != draw_faults(spec, hours, seed + 1)
    assert 3 <= len(faults) <= 60
    fleet = SimulatedFleet(spec, seed, faults, START_MS)
    for _ in range(round(hours * 360)):
        fleet.step(10.0)
    assert len(fleet.skipped) <= len(faults) // 10
    assert all(label.end is not None and from_iso(label.end) <= fleet.now_ms for label in fleet.labels)
    for a in fleet.labels:
        for b in fleet.labels:
            if a.id < b.id and {n for n, _ in a.members} & {n for n, _ in b.members}:
                assert a.end is not None and b.end is not None
                assert a.end < b.start or b.end < a.start


def test_a_large_draw_has_all_kinds_and_hard_negatives() -> None:
    faults = draw_faults(build_fleet(128, 5), 6.0, 5)
    assert {(f.kind, f.cause) for f in faults} == {name for name, kind in KINDS.items() if kind.weight}
    assert 0.1 < np.mean([not KINDS[f.kind, f.cause].hardware for f in faults]) < 0.4


def test_faults_come_back_from_their_file(tmp_path: Path) -> None:
    faults = demo_faults(build_fleet(32, 7), 7)
    (tmp_path / "faults.json").write_text(dump_faults(faults))
    assert load_faults(tmp_path / "faults.json", build_fleet(32, 7)) == faults


GOOD = {"kind": "straggler", "cause": "clock", "node": "r01n01", "gpu": 0, "start_s": 5}


def test_severity_and_end_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps([GOOD]))
    (fault,) = load_faults(tmp_path / "f.json", SPEC)
    assert (fault.end_s, fault.severity) == (None, KINDS["straggler", "clock"].severity[1])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("{", "not valid JSON"),
        ("{}", "expected"),
        (json.dumps([GOOD | {"cause": "gremlins"}]), "no such fault straggler/gremlins; known are"),
        (json.dumps([GOOD | {"node": "r99n01"}]), "'r99n01' is not in the fleet"),
        (json.dumps([GOOD | {"gpu": 8}]), "slot from 0 to 7"),
        (json.dumps([GOOD | {"gpu": None}]), "slot from 0 to 7"),
        (json.dumps([GOOD | {"start_s": "soon"}]), "start_s must be a number"),
        (json.dumps([{k: v for k, v in GOOD.items() if k != "start_s"}]), "start_s is missing"),
        (json.dumps([GOOD | {"end_s": 1}]), "end_s must be a number from 5"),
        (json.dumps([GOOD | {"colour": "red"}]), "unknown key 'colour'"),
        (json.dumps([GOOD | {"kind": "liveness", "cause": "silent"}]), "leave gpu out"),
    ],
)
def test_a_bad_file_of_faults_is_one_clear_line(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "faults.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(FaultsError, match=says) as error:
        load_faults(path, SPEC)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_fleet_file_with_an_unknown_board_is_reported(tmp_path: Path) -> None:
    spec = FleetSpec(tuple(n.__class__(n.name, sku="B300-SXM") for n in SPEC.nodes[:1]))
    with pytest.raises(ValueError, match=r"B300-SXM.*H100-SXM"):
        SimulatedFleet(spec, 1, [], START_MS)
