"""Rows to blocks, numbers for things, and intervals of absence: right, and bounded over years."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from drover_agent.config import AgentConfig, SpoolConfig
from drover_agent.runtime.agent import Agent
from drover_agent.sources.base import Entity, NodeEvent, Reading
from drover_agent.telemetry import absences as absences_module
from drover_agent.telemetry import batcher as packing
from drover_agent.telemetry.absences import Absences
from drover_agent.telemetry.batcher import Batcher
from drover_agent.telemetry.schema_registry import (
    MAX_ENTITIES,
    MAX_INDEX,
    SAVE_MS,
    SchemaRegistry,
)
from drover_core.metrics.catalog import Absent, Scope, of_scope
from drover_core.model.events import EventKind
from drover_proto import telemetry_pb2 as pb
from drover_proto.blocks import BlockBuilder, record_struct
from testbed.telemetry_server import TelemetryServer, play
from testbed.waiting import until

T = 1_800_000_000_000
GPU = Entity(Scope.GPU, "SN0", 0, serial="SN0")
NODE = Entity(Scope.NODE, "n1")


def packer(folder: Path, late_ms: float = 10_000) -> Batcher:
    return Batcher(SchemaRegistry(folder / "dictionary.json"), Absences(folder / "absences.json"), late_ms)


def rows(block: pb.Block, names: list[str], types: str) -> list[tuple[int, int, dict[str, float]]]:
    """(time, entity, stored values that are present) of each row."""
    width = (len(names) + 7) // 8
    found = []
    for number, row in enumerate(struct.iter_unpack(record_struct(types).format, block.body)):
        bits = int.from_bytes(block.presence[number * width : (number + 1) * width], "little")
        found.append((row[0], row[1], {name: row[2 + i] for i, name in enumerate(names) if bits >> i & 1}))
    return found


def test_every_value_is_stored_as_the_catalog_says_whatever_came_before_it() -> None:
    """Only what changes is encoded: values, absences, impossible ones and NaN in any order, for entities in turn."""
    chance, metrics = random.Random(3), of_scope(Scope.GPU)
    builder = BlockBuilder(1, metrics)
    wanted: list[tuple[int, int, dict[str, float]]] = []
    rows_in: dict[int, dict[str, float]] = {entity: {} for entity in range(3)}
    for second in range(300):
        entity = chance.randrange(3)
        values = rows_in[entity]
        for metric in chance.sample(metrics, chance.randrange(len(metrics))):
            low, high = max(metric.low, -(10.0**6)), min(metric.high, 10.0**6)
            choice = chance.choice(["value", "value", "integer", "none", "low", "high", "nan"])
            if choice == "none":
                values.pop(metric.name, None)
            elif choice == "low" and metric.low > -1e300:
                values[metric.name] = metric.low - 1
            elif choice == "high" and metric.high < 1e15:
                values[metric.name] = metric.high + 1
            elif choice == "nan":
                values[metric.name] = float("nan")
            else:
                drawn = chance.uniform(low, high)
                values[metric.name] = min(max(int(drawn), low), high) if choice == "integer" else drawn
        good, bad = {}, []
        for metric in metrics:
            if metric.name in values:
                try:
                    good[metric.name] = metric.encode(values[metric.name])
                except ValueError:
                    bad.append(metric.name)
        assert builder.add(T + second, entity, dict(values)) == (bad, True)
        wanted.append((T + second, entity, good))
    block = builder.take()
    assert block
    assert rows(block, [m.name for m in metrics], "".join(m.type for m in metrics)) == wanted


def test_names_without_a_column_are_reported() -> None:
    builder = BlockBuilder(1, of_scope(Scope.NODE))
    assert builder.add(T, 0, {"load1": 1.0}) == ([], True)
    assert builder.add(T, 0, {"load1": 1.0, "power_w": 1.0}) == ([], False)


def test_readings_of_several_sources_are_one_row_and_what_one_has_is_not_absent(tmp_path: Path) -> None:
    one = packer(tmp_path)
    one.add(T, Reading(rows=[(GPU, {"power_w": 100.0})], absent=[(GPU, "gpu_temp_c", Absent.UNSUPPORTED)]))
    one.add(T, Reading(rows=[(GPU, {"gpu_temp_c": 40.0})], absent=[(GPU, "memory_temp_c", Absent.ERROR)]))
    blocks, newest_ms = one.take(T)
    assert ([block.rows for block in blocks], newest_ms) == ([1], T)
    changes = one._absences.take_changes(0.0)
    assert [(c.metric, c.reason) for c in changes] == [("memory_temp_c", "error")]


def test_unknown_metrics_are_dropped_with_one_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = packer(tmp_path)
    for second in range(50):
        one.add(T + second, Reading(rows=[(GPU, {"power_w": 1.0, "warp_factor": 9.0, "load1": 1.0})]))
        blocks, _ = one.take(T + second)
        assert blocks[0].rows == 1
    assert one.unknown_metrics == {"warp_factor", "load1"}
    assert len(caplog.messages) == 2


def test_hundreds_of_parts_ports_and_workloads_are_reported_over_one_stream(tmp_path: Path) -> None:
    """16 GPUs in seven parts each, 128 ports, 100 workloads: 360 things, each with its rows under its own name."""
    gpus = [Entity(Scope.GPU, f"SN{slot}", slot) for slot in range(16)]
    parts = [Entity(Scope.GPU, f"SN{slot}/{part}", slot, mig=str(part)) for slot in range(16) for part in range(7)]
    ports = [Entity(Scope.LINK, f"n1/mlx5_{port}", link=f"mlx5_{port}") for port in range(128)]
    jobs = [Entity(Scope.WORKLOAD, f"n1/vllm-{job}") for job in range(100)]
    things = [*gpus, *parts, *ports, *jobs, NODE]
    name = {Scope.GPU: "power_w", Scope.LINK: "rx_bytes", Scope.WORKLOAD: "requests_running", Scope.NODE: "load1"}

    async def scenario() -> None:
        server = TelemetryServer()
        spool = SpoolConfig(dir=str(tmp_path / "spool"))
        config = AgentConfig(node="n1", collectors=(await server.start(),), kmsg_enabled=False, spool=spool)
        agent = Agent(config, "n1")
        task = asyncio.create_task(agent.run())
        start = agent._clock.now_ms() // 1000 * 1000
        for second in range(12):
            values = [(thing, {name[thing.scope]: float(at)}) for at, thing in enumerate(things)]
            agent.accept(start + second * 1000, Reading(rows=values))
        agent.flush()
        await until(lambda: len(server.rows) == 12 * len(things), "all rows")
        for at, thing in enumerate(things):
            assert server.rows[thing.key, start][name[thing.scope]] == at
        assert (server.broken, server.repeated_rows, agent.batcher.unknown_metrics) == ([], 0, set())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    play(scenario())


def test_what_a_part_or_a_workload_lacks_is_not_reported_of_the_whole(tmp_path: Path) -> None:
    absences = Absences(tmp_path / "absences.json")
    part = Entity(Scope.GPU, "SN0/1", 0, mig="1g.10gb/1")
    absences.add_missing(part, "power_w", Absent.UNSUPPORTED, T)
    absences.add_present(GPU, {"power_w": 100.0}, T)
    absences.add_missing(Entity(Scope.WORKLOAD, "n1/vllm"), "ttft_p50_s", Absent.UNSUPPORTED, T)
    reported = {
        (c.gpu if c.HasField("gpu") else None, c.link, c.metric, c.HasField("to_ms"))
        for c in absences.take_changes(0.0)
    }
    assert reported == {(0, "1g.10gb/1", "power_w", False), (None, "vllm", "ttft_p50_s", False)}


def test_absences_of_things_that_come_and_go_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absences_module, "MAX_OPEN", 100)
    path = tmp_path / "absences.json"
    absences = Absences(path)
    for port in range(1_000):
        link = Entity(Scope.LINK, f"n1/veth{port}", link=f"veth{port}")
        for metric in ("rate_gbps", "tx_wait"):
            absences.add_missing(link, metric, Absent.UNSUPPORTED, T + port)
        absences.take_changes(0.0)
    assert len(json.loads(absences.dump())) <= 100
    path.write_bytes(absences.dump())
    newest = Entity(Scope.LINK, "n1/veth999", link="veth999")
    again = Absences(path)
    again.add_present(newest, {"tx_wait": 1.0}, T + 5_000)
    assert [(c.link, c.metric, c.from_ms, c.to_ms) for c in again.take_changes(0.0)] == [
        ("veth999", "tx_wait", T + 999, T + 5_000)
    ]


def test_absences_of_jobs_and_mig_instances_that_are_gone_end(tmp_path: Path) -> None:
    """Those of GPUs and ports do not: they are expected to be there. A restart between makes no difference."""
    part = Entity(Scope.GPU, "MIG-1", 0, mig="MIG-1")
    live = Entity(Scope.GPU, "MIG-2", 0, mig="MIG-2")
    job = Entity(Scope.WORKLOAD, "n1/job 7", link="job 7")
    port = Entity(Scope.LINK, "n1/mlx5_0", link="mlx5_0")
    path = tmp_path / "absences.json"
    absences = Absences(path)
    for thing, metric in (
        (part, "power_w"),
        (live, "power_w"),
        (job, "step_time_s"),
        (port, "tx_wait"),
        (GPU, "power_w"),
    ):
        absences.add_missing(thing, metric, Absent.LOST, T)
    assert len(absences.take_changes(100.0)) == 5
    path.write_bytes(absences.dump())
    hours = 3600.0
    for run, began_s in ((absences, 100.0), (Absences(path, 5_000_000.0), 5_000_000.0)):
        ended = []
        for hour in range(10):
            run.add_missing(live, "power_w", Absent.LOST, T + hour)
            ended += run.take_changes(began_s + hour * hours)
        assert {(c.link, c.metric, c.HasField("to_ms")) for c in ended} == {
            ("MIG-1", "power_w", True),
            ("job 7", "step_time_s", True),
        }
        assert {tuple(row[:3]) for row in json.loads(run.dump())} == {
            (0, "MIG-2", "power_w"),
            (None, "mlx5_0", "tx_wait"),
            (0, "", "power_w"),
        }


@pytest.mark.parametrize(
    ("moments", "shifted"),
    [
        ([0, 1, 3600, 3601, "back", 2, 3, 1800], []),
        ([0, 1, 3600, 3601, "back", 2, 3600, 3601, 3602], [3600, 3601]),
        ([0, 1, "back", -3600, -3599, 2, 3], []),
        ([0, 1, 2, "back", 1, 2, 3], [1, 2]),
    ],
    ids=["an hour ahead and right again", "until the hour has passed", "an hour behind and right again", "by a second"],
)
def test_after_a_clock_was_set_back_only_times_that_were_reported_before_get_another(
    tmp_path: Path, moments: list[int | str], shifted: list[int]
) -> None:
    """A node whose clock was once an hour ahead does not send all of the next hour with shifted times."""
    one, reported, wanted, back = packer(tmp_path), [], [], False
    for moment in moments:
        if isinstance(moment, str):
            one.clock_set_back()
            back = True
            continue
        at_ms = T + moment * 1000
        one.add(at_ms, Reading(rows=[(GPU, {"power_w": 1.0})]))
        blocks, _ = one.take(at_ms)
        reported += [ts_ms for block in blocks for ts_ms, _, _ in rows(block, ["power_w"], "H")]
        wanted.append(at_ms + (back and moment in shifted))
    assert reported == wanted
    assert len(set(reported)) == len(reported)


def test_spans_of_times_stay_few_however_often_the_clock_leaps(tmp_path: Path) -> None:
    one = packer(tmp_path)
    for round_ in range(3 * packing.MAX_SPANS):
        for leap in range(3 * packing.MAX_SPANS):
            at_ms = T + (leap * 10 - round_) * packing.LEAP_MS
            one.add(at_ms, Reading(rows=[(GPU, {"power_w": 1.0})]))
            one.take(at_ms)
        one.clock_set_back()
    assert max(len(one._sent), len(one._sent_before)) <= packing.MAX_SPANS


def test_an_absence_over_a_clock_set_back_does_not_end_before_it_begins(tmp_path: Path) -> None:
    absences = Absences(tmp_path / "absences.json")
    absences.add_missing(GPU, "power_w", Absent.ERROR, T)
    absences.add_present(GPU, {"power_w": 1.0}, T - 3_600_000)
    reported = absences.take_changes(0.0)
    assert [(c.from_ms, c.to_ms) for c in reported] == [(T, T)]


def test_numbers_of_things_that_are_gone_are_given_out_again_only_when_nothing_waits_of_them(tmp_path: Path) -> None:
    """A node on which pods come and go for years: a Hello stays small, and no number means two things at once."""
    dictionary = SchemaRegistry(tmp_path / "dictionary.json")
    spooled: list[tuple[int, int, Entity]] = []  # (time, number, what it meant) of batches that may still be sent
    kept_ms = 10 * SAVE_MS
    reported: set[int] = set()
    for number in range(90_000):
        now_ms = T + number * 10_000
        entity = Entity(Scope.WORKLOAD, f"n1/pod-{number}")
        index = dictionary.index_of(entity, now_ms)
        assert index is not None
        assert index <= MAX_INDEX
        reported.add(index)
        spooled.append((now_ms, index, entity))
        if number % 500 == 0:
            spooled = [one for one in spooled if one[0] > now_ms - kept_ms]
            for _, old, meant in spooled:
                assert dictionary.entities[meant] == old
            gone = dictionary.forget(spooled[0][0])
            assert not {meant for _, _, meant in spooled} & set(gone)
    assert len(reported) == MAX_INDEX + 1, "all of them were given out, and some again"
    assert len(dictionary.entities) < 2_000
    assert len(set(dictionary.entities.values())) == len(dictionary.entities)


def test_too_many_things_at_once_are_dropped_with_one_line_and_the_rest_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = packer(tmp_path)
    pods = [Entity(Scope.WORKLOAD, f"n1/pod-{number}") for number in range(MAX_ENTITIES + 50)]
    one.add(T, Reading(rows=[(GPU, {"power_w": 1.0}), *((pod, {"requests_running": 1.0}) for pod in pods)]))
    blocks, _ = one.take(T)
    assert sum(block.rows for block in blocks) == MAX_ENTITIES
    assert len([m for m in caplog.messages if "which is the limit" in m]) == 1
    one._registry.forget(T + 3 * SAVE_MS)
    one.add(T + 1, Reading(rows=[(pods[-1], {"requests_running": 1.0})]))
    assert one.take(T + 1)[0][0].rows == 1


def test_a_dictionary_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Agents are upgraded in place: what waits in the spool keeps its meaning."""
    path = tmp_path / "dictionary.json"
    entity = {"scope": "gpu", "key": "SN0", "gpu": 0, "uuid": "", "serial": "SN0", "pci": "", "model": "", "mig": ""}
    data: Mapping[str, object] = {
        "entities": [{"index": 7, "used_ms": T, "entity": entity}],
        "schemas": [{"id": 3, "scope": "gpu", "columns": [[1, "H", "power_w"]], "used_ms": T}],
    }
    path.write_text(json.dumps(data))
    found = SchemaRegistry.load(path, T)
    assert found.index_of(GPU, T) == 7
    assert list(found.schemas) == [3]
    assert found.index_of(NODE, T) == 8


def test_an_event_before_the_clock_was_right_and_after_is_reported_as_it_came(tmp_path: Path) -> None:
    """Events keep the times that their sources gave them: only rows need times of their own."""

    async def scenario() -> None:
        config = AgentConfig(node="n1", kmsg_enabled=False, spool=SpoolConfig(dir=str(tmp_path)))
        agent = Agent(config, "n1")
        for code, ts_ms in (("79", T), ("31", T - 3_600_000)):
            event = NodeEvent(ts_ms, 0, EventKind.XID, code, code, "kmsg")
            agent.accept(ts_ms, Reading(events=[event]))
        await agent.spool.wait_stored()
        first = agent.spool.next(pb.EVENTS, 0)
        assert first
        second = agent.spool.next(pb.EVENTS, first.seq)
        assert second
        sent = [pb.Record.FromString(record.body).event.ts_ms for record in (first, second)]
        assert sent == [T, T - 3_600_000]
        agent.spool.close()

    asyncio.run(scenario())
