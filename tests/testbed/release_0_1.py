"""What this release makes of a store and a spool that release 0.1 left behind (tests/data/release_0_1).

`python -m testbed.release_0_1 FOLDER` opens those that were unpacked there, in a process of its own as the embedded
engine holds one path, and answers questions: a line of JSON each, the name of one of QUESTIONS and its arguments. The
answer is what was read or done, as plain JSON; the test says what it must be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "data" / "release_0_1"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text())  # what make.py noted


@dataclass
class Left:
    """The other end: the process that has opened what was left behind."""

    child: subprocess.Popen[str]

    def ask(self, question: str, *arguments: object) -> Any:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps([question, *arguments]) + "\n")
        self.child.stdin.flush()
        line = self.child.stdout.readline()
        assert line, f"{question}: the process ended with {self.child.wait(120)}"
        return json.loads(line)


@contextlib.contextmanager
def unpacked(folder: Path) -> Iterator[Left]:
    for name in ("store", "spool"):
        with tarfile.open(DATA / f"{name}.tar.xz") as archive:
            if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on; Debian 12 has 3.11.2
                archive.extraction_filter = tarfile.data_filter
            archive.extractall(folder)
    # As on the machine that wrote it: after a boot a store asks agents for all that they still keep.
    (folder / "store/boot-drover").write_bytes(Path("/proc/sys/kernel/random/boot_id").read_bytes().strip())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(DATA.parents[1]), *sys.path])}
    words = [sys.executable, "-m", "testbed.release_0_1", str(folder)]
    child = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Left(child)
    finally:
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(120)
        finally:
            child.kill()
            child.wait()


def main(folder: Path) -> None:
    from drover_collector.store import Store

    store = Store.open(f"chdb://{folder}/store", retention_days=3650)
    try:
        for line in sys.stdin:
            question, *arguments = json.loads(line)
            print(json.dumps(QUESTIONS[question](store, folder, *arguments)), flush=True)
    finally:
        store.close()


# ---- what is read


def _plain(rows: Sequence[Any]) -> list[dict[str, Any]]:
    from drover_core.model.events import to_dict

    return [to_dict(row) for row in rows]


def duties(store: Any, _folder: Path) -> dict[str, Any]:
    return {node: _plain([duty])[0] for node, duty in store.outages.current().items()}


def actions(store: Any, _folder: Path) -> list[dict[str, Any]]:
    return _plain(store.actions.newest())


def incidents(store: Any, _folder: Path) -> dict[str, Any]:
    return {i.id: _plain([i])[0] for i in [*store.incidents.newest("open"), *store.incidents.newest("closed", 0)]}


def decisions(store: Any, _folder: Path, ids: Sequence[str]) -> list[dict[str, Any]]:
    return _plain([decision for id_ in ids for decision in store.decisions.of_incident(id_)])


def verdicts(store: Any, _folder: Path, request: str) -> list[dict[str, Any]]:
    return _plain(store.probes.verdicts.read(request=request))


def orders(store: Any, _folder: Path) -> list[dict[str, Any]]:
    return _plain(store.probes.orders.between(0, 2**42))


def telemetry(store: Any, _folder: Path) -> dict[str, Any]:
    import left

    return {"samples": left.samples(store), "events": left.ids(store)}


def counts(store: Any, _folder: Path) -> dict[str, int]:
    import left

    return left.counts(store)


def messages(store: Any, _folder: Path, ids: Sequence[str]) -> list[list[str]]:
    """Why each of these incidents ended, as receivers get it, and as which other one it goes on."""
    from drover_collector.notify.receivers.webhook import message

    found = [next(i for i in store.incidents.newest("closed", 0) if i.id == id_) for id_ in ids]
    sent = [json.loads(message("closed", i, i.closed_ms or 0, ""))["data"] for i in found]
    return [[data["closed_because"], data.get("merged_into", "")] for data in sent]


def outbox(store: Any, _folder: Path) -> list[list[object]]:
    """Messages that wait for their receivers: their incident, whether it goes on as another one, and as which."""
    from drover_collector.notify.wording import read_message

    waiting = [(row, read_message(row.payload_json.encode(), {})) for row in store.outbox.pending()]
    return [[row.incident_id, found.merged, found.merged_into] for row, found in waiting]


def news(store: Any, _folder: Path, ids: Sequence[str]) -> list[str]:
    from drover_collector.notify.incident_updates import of_decisions

    return [found.kind for found in of_decisions([d for id_ in ids for d in store.decisions.of_incident(id_)])]


# ---- what is done


def scene(store: Any, _folder: Path, name: str, ids: Sequence[str]) -> dict[str, Any]:
    """The second part of a scene, by an engine that knows of the first what the store says."""
    import scenes

    subject, engine = scenes.SCENES[name], scenes.engine(name)
    found = [i for i in store.incidents.newest("open") if i.id in ids]
    subject.restart(engine, found, [d for i in ids for d in store.decisions.of_incident(i)])
    after = scenes.after(subject, engine)
    known = [i for i in engine.incidents.values() if i.id in ids]
    return after | {"why": sorted({i.snapshot_of("hang").get("why", "") for i in known})}


def worsened(store: Any, _folder: Path, id_: str) -> list[str]:
    """The summary of an incident before and after its root cause, which is milder, is reported once more."""
    import scenes

    from drover_collector.incidents.book import IncidentBook

    (before,) = [i for i in store.incidents.newest("open") if i.id == id_]
    book = IncidentBook(scenes.SCENES["life"].index, dict.fromkeys(before.detectors), lambda _, asked: asked)
    book.restore([before])
    root = [f for f in store.findings.between(0, 2**42, node=before.node) if f.detector == "memory"][-1]
    book.apply([replace(root, ts_ms=before.updated_ms + 1000)], before.updated_ms + 1000, closing=False)
    return [before.summary, book.records[id_].incident.summary]


def shifted(store: Any, _folder: Path, ids: Sequence[str]) -> list[list[object]]:
    """What follows when a node of a configuration that had lost something no longer shows it."""
    import scenes

    from drover_collector.detectors._lib.examples import START_MS
    from drover_collector.engine.engine import Engine

    index = scenes.fleet("probe", 8, 2)
    engine = Engine(index, scenes.policy("probe"), START_MS)
    engine.restore([i for i in store.incidents.newest("open") if i.id in ids], [scenes.training_bucket(index, 0)], [])
    last = [replace(v, shifts=(), shifted=()) for v in store.probes.verdicts.read(request="probe03-1")]
    outcome = engine.on_verdicts(last, last[0].ts_ms + 3_600_000)
    return sorted([f.cause, f.cleared] for f in outcome.findings)


def again(store: Any, _folder: Path, node: str, foreign: bool | None) -> list[str]:
    """What is decided two hours after a node could not be drained. `foreign` None: as it is stored."""
    from drover_collector.fleet.index import FleetIndex
    from drover_collector.policy.decider import Decider
    from drover_core.model.fleet import FleetSpec, NodeSpec
    from testbed.deciding import decide, policy

    subject = Decider(FleetIndex(FleetSpec((NodeSpec(node, gpus=8),))), policy("enforce"), "enforce")
    known = [i for i in store.incidents.newest("open") if i.node == node]
    rule = subject.judge(known[0], known[0].action).rule
    subject.restore([replace(d, rule=rule) for i in known for d in store.decisions.of_incident(i.id)], known)
    failed = store.actions.newest(node=node)
    subject.take_failed(failed if foreign is None else [replace(a, foreign=foreign) for a in failed])
    made, _ = decide(subject, known, failed[-1].ts_ms + 2 * 3_600_000)
    return [decision.outcome for decision in made]


def act(store: Any, folder: Path) -> dict[str, Any]:
    """The desk of actions goes on: the scheduler of before, and probes that are asked for."""
    from drover_collector.actions.settings import ActConfig
    from drover_collector.actions.slurm.actuator import SlurmActuator
    from drover_collector.actions.slurm.scontrol import SlurmNode
    from drover_collector.engine.node_state import NodeNow
    from drover_core.model.events import (
        Act,
        ActionState,
        Health,
        ProbeReason,
        ProbeVerdict,
    )
    from testbed.desks import Detected, dispatcher_of
    from testbed.slurm_stand_in import SlurmStandIn
    from testbed.waiting import wait_until

    left = EXPECTED["act"]
    slurm, asked, clock = SlurmStandIn(*left["held"]), list[str](), [left["now_ms"] + 1000]
    for node, (states, reason, by) in left["held"].items():
        slurm.held[node] = SlurmNode(node, frozenset(states), 1, reason=reason, by=by)
    slurm.start("act04", "16")
    slurm.start("act05", "17")
    known = {i.id: i for i in store.incidents.newest("open") if (i.node or "").startswith("act")}

    class Probes:
        def ask(self, node: str, why: ProbeReason, **_: object) -> str:
            asked.append(node)
            return f"again-{node}"

    actuator = SlurmActuator(slurm, 10_000)
    config = ActConfig(
        mode="enforce", give_up_s=600, reboot_command=("/bin/sh", "-c", f"echo ran >> {folder}/ran"),
    )  # fmt: skip
    desk = dispatcher_of(
        store, config, [actuator], dict.fromkeys(slurm.held, actuator).get,
        detection=Detected(lambda: known, lambda _: NodeNow(clock[0] + 1, (clock[0] + 1,) * 8)),
        nodes=tuple(slurm.held), now_ms=lambda: clock[0], look_s=0.02,
    )  # fmt: skip
    desk.returns.validator = Probes()
    desk.start("enforce")

    def stage(node: str, wanted: Health) -> None:
        wait_until(
            lambda: (d := store.outages.current().get(node)) is not None and d.stage is wanted, f"{node} is {wanted}"
        )

    try:
        stage("act14", Health.VALIDATING)
        slurm.finish("act04")
        stage("act04", Health.DRAINED)
        early = sorted(asked)
        clock[0] += 60_000
        stage("act01", Health.VALIDATING)
        incident = known[store.outages.current()["act02"].incident_id]
        more = replace(incident, id="0" * 16, gpu=6, members=(("act02", 6),), opened_ms=clock[0] - 1)
        known[more.id] = more
        passed = ProbeVerdict(
            "again-act02", "act02", None, True, "", "all well", clock[0], ProbeReason.VALIDATE, incident.id
        )
        desk.on_verdicts([passed])
        stage("act02", Health.DRAINED)
        slurm.finish("act05")
        stage("act05", Health.VALIDATING)
        (reboot,) = [a for a in store.actions.newest(node="act10") if a.action is Act.REBOOT]
        return {
            "early": early,
            "asked": sorted(asked),
            "waits": {node: duty.withheld.value for node, duty in store.outages.current().items()},
            "reboot": [reboot.state is ActionState.FAILED, (folder / "ran").exists()],
        }
    finally:
        desk.stop()


def deliver(store: Any, folder: Path) -> dict[str, Any]:
    """The agent starts with its spool, and a collector with its store; which events came."""
    import left

    from drover_agent.runtime.agent import Agent
    from testbed.ingest import Collector
    from testbed.uplinks import running, settings
    from testbed.waiting import until

    async def sent() -> list[str]:
        async with Collector(store, now_ms=left.SPOOL_MS + 200_000) as collector:
            config = settings(folder, f"127.0.0.1:{collector.port}")
            agent = Agent(config, "n1", {"driver": "570"}, clock=left.Then(left.SPOOL_MS + 200_000))
            async with running(agent):
                await until(lambda: agent.spool.pending()[0] == 0, "all is stored")
                await until(lambda: any(e.code == "agent_started" for e in collector.events), "all is judged")
            return [event.id for event in collector.events]

    return {"sent": asyncio.run(sent())} | telemetry(store, folder)


QUESTIONS: Mapping[str, Callable[..., Any]] = {
    question.__name__: question
    for question in (
        duties, actions, incidents, decisions, verdicts, orders, telemetry, counts, messages, outbox, news, scene,
        worsened, shifted, again, act, deliver,
    )
}  # fmt: skip


if __name__ == "__main__":
    sys.path.insert(0, str(DATA))
    main(Path(sys.argv[1]))
