"""Make what release 0.1 leaves behind: a store, an agent's spool, and what that release does with them afterwards.

Run it with the code and the environment of commit 0e4187e, in a checkout of that commit (two minutes, no network):

    git worktree add ../old 0e4187e && cd ../old && make .venv/dev.stamp
    PYTHONPATH=tests .venv/bin/python ../drover/tests/data/release_0_1/make.py ../drover/tests/data/release_0_1

It writes store.tar.xz (an embedded store's folder), spool.tar.xz (an agent's) and expected.json. Detectors, engine,
action workers, probes' judgement, ingest and agent are that release's own; only their surroundings (a scheduler, a
fleet's values) are stand-ins. To be removed together with drover_proto/legacy.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import math
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import left
import scenes
from drover_agent.agent import Agent
from drover_collector.actions.desk import ActionDesk
from drover_collector.detectors.example import START_MS
from drover_collector.notify.webhook import message
from drover_collector.probes.measurements import Key
from drover_proto.events import (
    Act,
    Decision,
    Event,
    Health,
    Incident,
    IncidentKind,
    ProbeOrder,
    ProbeReason,
    ProbeResult,
    ProbeVerdict,
    Severity,
    Wanted,
)

from drover_agent.sources.base import Reading
from drover_collector.actions.settings import ActConfig
from drover_collector.actions.slurm import SlurmActuator
from drover_collector.engine import Engine, Outcome
from drover_collector.probes.judging import judge_order
from drover_collector.store import OutboxRow, ProbeRow, Store
from testbed.ingest import Collector
from testbed.slurm_stand_in import SlurmStandIn
from testbed.uplinks import power, running, settings, xid
from testbed.waiting import until, wait_until

ACT_MS = START_MS + 2 * 3_600_000
PROBE_MS = START_MS + 3 * 3_600_000
KEY = Key("NVIDIA H200", "570.1", 700.0, True, 5, 16, None, False, "PowerEdge XE9680")


def main(to: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = opened(folder)
        expected: dict[str, Any] = {"scenes": play_all(store), "act": act(store, folder), "probe": probe(store)}
        expected["order"] = asyncio.run(order(store))
        expected["outbox"] = outbox(store)
        asyncio.run(spool(store, folder))
        expected["counts"] = left.counts(store)
        expected["samples"] = {"before": left.samples(store)}
        expected["events"] = {"before": left.ids(store)}
        store.close()
        pack(folder / "store", to / "store.tar.xz")
        pack(folder / "spool", to / "spool.tar.xz")
        # What that release's own agent and collector make of it.
        store = opened(folder)
        asyncio.run(deliver(store, folder))
        expected["samples"]["after"] = left.samples(store)
        expected["events"]["after"] = left.ids(store)
        store.close()
    (to / "expected.json").write_text(json.dumps(expected, sort_keys=True, separators=(",", ":")) + "\n")


def opened(folder: Path) -> Store:
    return Store.open(f"chdb://{folder}/store", retention_days=3650)


def pack(folder: Path, file: Path) -> None:
    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(file, "w:xz", preset=9) as archive:
        archive.add(folder, folder.name, filter=plain)


# ---- what befell fleets, and what the engine of this release makes of it after a restart


def keep(store: Store, outcomes: Sequence[Outcome], events: Sequence[Event] = ()) -> None:
    """As drover_collector/pipeline_saving.py does."""
    store.write_events(events)
    store.write_judged(events)
    store.write_findings([finding for outcome in outcomes for finding in outcome.findings])
    store.write_incidents([incident for outcome in outcomes for incident in outcome.incidents])
    store.write_decisions([decision for outcome in outcomes for decision in outcome.decisions])
    store.write_health([dataclasses.asdict(change) for outcome in outcomes for change in outcome.health])


def play_all(store: Store) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, scene in scenes.SCENES.items():
        first = scenes.engine(name)
        played = list(scene.play(first, range(scene.cut)))
        outcomes = [outcome for _, _, outcome in played]
        keep(store, outcomes, [event for _, events, _ in played for event in events])
        ids_ = dict.fromkeys(incident.id for outcome in outcomes for incident in outcome.incidents)
        decisions = [decision for outcome in outcomes for decision in outcome.decisions]
        assert not first.troubles, first.troubles
        second = scenes.engine(name)
        open_ = [incident for incident in store.incidents("open") if incident.id in ids_]
        scene.restart(second, open_, decisions)
        found[name] = {"incidents": list(ids_), "after": scenes.after(scene, second)}
    return found


# ---- nodes that were taken out of service


class StopError(SystemExit):
    """Ends a thread as kill -9 ends all of them."""


class Asked:
    """Stands for the desk of probes."""

    def ask(self, node: str, why: ProbeReason, **_: object) -> str:
        return f"p-{node}-{why}"


def id_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def of_node(node: str, number: int = 0, at_ms: int = ACT_MS) -> Incident:
    return Incident(
        id_of(f"{node} {number}"), IncidentKind.XID, "xid_79", "gpu", node, number, ((node, number),), at_ms, at_ms,
        None, Severity.CRITICAL, 0.99, Wanted.DRAIN, f"XID 79 on GPU {number} of node {node}.", "Drain the node.",
        detectors=("xid",), updated_ms=at_ms,
    )  # fmt: skip


def act(store: Store, folder: Path) -> dict[str, Any]:
    nodes = [f"act{n:02d}" for n in range(1, 15)]
    slurm, clock = SlurmStandIn(*nodes), [ACT_MS]
    known = {node: of_node(node) for node in nodes}
    incidents = {incident.id: incident for incident in known.values()}
    config = ActConfig(
        mode="enforce", give_up_s=600, reboot_command=("/bin/sh", "-c", f"echo ran >> {folder}/ran"),
    )  # fmt: skip

    @contextlib.contextmanager
    def desk(step: Any = lambda _: None) -> Iterator[ActionDesk]:
        actuator = SlurmActuator(slurm, 10_000)
        made = ActionDesk(
            store, config, [actuator], dict.fromkeys(nodes, actuator).get, incidents=lambda: incidents,
            nodes=nodes, now_ms=lambda: clock[0], look_s=0.02, step=step,
        )  # fmt: skip
        made.validator = Asked()
        made.start("enforce")
        try:
            yield made
        finally:
            made.stop()

    def out(which: ActionDesk, node: str) -> None:
        incident = known[node]
        wanted = Decision(
            id_of(f"d {node}"), incident.id, clock[0], node, Wanted.DRAIN, "enforce", "act", "rule",
            f"drain {node} for xid/xid_79",
        )  # fmt: skip
        store.write_decisions([wanted])
        which.take([wanted])

    def stage(node: str, wanted: Health, begin: str = "") -> None:
        def there() -> bool:
            duty = store.duties().get(node)
            return duty is not None and duty.stage is wanted and duty.reason.startswith(begin)

        wait_until(there, f"{node} is {wanted} ({begin})")

    def proves(which: ActionDesk, node: str, passed: bool | None, request: str = "") -> None:
        text = f"node {node}: {'all as its configuration gives' if passed else 'sdc gave a wrong answer'}"
        request = request or f"p-{node}"
        which.on_verdicts(
            [
                ProbeVerdict(
                    request, node, None, passed, "", text, clock[0], ProbeReason.VALIDATE, known[node].id
                )
            ]
        )  # fmt: skip

    def also(node: str, number: int, at_ms: int) -> None:
        made = of_node(node, number, at_ms)
        incidents[made.id] = made

    slurm.drain_by("act09", "ann", "new cables")
    slurm.drain_by("act04", "root", f"drover:{known['act04'].id}: XID 79 on GPU 0 of node act04.")
    slurm.start("act04", "16")
    slurm.start("act05", "17")
    asked_ms = ACT_MS + 60_000
    with desk() as one:
        stage("act04", Health.DRAINING)
        clock[0] = asked_ms
        for node in ("act01", "act02", "act03", "act05", "act07", "act08", "act09", "act10", "act11", "act13"):
            out(one, node)
        for node in ("act01", "act02", "act03", "act07", "act08", "act10", "act11", "act13"):
            stage(node, Health.VALIDATING)
        one.drain("act06", Act.DRAIN, "it hangs", "ann")
        stage("act06", Health.DRAINED)
        one.drain("act11", Act.DRAIN, "I want to look at it", "ann")
        stage("act11", Health.DRAINED)
        also("act01", 5, asked_ms + 50_000)
        also("act02", 5, asked_ms + 1)
        also("act07", 5, asked_ms + 1)
        for node, passed in (
            ("act01", True), ("act02", True), ("act03", None), ("act07", True), ("act08", True), ("act13", False),
        ):  # fmt: skip
            proves(one, node, passed)
        stage("act01", Health.DRAINED, "resume withheld: ")
        stage("act03", Health.DRAINED, "not validated: ")
        stage("act08", Health.HEALTHY)
        stage("act13", Health.REPAIR)
        clock[0] = asked_ms + 70_000
        stage("act02", Health.VALIDATING, "resume withheld: ")
        stage("act07", Health.VALIDATING, "resume withheld: ")
        also("act07", 6, asked_ms + 80_000)
        clock[0] = asked_ms + 81_000
        proves(one, "act07", True, "p-act07-second")
        stage("act07", Health.DRAINED, "not validated: ")
        slurm.away = True
        out(one, "act14")
        wait_until(
            lambda: any(a.detail.startswith("not yet") for a in store.actions(node="act14")), "act14 is tried again"
        )
    slurm.away = False
    begun = threading.Event()

    def stop(name: str) -> None:
        if name == "begun" or begun.is_set():
            begun.set()
            raise StopError

    slurm.away = True  # nothing else is done meanwhile
    threading.excepthook = lambda _: None
    with desk(stop) as two:
        two.drain("act10", Act.REBOOT, "its driver hangs", "ann")
        assert begun.wait(20)
    store.write_incidents(incidents.values())
    return {
        "incidents": [[i.id, i.node, i.gpu, i.opened_ms] for i in incidents.values()],
        "held": {node: [sorted(held.states), held.reason, held.by] for node, held in slurm.held.items()},
        "now_ms": clock[0],
    }


# ---- what probes proved


def results(node: str, run: int, ts_ms: int, gemm: float) -> Iterator[ProbeResult]:
    """Two GPUs of a node; all well."""
    draw, request, count = np.random.default_rng([int(node[-2:]), run]), f"{node}-{run}", 0
    for probe, usual, unit in (("gemm_bf16", gemm, "TFLOP/s"), ("hbm_copy", 4302.0, "GB/s"), ("sdc", 412.0, "")):
        for gpu in range(2):
            count += 1
            value = usual if probe == "sdc" else usual * math.exp(draw.normal(0, 0.002))
            yield ProbeResult(
                f"{request}/{count}", node, gpu, probe, ts_ms, True if probe == "sdc" else None, value, unit,
                "15 shapes and types, each the same every time" if probe == "sdc" else "", request, level="quick",
                device=KEY.sku,
            )  # fmt: skip
    yield ProbeResult(
        f"{request}/end", node, None, "", ts_ms, None, None, "", "", request, level="quick", end="done", seconds=47.2,
        device=KEY.sku,
    )  # fmt: skip


def probe(store: Store) -> dict[str, Any]:
    """Two suspected GPUs, one of which is cleared; then a driver that makes one figure of all boards worse."""
    index = scenes.fleet("probe", 8, 2)
    engine = Engine(index, scenes.policy("probe"), START_MS)
    bucket = scenes.training_bucket(index, 0)
    engine.on_bucket(bucket, PROBE_MS)
    suspected = store.incidents("open")
    slow = next(i for i in suspected if i.node == "slow01" and i.cause == "clock")
    suspect = dataclasses.replace(
        slow, id=id_of("suspect"), node="probe01", gpu=1, members=(("probe01", 1),), job=None, version=1,
        cause="hbm", opened_ms=PROBE_MS, since_ms=PROBE_MS, updated_ms=PROBE_MS,
    )  # fmt: skip
    store.write_incidents([suspect])
    engine.restore([suspect], [bucket], [])
    nodes = [node.name for node in index.nodes]
    for run, driver, gemm, names in ((0, "570.1", 789.0, nodes), (1, "580.1", 749.0, nodes[:4])):
        ts_ms = PROBE_MS + 1_200_000 * (1 + run)
        key = dataclasses.replace(KEY, driver=driver)
        measured = [(name, r) for name in names for r in results(name, run, ts_ms, gemm)]
        store.write_probes([ProbeRow(r, key, "" if r.gpu is None else f"{n}{r.gpu}", "", ts_ms) for n, r in measured])
        asked = [
            ProbeOrder(
                f"{name}-{run}", name, (), "quick", (), ProbeReason.BASELINE, "asked", ts_ms - 50_000
            )
            for name in names
        ]  # fmt: skip
        if run == 0:
            asked[1] = dataclasses.replace(asked[1], why=ProbeReason.CONFIRM, incident_id=suspect.id)
        sent = [
            dataclasses.replace(o, state="sent", ts_ms=ts_ms - 40_000, protection=("none", "drained")[run])
            for o in asked
        ]
        store.write_probe_orders([*asked, *sent, *(dataclasses.replace(o, state="done", ts_ms=ts_ms) for o in sent)])
        verdicts = [judge_order(store, one, ts_ms)[0] for one in sent]
        store.write_probe_verdicts([verdict for some in verdicts for verdict in some])
        keep(store, [engine.on_verdicts(some, ts_ms) for some in verdicts])
    left = [i for i in engine.incidents.values() if i.closed_ms is None]
    last = store.probe_verdicts(request="probe03-1")
    second = Engine(index, scenes.policy("probe"), START_MS)
    second.restore(left, [bucket], [])
    again = [dataclasses.replace(v, shifts=()) for v in last]
    outcome = second.on_verdicts(again, PROBE_MS + 3_600_000)
    return {
        "suspect": suspect.id,
        "shifts": [i.id for i in left],
        "after": sorted([f.cause, f.cleared] for f in outcome.findings),
    }


def module(path: str) -> ModuleType:
    """A test of this release, for its stand-ins."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


