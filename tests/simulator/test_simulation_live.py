"""What the simulated agents send: readings per node, and a whole fleet over real gRPC streams."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from drover_agent.config import AgentConfig
from drover_agent.polled_sources import build_sources
from drover_agent.sources.gpus import Gpus
from drover_core.metrics.catalog import BY_NAME, Absent, Scope
from drover_core.model.fleet import FleetSpec, JobSpec, NodeSpec
from drover_simulator.fault import Fault
from drover_simulator.faults import dump_faults
from drover_simulator.fleet import SimulatedFleet, build_fleet
from drover_simulator.live_fleet import add_arguments, run
from drover_simulator.readings import inventory
from drover_simulator.workload import planned_jobs
from testbed.telemetry_server import TelemetryServer, play
from testbed.waiting import LIMIT_S

START_MS = 1_767_225_600_000


def test_a_reading_holds_what_the_columns_hold() -> None:
    fleet = SimulatedFleet(build_fleet(4, 2), 2, [], START_MS)
    fleet.step(1.0)
    columns, readings = fleet.gpu_columns(), fleet.readings()
    assert list(readings) == fleet.hardware.names
    for n, reading in enumerate(readings.values()):
        gpus = [(e, v) for e, v in reading.rows if e.scope is Scope.GPU]
        assert [e.gpu for e, _ in gpus] == list(range(8))
        for entity, values in gpus:
            g = n * 8 + (entity.gpu or 0)
            assert values == {name: c[g] for name, c in columns.items() if not np.isnan(c[g])}
        scopes = [e.scope for e, _ in reading.rows]
        assert scopes.count(Scope.NODE) == 1 and scopes.count(Scope.LINK) == 8
        for entity, values in reading.rows:
            for name, value in values.items():
                assert BY_NAME[name].scope is entity.scope
                BY_NAME[name].encode(value)  # raises where it cannot be true
    serials = {e.serial for r in readings.values() for e, _ in r.rows if e.scope is Scope.GPU}
    assert len(serials) == 32


def test_sensors_have_the_resolution_of_nvml() -> None:
    fleet = SimulatedFleet(build_fleet(16, 2), 2, [], START_MS)
    fleet.step(1.0)
    columns = fleet.gpu_columns()
    for name, step in (("gpu_temp_c", 1), ("memory_temp_c", 1), ("sm_clock_mhz", 15), ("gpu_util_ratio", 0.01)):
        steps = columns[name][~np.isnan(columns[name])] / step
        assert np.allclose(steps, np.round(steps), atol=1e-6), name


def test_reads_fail_now_and_then_and_say_so() -> None:
    fleet = SimulatedFleet(build_fleet(40, 2), 2, [], START_MS)
    failed = []
    for _ in range(60):
        fleet.step(1.0)
        failed += [a for r in fleet.readings().values() for a in r.absent if a[2] is Absent.ERROR]
    assert 0 < len(failed) < 60


def test_what_a_board_does_not_have_is_absent_with_its_reason() -> None:
    spec = FleetSpec((NodeSpec("a", sku="A100-SXM"), NodeSpec("h", sku="H100-SXM"), NodeSpec("cpu", gpus=0)))
    fleet = SimulatedFleet(spec, 1, [], START_MS)
    fleet.step(1.0)
    readings = fleet.readings()
    lacking = {
        name: {metric for entity, metric, why in reading.absent if entity.gpu == 0 and why is Absent.UNSUPPORTED}
        for name, reading in readings.items()
    }
    assert lacking["h"] == {"nvlink_effective_ber"} and {"tensor_active_ratio", "thermal_margin_c"} < lacking["a"]
    assert all("tensor_active_ratio" not in values for e, values in readings["a"].rows)
    assert [e.scope for e, _ in readings["cpu"].rows] == [Scope.NODE]
    assert inventory(fleet.hardware, 0)["gpu0.model"] == "NVIDIA A100-SXM4-80GB"
    assert "no_gpu_reason" in inventory(fleet.hardware, 2)


def test_lost_hung_and_silent_are_distinguished() -> None:
    spec = build_fleet(8, 1)
    faults = [
        Fault("liveness", "gpu_lost", "r01n01", 3, 2.0, None),
        Fault("liveness", "driver_hung", "r01n02", None, 2.0, None),
        Fault("liveness", "silent", "r01n03", None, 2.0, None),
    ]
    fleet = SimulatedFleet(spec, 1, faults, START_MS)
    fleet.step(1.0)
    assert len(fleet.readings()) == 8
    for _ in range(9):
        fleet.step(1.0)
    readings = fleet.readings()
    assert "r01n03" not in readings and len(readings) == 7
    lost = {why for e, _, why in readings["r01n01"].absent if e.gpu == 3}
    assert lost == {Absent.LOST, Absent.UNSUPPORTED}
    assert [e.gpu for e, _ in readings["r01n01"].rows if e.scope is Scope.GPU] == [0, 1, 2, 4, 5, 6, 7]
    hung = readings["r01n02"]
    assert {why for e, _, why in hung.absent if e.gpu == 0} == {Absent.TIMEOUT, Absent.UNSUPPORTED}
    assert Scope.GPU not in {e.scope for e, _ in hung.rows} and Scope.NODE in {e.scope for e, _ in hung.rows}
    assert [e.code for e in hung.events] == ["driver_hung"]
    assert [e.code for e in readings["r01n01"].events] == ["gpu_lost"]
    fleet.step(1.0)
    assert all(not r.events for r in fleet.readings().values())


def test_holdings_are_reported_when_they_change() -> None:
    spec = build_fleet(2, 1)
    members = tuple(("r01n01", slot) for slot in range(4))
    jobs = [
        JobSpec("first", START_MS - 60_000, START_MS + 5_000, members),
        JobSpec("second", START_MS + 8_000, None, members),
    ]
    fleet = SimulatedFleet(spec, 1, [], START_MS, jobs)
    findings = []
    for _ in range(10):
        fleet.step(1.0)
        findings += [(fleet.now_s, *h) for h in fleet.readings()["r01n01"].holdings]
    assert [t for t in findings if t[0] == 1] == [(1, s, "first") for s in range(4)] + [
        (1, s, None) for s in range(4, 8)
    ]
    assert [t for t in findings if t[0] > 1] == [(5, s, None) for s in range(4)] + [(8, s, "second") for s in range(4)]
    assert [(j.id, j.start_ms, j.end_ms) for j in fleet.jobs] == [
        ("first", START_MS - 60_000, START_MS + 5_000),
        ("second", START_MS + 8_000, None),
    ]


def test_a_fleet_of_32_has_jobs_large_and_small_and_idle_nodes() -> None:
    spec = build_fleet(32, 7)
    sizes = [len(group.nodes) for group, jobs in planned_jobs(spec, 7, 1.0) if jobs]
    assert sizes == [16, 8, 1, 1, 1, 1, 1]
    assert len({n.rack for n in spec.nodes}) == 4 and len({n.leaf for n in spec.nodes}) == 2
    mixed = build_fleet(64, 7)
    assert {n.sku for n in mixed.nodes} == {"H100-SXM", "H200-SXM", "A100-SXM"}
    assert all(len({n.sku for n in mixed.nodes if n.rack == rack}) == 1 for rack in {n.rack for n in mixed.nodes})
    by_pool = SimulatedFleet(mixed, 7, [], START_MS)
    for job in by_pool.jobs:
        assert len({mixed.by_name[node].sku for node, _ in job.members}) == 1


def test_jobs_end_and_others_start_in_a_long_simulation() -> None:
    fleet = SimulatedFleet(build_fleet(8, 4), 4, [], START_MS)
    for _ in range(9 * 6):
        fleet.step(600.0)
    assert sum(job.end_ms is not None for job in fleet.jobs) >= 3
    assert sum(job.start_ms > START_MS for job in fleet.jobs) >= 3
    holders: dict[tuple[str, int], list[JobSpec]] = {}
    for job in fleet.jobs:
        for member in job.members:
            holders.setdefault(member, []).append(job)
    for jobs in holders.values():
        jobs.sort(key=lambda j: j.start_ms)
        assert all(a.end_ms is not None and a.end_ms <= b.start_ms for a, b in itertools.pairwise(jobs))


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


async def alongside(server: TelemetryServer, *argv: str) -> int:
    """`run` in a process of its own, as `drover-agent fleet` is; the server stays in this loop."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "drover_agent.main", "fleet", "--collector", f"127.0.0.1:{server.port}", *argv,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, errors = await asyncio.wait_for(process.communicate(), 3 * LIMIT_S)
    assert process.returncode is not None
    assert "Traceback" not in errors.decode(), errors.decode()
    return process.returncode


