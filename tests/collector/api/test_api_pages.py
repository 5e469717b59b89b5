"""Answers about jobs, fabric and heat, of a simulated fleet with a straggler, a port that flaps and a bad heat sink."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from drover_collector.api import (
    fabric as api_fabric,
)
from drover_collector.api import (
    fleet as api_fleet,
)
from drover_collector.api import (
    job as api_job,
)
from drover_collector.api import (
    jobs as api_jobs,
)
from drover_collector.api import (
    thermals as api_thermals,
)
from drover_collector.api.snapshot import ApiSnapshot, RefusalError
from drover_collector.config import CollectorConfig
from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.fleet.index import FleetIndex
from drover_collector.incidents.correlation import jobs_hurt
from drover_collector.ingest.stats import IngestStats
from drover_collector.notify import Outbox
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.policy import Policy
from drover_collector.store import EntityRow, JobSpan, SampleBatch, Store, entity_id
from drover_core.jobs.place import RankPlace
from drover_core.metrics.catalog import Scope
from drover_core.model.events import (
    Evidence,
    Holding,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
    from_json,
)
from drover_core.model.fleet import FleetSpec, RackSpec
from drover_proto import fleet_pb2 as pb
from drover_simulator.faults import Fault
from testbed.simulated_buckets import START_MS, record

SLOW, HOT, FLAPPING = ("r01n02", 3), ("r02n01", 5), "r01n05"
MINUTES = 5


def faults(spec: FleetSpec) -> list[Fault]:
    return [
        Fault("straggler", "power_cap", *SLOW, 40.0, None, 0.3),
        Fault("thermal", "cooling", *HOT, 20.0, None, 1.8, 20.0),
        Fault("link", "ib_flap", FLAPPING, None, 60.0, None, 1.0),
    ]


@pytest.fixture(scope="module")
def facts(store_root: Path) -> Iterator[ApiSnapshot]:
    """The newest buckets in memory; in the store who holds what, what workloads report, and counters of before."""
    store = Store.open(f"chdb://{store_root}?database=api_pages", retention_days=3650)
    seen = record(1207, MINUTES, faults)
    index, now = seen.index, [START_MS]
    links = [(node.name, link.link) for node in index.nodes for link in node.links]
    _store_links(store, links)
    jobs = seen.buckets[-1].jobs
    store.jobs.write_holdings(
        [
            Holding(*index.member(g), seen.buckets[-1].job_names[jobs[g]], START_MS - 3_600_000)
            for g in range(index.gpu_count) if jobs[g] >= 0
        ]
        + [Holding(*index.member(g), job, at) for g in np.flatnonzero(jobs < 0)[:4].tolist()
           for job, at in (("over", START_MS), (None, START_MS + 90_000))]
    )  # fmt: skip
    pipeline = Pipeline(
        index,
        store,
        Policy.load(),
        Outbox(store, [], "http://console"),
        PipelineOptions(lag_ms=7000, now_ms=lambda: now[0]),
    )
    for bucket in seen.buckets:
        now[0] = bucket.end_ms + 7000
        pipeline.judge_bucket(bucket)
    store.rows._parts_at = -1e9  # as after a second: on a fast machine all of this takes less
    yield ApiSnapshot(pipeline, IngestStats(), CollectorConfig())
    store.close()


def _store_links(store: Store, links: list[tuple[str, str]]) -> None:
    keys = [f"{node}/{link}" for node, link in links]
    rows = [
        EntityRow(entity_id(Scope.LINK, key), Scope.LINK, key, node, None, link=link)
        for key, (node, link) in zip(keys, links, strict=True)
    ]
    names = [f"{node}/pretrain" for node in ("r01n01", "r01n02", "r01n03")]
    rows += [
        EntityRow(entity_id(Scope.WORKLOAD, key), Scope.WORKLOAD, key, key.partition("/")[0], None, link="pretrain")
        for key in names
    ]
    store.entities.write(rows)
    ids = np.array([entity_id(Scope.LINK, key) for key in keys], np.uint64)
    zeros = {name: np.zeros(len(ids)) for name in api_fabric.COUNTED}
    store.samples.write(SampleBatch.of_values(Scope.LINK, ids, np.full(len(ids), START_MS), zeros))
    reported = {
        "step_time_s": np.array([2.0, 2.5, 2.1]), "tokens_per_step": np.full(3, 4e6), "mfu_ratio": np.full(3, 0.41),
    }  # fmt: skip
    ids = np.array([entity_id(Scope.WORKLOAD, key) for key in names], np.uint64)
    store.samples.write(SampleBatch.of_values(Scope.WORKLOAD, ids, np.full(3, START_MS + MINUTES * 60_000), reported))


@pytest.fixture(autouse=True)
def _again(facts: ApiSnapshot) -> None:
    """No answer of another test."""
    facts._kept.clear()


def slow_job(facts: ApiSnapshot) -> str:
    codes, names = facts.jobs()
    return names[codes[facts.index.gpu(*SLOW)]]


def test_the_hurt_job_comes_first_with_what_its_incident_says(facts: ApiSnapshot) -> None:
    jobs = api_jobs.list_jobs(facts, pb.ListJobsRequest()).jobs
    (incident,) = [i for i in facts.open_incidents() if i.kind == "straggler"]
    first = jobs[0]
    assert first.job == slow_job(facts)
    assert incident.id in first.incidents
    assert first.hurt == next(i for i in facts.open_incidents() if i.id == first.incidents[0]).summary
    assert first.gpu_hours_waited == incident.gpu_hours_waited
    hours = (facts.now_ms() - incident.since_ms) / 3_600_000
    assert first.waiting_share == pytest.approx(incident.gpu_hours_waited / (first.gpus * hours))
    assert 0 < first.waiting_share < 1
    assert first.gpus == first.nodes * 8
    assert first.since_ms == START_MS - 3_600_000
    well = [job for job in jobs if not job.incidents]
    assert well
    assert not any(job.HasField("waiting_share") or job.HasField("gpu_hours_waited") for job in well), (
        "not known, not 0"
    )
    assert "over" not in {job.job for job in jobs}


def test_an_ended_job_is_listed_when_asked_for_and_can_be_looked_at(facts: ApiSnapshot) -> None:
    reply = api_jobs.list_jobs(facts, pb.ListJobsRequest(ended=True, contains="ove"))
    (over,) = reply.jobs
    assert (over.job, over.gpus, over.ended_ms - over.since_ms) == ("over", 4, 90_000)
    detail = api_job.get_job(facts, pb.JobRequest(job="over"))
    assert [(gpu.node, gpu.gpu) for gpu in detail.gpus] == [facts.index.member(g) for g in _free(facts)[:4]]
    assert not detail.metrics
    assert detail.absent[0] == "Its GPUs: no values of that time."


def _free(facts: ApiSnapshot) -> list[int]:
    return np.flatnonzero(facts.jobs()[0] < 0).tolist()


def test_a_job_shows_its_slow_gpu_among_the_others(facts: ApiSnapshot) -> None:
    detail = api_job.get_job(facts, pb.JobRequest(job=slow_job(facts)))
    assert len(detail.gpus) == detail.row.gpus
    assert [(gpu.node, gpu.gpu) for gpu in detail.gpus if gpu.incident] == [SLOW], "a port names no GPU"
    clock = next(each for each in detail.metrics if each.metric == "sm_clock_mhz")
    values = np.frombuffer(clock.values, "<f4")
    at = [(gpu.node, gpu.gpu) for gpu in detail.gpus].index(SLOW)
    assert values[at] == values.min() < clock.p10 <= clock.median <= clock.p90
    assert clock.known == detail.row.gpus
    worst = from_json(Incident, detail.incidents_json[0])
    assert (worst.cause, worst.node) == ("port_flaps", FLAPPING), "the worst first, whatever it costs"
    assert {worst.id, detail.row.incidents[0]} <= set(detail.row.incidents)
    assert detail.row.hurt.startswith(f"GPU {SLOW[1]} of node {SLOW[0]}"), "what costs most"
    assert detail.ports_total == detail.row.gpus, "a port each"
    assert 0 < detail.saturation_median <= detail.saturation_max < 1
    assert detail.ports[0].node == FLAPPING, "the one in trouble before the busiest"


def test_a_job_shows_the_places_of_its_ranks_or_why_they_are_not_used(facts: ApiSnapshot) -> None:
    name, inventory = slow_job(facts), facts.pipeline.engine.inventory
    gpus = api_jobs.running(facts)[name].gpus
    assert not api_job.get_job(facts, pb.JobRequest(job=name)).parallel
    places = {g: RankPlace(name, at, len(gpus), {"tp": (at % 8, 8)}, "client") for at, g in enumerate(gpus)}
    try:
        inventory.places.update(places)
        detail = api_job.get_job(facts, pb.JobRequest(job=name))
        assert detail.parallel == f"tensor 8 of {len(gpus)} ranks, by its training loop"
        assert [gpu.place for gpu in detail.gpus[:9]] == [f"tensor rank {at % 8}" for at in range(9)]
        del inventory.places[gpus[3]]
        detail = api_job.get_job(facts, pb.JobRequest(job=name))
        assert not detail.parallel and not any(gpu.place for gpu in detail.gpus)
        said = next(text for text in detail.absent if text.startswith("Places of its ranks"))
        assert said.endswith(f"are not used: 1 of its {len(gpus)} GPUs have no rank that says it.")
    finally:
        for g in places:
            inventory.places.pop(g, None)


def test_of_a_large_job_the_named_and_the_farthest_are_drawn() -> None:
    clocks = np.full(3000, 1980.0) + np.arange(3000) % 7
    clocks[[5, 1999]] = 1200.0, np.nan
    named = np.zeros(3000, bool)
    named[777] = True
    shown = api_job._shown({"sm_clock_mhz": clocks}, named.tolist())
    assert len(shown) == api_job.GPUS_MAX
    assert shown == sorted(set(shown))
    assert {5, 777} <= set(shown)
    assert max(np.diff(shown)) < 20, "others evenly"


def test_steps_are_those_of_the_whole_job_and_added_up_once(facts: ApiSnapshot) -> None:
    detail = api_job.get_job(facts, pb.JobRequest(job=slow_job(facts)))
    (loop,) = detail.workloads
    assert (loop.name, loop.nodes, loop.step_time_s, loop.mfu_ratio) == ("pretrain", 3, 2.1, 0.41)
    assert loop.tokens_per_s == pytest.approx(4e6 / 2.1)
    assert (detail.row.step_time_s, detail.row.mfu_ratio) == (2.1, 0.41)
    other = next(job for job in api_jobs.list_jobs(facts, pb.ListJobsRequest()).jobs if job.job != slow_job(facts))
    silent = api_job.get_job(facts, pb.JobRequest(job=other.job))
    assert not silent.row.HasField("step_time_s")
    assert api_job.NO_STEPS in silent.absent


def test_a_job_that_is_not_there_is_refused(facts: ApiSnapshot) -> None:
    with pytest.raises(RefusalError, match="no job 'x' runs or ended in the last day") as refused:
        api_job.get_job(facts, pb.JobRequest(job="x"))
    assert refused.value.code is grpc.StatusCode.NOT_FOUND
    with pytest.raises(RefusalError, match="give the name of a job"):
        api_job.get_job(facts, pb.JobRequest())


def test_one_node_is_distinguished_from_the_switch(facts: ApiSnapshot) -> None:
    fabric = api_fabric.get_fabric(facts, pb.FabricRequest(leaf="leaf01"))
    leaf = fabric.leafs[0]
    assert (leaf.name, leaf.nodes_troubled, leaf.switch) == ("leaf01", 1, False)
    assert leaf.verdict.startswith(f"One of 16 nodes, not the switch: {FLAPPING}. ")
    assert [node.node for node in leaf.nodes if node.state == "trouble"] == [FLAPPING]
    assert fabric.ports_total == leaf.ports == 16 * 8
    worst = fabric.ports[0]
    assert (worst.node, worst.leaf) == (FLAPPING, "leaf01")
    assert worst.downs > 0
    assert worst.incident == leaf.incident
    assert not fabric.ports[-1].trouble
    assert fabric.counted_from_ms == START_MS
    assert not fabric.absent
    with pytest.raises(RefusalError, match="no leaf 'x'"):
        api_fabric.get_fabric(facts, pb.FabricRequest(leaf="x"))


def test_a_switch_that_takes_its_ports_along_is_reported_as_one(
    facts: ApiSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [node.name for node in facts.index.nodes[:6]]
    summary = "48 of 128 ports at leaf leaf01 are down, on 6 nodes: it is the switch."
    like = next(i for i in facts.open_incidents() if i.cause.startswith("port"))
    switch = replace(
        like, id="s", cause="switch", scope="leaf", node=None, members=tuple((name, None) for name in nodes),
        summary=summary, evidence=(), snapshots={"links": {"leafs": {"leaf01": True}}},
    )  # fmt: skip
    monkeypatch.setattr(facts, "open_incidents", lambda: [switch, like])
    leaf = api_fabric.get_fabric(facts, pb.FabricRequest()).leafs[0]
    assert (leaf.switch, leaf.incident, leaf.verdict, leaf.nodes_troubled) == (True, "s", summary, 6)


def test_a_nodes_nvlinks_and_ports(facts: ApiSnapshot) -> None:
    fabric = api_fabric.get_fabric(facts, pb.FabricRequest(node=SLOW[0]))
    assert [row.gpu for row in fabric.nvlinks] == list(range(8))
    assert {(row.links_up, row.links_usual) for row in fabric.nvlinks} == {(18, 18)}
    assert all(row.tx_bytes_per_s > 0 for row in fabric.nvlinks)
    assert not any(row.HasField("crc_errors") for row in fabric.nvlinks), "no counter of before: not known, not 0"
    assert {port.node for port in fabric.ports} == {SLOW[0]}


def test_the_rack_with_the_bad_heat_sink(facts: ApiSnapshot) -> None:
    heat = api_thermals.get_thermals(facts, pb.ThermalsRequest(rack="r02"))
    first, second = heat.racks
    assert (first.name, second.name, second.nodes, second.gpus) == ("r01", "r02", 8, 64)
    assert second.gpu_max_at == f"{HOT[0]} GPU {HOT[1]}"
    assert second.poor == 1
    assert first.poor == 0
    assert 10 < second.inlet_c <= second.inlet_max_c < second.gpu_median_c < second.gpu_max_c
    bucket = facts.pipeline.engine.buckets[-1]
    assert second.power_w == pytest.approx(bucket.gpu["power_w"][64:].sum())
    assert (second.power_known, second.limit_w) == (64, 64 * 700)
    assert [(rack.row, rack.HasField("budget_w")) for rack in heat.racks] == [("", False)] * 2
    assert heat.absent == [api_thermals.NO_BUDGET]
    hot = heat.hot[0]
    assert (hot.node, hot.gpu, hot.incident) == (*HOT, second.incident)
    assert hot.resistance > 1.3 * hot.expected
    assert [node.node for node in heat.nodes] == [f"r02n0{n}" for n in range(1, 9)]
    with pytest.raises(RefusalError, match="no rack 'x'"):
        api_thermals.get_thermals(facts, pb.ThermalsRequest(rack="x"))


def test_racks_stand_in_their_row_with_their_budget(facts: ApiSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = replace(facts.index.spec, racks=(RackSpec("r02", "A", 30_000.0),))
    monkeypatch.setattr(facts.index, "spec", reported)
    heat = api_thermals.get_thermals(facts, pb.ThermalsRequest())
    assert [(rack.row, rack.budget_w) for rack in heat.racks] == [("", 0), ("A", 30_000)]
    assert not heat.racks[0].HasField("budget_w")
    assert not heat.absent


def test_a_bucket_without_reports_hides_no_value_of_before(facts: ApiSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that read each 10 s, and are late."""
    held = facts.pipeline.engine.buckets
    empty = replace(held[-1], gpu={}, node={}, link={})
    monkeypatch.setattr(type(facts.pipeline.engine), "buckets", property(lambda _: (*held[1:], empty)))
    job = api_job.get_job(facts, pb.JobRequest(job=slow_job(facts)))
    assert {each.metric for each in job.metrics} >= {"sm_clock_mhz", "power_w"}
    assert {port.state for port in job.ports} <= {"up", "down"}
    monkeypatch.setattr(type(facts.pipeline.engine), "buckets", property(lambda _: (*held[3:], empty, empty, empty)))
    facts._kept.clear()
    assert not api_job.get_job(facts, pb.JobRequest(job=slow_job(facts))).metrics, "of half a minute ago"