async def order(store: Store) -> str:
    """An order that was sent to a node held by a job of Slurm, and has not ended."""
    tests = module("tests/collector/probes/test_probe_protection.py")
    async with tests.bench(store) as (collector, at), collector.agent(tests.hello(node="n0")) as agent:
        id_ = await asyncio.to_thread(at.desk.ask, "n0", ProbeReason.CONFIRM)
        await until(lambda: at.newest(id_).detail == "job 801 is pending", "why it waits is stored")
        at.holds.begin(id_)
        await agent.read("probe_request")
        await until(lambda: at.newest(id_).state == "sent", "it is sent")
    return str(id_)


def outbox(store: Store) -> str:
    """A message that was not delivered yet."""
    merged = next(
        i for i in store.incidents("closed", START_MS) if i.timeline and i.timeline[-1].text.startswith("part of")
    )
    body = message("closed", merged, merged.closed_ms or 0, "")
    store.write_outbox(OutboxRow("m1", merged.id, "ops", body, merged.closed_ms or 0))
    return merged.id


# ---- an agent, and what it could not send


async def spool(store: Store, folder: Path) -> None:
    """A minute that the collector took, half a minute that it did not."""
    async with Collector(store, now_ms=left.SPOOL_MS + 60_000) as collector:
        config = settings(folder, f"127.0.0.1:{collector.port}")
        agent = Agent(config, "n1", {"driver": "570"}, clock=left.Then(left.SPOOL_MS + 60_000))
        async with running(agent):
            for second in range(60):
                agent.accept(*power(left.SPOOL_MS + second * 1000, 400.0 + second))
            agent.accept(left.SPOOL_MS + 59_500, dated(xid("48"), left.SPOOL_MS + 59_500))
            agent.flush()
            await until(lambda: agent.spool.pending()[0] == 0, "all is stored")
            await collector.server.stop(0)
            for second in range(60, 90):
                agent.accept(*power(left.SPOOL_MS + second * 1000, 400.0 + second))
            for number, code in enumerate(("79", "31", "94")):
                agent.accept(left.SPOOL_MS + 89_500 + number, dated(xid(code), left.SPOOL_MS + 89_500 + number))
            agent.flush()
            await agent.spool.kept()


def dated(reading: Reading, ts_ms: int) -> Reading:
    return dataclasses.replace(reading, events=[dataclasses.replace(event, ts_ms=ts_ms) for event in reading.events])


async def deliver(store: Store, folder: Path) -> None:
    """The agent starts again, and a collector is there."""
    async with Collector(store, now_ms=left.SPOOL_MS + 200_000) as collector:
        agent = Agent(
            settings(folder, f"127.0.0.1:{collector.port}"),
            "n1",
            {"driver": "570"},
            clock=left.Then(left.SPOOL_MS + 200_000),
        )
        async with running(agent):
            await until(lambda: agent.spool.pending()[0] == 0, "all is stored")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