def test_a_whole_fleet_streams_and_a_dead_node_says_no_goodbye(tmp_path: Path) -> None:
    spec = build_fleet(4, 1)
    faults = [
        Fault("liveness", "silent", "r01n02", None, 1.5, None),
        Fault("memory", "row_remap_failure", "r01n03", 5, 1.0, None),
    ]
    (tmp_path / "faults.json").write_text(dump_faults(faults))
    server = TelemetryServer()

    async def scenario() -> None:
        await server.start()
        code = await alongside(
            server, "--nodes", "4", "--seed", "1", "--faults", str(tmp_path / "faults.json"), "--seconds", "4",
            "--interval", "0.5", "--labels", str(tmp_path / "labels.jsonl"), "--spool-dir", str(tmp_path / "spool"),
        )  # fmt: skip
        assert code == 0

    play(scenario())
    assert {hello.node for hello in server.hellos} == {n.name for n in spec.nodes}
    assert server.hellos[0].inventory["driver"]
    node_of = {hello.spool_id: hello.node for hello in server.hellos}
    findings: dict[str, list[str]] = {node: [] for node in spec.by_name}
    for (spool, _), event in sorted(server.events.items()):
        findings[node_of[spool]].append(event.code)
    for node in ("r01n01", "r01n03", "r01n04"):
        assert (findings[node][0], findings[node][-1]) == ("agent_started", "agent_stopped")
    assert "agent_stopped" not in findings["r01n02"]
    assert [code for code in findings["r01n03"] if code.isdigit()] == ["64", "154"]
    assert server.rows and not server.broken and server.repeated_rows == 0
    newest = {node: max(ts for key, ts in server.rows if key == node) for node in ("r01n01", "r01n03", "r01n04")}
    assert len(set(newest.values())) == 1  # all sent their last tick
    labels = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert [(label["kind"], label["node"], label["gpu"]) for label in labels] == [
        ("memory", "r01n03", 5),
        ("liveness", "r01n02", None),
    ]
    assert {p.name for p in (tmp_path / "spool").iterdir()} == set(spec.by_name)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--collector", "nowhere"], "must be HOST:PORT"),
        (["--nodes", "0"], "must be at least 1"),
        (["--nodes", "4"], "five nodes"),
        (["--faults", "missing.json"], "missing.json: No such file"),
        (["--fleet", "missing.toml"], "missing.toml: No such file"),
        (["--interval", "0.01"], "from 0.2 to 60"),
        (["--labels", "/no/such/folder/labels"], "choose a file that can be written"),
        (["--spool-dir", "/dev/null/spool"], "choose a folder that can be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments(*argv)) == 2
    errors = capsys.readouterr().err
    assert says in errors and len(errors.splitlines()) == 1


def test_nodes_with_simulated_hardware_have_gpus_of_their_own() -> None:
    serials = set()
    for node in ("a", "b"):
        (source,) = build_sources(AgentConfig(node=node, hardware="simulated"), Gpus())
        serials |= {e.serial for e, _ in source.read(START_MS).rows if e.scope is Scope.GPU}
    assert len(serials) == 16