def test_without_values_all_is_absent_and_the_answer_says_why(
    facts: ApiSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts.pipeline, "now_ms", lambda: START_MS + MINUTES * 60_000 + 10 * BUCKET_MS)
    monkeypatch.setattr(facts.pipeline, "leading", True)
    silent = "Nothing was stored in the last minute: are the agents running, and do they reach the collector?"
    fabric = api_fabric.get_fabric(facts, pb.FabricRequest(leaf="leaf01"))
    assert fabric.absent == [silent]
    assert {port.state for port in fabric.ports} == {"unknown"}
    assert not any(leaf.HasField("saturation_max") or leaf.HasField("errors") for leaf in fabric.leafs)
    heat = api_thermals.get_thermals(facts, pb.ThermalsRequest())
    assert heat.absent == [silent]
    assert not any(rack.HasField("inlet_c") or rack.HasField("power_w") for rack in heat.racks)
    job = api_job.get_job(facts, pb.JobRequest(job=slow_job(facts)))
    assert job.ts_ms == 0
    assert not job.metrics
    assert job.absent[0] == "Its GPUs: no values of the last minute."


def test_a_fleet_without_any_port_says_where_to_look(facts: ApiSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = FleetSpec(tuple(replace(node, links=()) for node in facts.index.nodes))
    monkeypatch.setattr(facts.pipeline, "index", FleetIndex(bare))
    fabric = api_fabric.get_fabric(facts, pb.FabricRequest())
    assert fabric.absent == [api_fabric.NO_LINKS]
    assert not fabric.leafs


def test_only_jobs_that_are_shown_are_looked_at(facts: ApiSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be as many jobs as GPUs: rows of 100,000 took 11 s of the collector's time, for each open page."""
    every, made = api_jobs.list_jobs(facts, pb.ListJobsRequest(ended=True)), []
    make = api_jobs._row
    monkeypatch.setattr(api_jobs, "_row", lambda facts, job, found: made.append(job.job) or make(facts, job, found))
    hurt = sum(bool(job.incidents) for job in every.jobs)
    assert len(every.jobs) > hurt + 2
    first = api_jobs.list_jobs(facts, pb.ListJobsRequest(limit=hurt + 1, ended=True))
    assert [job.job for job in first.jobs] == [job.job for job in every.jobs][: hurt + 1]
    assert first.total == every.total == len(every.jobs)
    assert made == [job.job for job in first.jobs]


def test_of_a_job_with_many_incidents_the_worst_are_sent(facts: ApiSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = api_job.get_job(facts, pb.JobRequest(job=slow_job(facts)))
    assert len(whole.incidents_json) > 1
    monkeypatch.setattr(api_job, "INCIDENTS_MAX", 1)
    cut = api_job.get_job(facts, pb.JobRequest(job=slow_job(facts)))
    assert list(cut.incidents_json) == list(whole.incidents_json)[:1]
    assert list(cut.gpus) == list(whole.gpus), "marks of GPUs come of all"


def test_leafs_and_racks_are_made_once_for_all_open_pages(facts: ApiSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, heat = (
        api_fabric.get_fabric(facts, pb.FabricRequest()),
        api_thermals.get_thermals(facts, pb.ThermalsRequest()),
    )
    for made in (api_fabric._Leafs, "_row"), (api_thermals, "_rack"):
        monkeypatch.delattr(*made)
    assert api_fabric.get_fabric(facts, pb.FabricRequest()) == fabric
    assert api_thermals.get_thermals(facts, pb.ThermalsRequest()) == heat


def test_a_port_that_is_down_has_no_traffic(facts: ApiSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    *before, newest = facts.pipeline.engine.buckets
    up, at = newest.link["link_up"].copy(), api_fabric.get_fabric(facts, pb.FabricRequest(node=SLOW[0])).ports[-1]
    assert (at.state, at.HasField("saturation")) == ("up", True)
    ports = api_fabric.layout_of(facts).ports
    up[[(facts.index.nodes[port.node].name, port.name) for port in ports].index((at.node, at.link))] = 0.0
    down = replace(newest, link={**newest.link, "link_up": up})
    monkeypatch.setattr(type(facts.pipeline.engine), "buckets", property(lambda _: (*before, down)))
    facts._kept.clear()
    (port,) = [p for p in api_fabric.get_fabric(facts, pb.FabricRequest(node=SLOW[0])).ports if p.link == at.link]
    assert port.state == "down"
    assert not any(port.HasField(name) for name in ("saturation", "tx_bytes_per_s", "rx_bytes_per_s"))


@pytest.mark.parametrize(
    ("state", "fact", "said"),
    [
        ("down", Evidence("port mlx5_3 has been down for 40 s", "link_up", 0.0, 1.0, to_ms=7000, port="mlx5_3"), ""),
        ("up", Evidence("port mlx5_3 went down 4 times", "link_downed", 4.0, 0.0, to_ms=7000, port="mlx5_3"), ""),
        ("up", Evidence("port mlx5_4 has been down for 40 s", "link_up", 0.0, 1.0, to_ms=7000, port="mlx5_4"), ""),
        (
            "up", Evidence("port mlx5_3 has been down for 40 s", "link_up", 0.0, 1.0, to_ms=7000, port="mlx5_3"),
            "Up again; at 1970-01-01T00:00:07.000Z: ",
        ),
    ],
    ids=["down", "flapped", "another port's", "up again"],
)  # fmt: skip
def test_a_port_that_is_up_again_is_not_said_to_be_down(state: str, fact: Evidence, said: str) -> None:
    incident = Incident(
        "i", IncidentKind.LINK, "port_flaps", "node", "n1", None, (("n1", None),), 5000, 4000, None, Severity.WARNING,
        0.9, RecommendedAction.ADVISE, "What the headline says.", "", (fact,), updated_ms=9000,
    )  # fmt: skip
    assert api_fabric._incident_says(incident, "mlx5_3", state) == f"{said}What the headline says."


def span(job: str = "job-7", ended_ms: int = START_MS) -> JobSpan:
    return JobSpan(job, ended_ms - 60_000, ended_ms, 8, 1)


def death(**more: Any) -> Incident:
    given: dict[str, Any] = {"severity": Severity.CRITICAL, "closed_ms": None, "since_ms": START_MS - 5_000} | more
    return Incident(
        "i1", IncidentKind.XID, "xid_79", "gpu", "r1n1", 0, (("r1n1", 0),), START_MS, given["since_ms"],
        given["closed_ms"], given["severity"], 0.9, RecommendedAction.DRAIN, "gone", "reboot", job="job-7",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("incident", "died"),
    [
        ({}, True), ({"closed_ms": START_MS}, False), ({"severity": Severity.WARNING}, False),
        ({"since_ms": START_MS - 3_600_000}, False), ({"since_ms": START_MS + 3_600_000}, False),
    ],
)  # fmt: skip
def test_a_job_died_where_it_ended_soon_after_an_open_critical_incident_began(incident: Any, died: bool) -> None:
    row = api_jobs.ended_row(span(), [death(**incident)])
    assert row.HasField("died") is died
    if died:
        assert (row.died.cause, row.died.node, row.died.gpu, row.died.incident_id) == ("xid_79", "r1n1", 0, "i1")


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("job-7r1", True),
        ("job-7-2", True),
        ("job-71", False),
        ("job-8r1", False),
        ("job-7-eval", False),
        ("job-7-eval2", False),
    ],
)
def test_a_restart_is_known_by_its_name_and_time(name: str, again: bool) -> None:
    later = [api_jobs.Running(name, [0], START_MS + 1_000), api_jobs.Running(f"{name}0", [1], START_MS - 100_000)]
    assert api_jobs.ended_row(span(), [death()], later).died.restarted_as == (name if again else "")


def test_the_job_that_died_is_listed_first_and_counted_as_the_status_counts(
    facts: ApiSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = facts.now_ms()
    gone = death(since_ms=now_ms - 65_000)
    known = [gone, *facts.open_incidents()]
    monkeypatch.setattr(facts, "open_incidents", lambda: known)
    monkeypatch.setattr(api_jobs, "incidents_by_job", lambda _: {"job-7": [gone]})
    monkeypatch.setattr(api_jobs, "ended", lambda _: {"job-7": span(ended_ms=now_ms - 60_000), "fine": span("fine")})
    reply = api_jobs.list_jobs(facts, pb.ListJobsRequest())
    assert reply.jobs[0].job == "job-7"
    assert "fine" not in {job.job for job in reply.jobs}
    assert reply.hurt == len(jobs_hurt(known)) == api_fleet.get_status(facts).jobs_hurt
    both = [job.job for job in api_jobs.list_jobs(facts, pb.ListJobsRequest(ended=True)).jobs]
    assert (both[0], both.count("job-7"), both[-1]) == ("job-7", 1, "fine")
