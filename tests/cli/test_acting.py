"""`drover drain`, `isolate`, `resume`, `reset` and `reboot` over real gRPC: through the caps, refused, an exit code."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from drover_cli.main import main
from drover_collector.actions.dispatcher import ActionDispatcher
from drover_collector.actions.settings import ActConfig
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.api.service import FleetApi
from drover_collector.api.snapshot import ApiSnapshot
from drover_collector.config import CollectorConfig
from drover_collector.detectors._lib.examples import training_bucket
from drover_collector.ingest.stats import IngestStats
from drover_collector.notify import Outbox
from drover_collector.pipeline.action_review import ActionReview
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.store import Store
from drover_core.model.events import (
    Health,
    NodeOutage,
    ProbeReason,
    ProbeVerdict,
)
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.deciding import OPEN, fleet, policy
from testbed.desks import dispatcher_of
from testbed.slurm_stand_in import SlurmStandIn
from testbed.waiting import wait_until

T0 = 1_800_000_000_000
DAY_MS = 86_400_000
INDEX = fleet(16)
NODES = [node.name for node in INDEX.nodes]


@dataclass
class Scene:
    address: str
    slurm: SlurmStandIn
    desk: ActionDispatcher
    store: Store
    pipeline: Pipeline

    def in_engine(self, node: str, stage: Health) -> bool:
        duty = self.pipeline.engine.duties.get(node)
        return duty is not None and duty.stage is stage


@pytest.fixture(scope="module")
def scene(store_root: Path) -> Iterator[Scene]:
    """A collector in enforce mode; one node of each rack of four may be out. It answers in its own loop."""
    store = Store.open(f"chdb://{store_root}?database=cli_acting")
    slurm = SlurmStandIn(*NODES)
    outbox = Outbox(store, [], "http://console", now_ms=lambda: T0)
    pipeline = Pipeline(
        INDEX, store, policy("enforce", replace(OPEN, rack_ratio=0.25, job_ratio=0.25)), outbox,
        PipelineOptions(lag_ms=7000,
        now_ms=lambda: T0, ceiling="enforce"),
    )  # fmt: skip
    actuator = SlurmActuator(slurm, 10_000)
    config = ActConfig(mode="enforce", validate=False, reset_command=("/bin/sh", "-c", "cat; echo; echo all reset"))
    desk = dispatcher_of(
        store, config, [actuator], lambda _: actuator, detection=ActionReview(pipeline), now_ms=lambda: T0, look_s=0.02
    )
    pipeline.act_by(desk)
    pipeline.leading = True
    desk.start()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def serve() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        FleetApi(ApiSnapshot(pipeline, IngestStats(), CollectorConfig())).add_to(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(serve(), loop).result(120)
    yield Scene(f"127.0.0.1:{port}", slurm, desk, store, pipeline)
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(120)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    desk.stop()
    store.close()


Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(scene: Scene, capsys: pytest.CaptureFixture[str]) -> Say:
    def run(*words: str) -> tuple[int, str, str]:
        code = main([*words, "--collector", scene.address])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_a_node_goes_out_through_the_guards_caps_and_comes_back(scene: Scene, say: Say) -> None:
    code, out, _ = say("drain", "n000", "--why", "fan  replaced")
    assert (code, out) == (0, "drain n000: done: no new jobs; none runs\n")
    assert scene.slurm.held["n000"].reason == "drover:hand: fan replaced"
    wait_until(lambda: scene.in_engine("n000", Health.DRAINED), "the guard knows of it")
    code, out, err = say("drain", "n001", "--why", "likewise")
    assert code == 1
    assert "the guard holds it back: 2 of 4 nodes of rack r0 would be out (at most 1 may be)" in err
    assert "--force does it all the same" in err
    assert "DRAIN" not in scene.slurm.held["n001"].states
    assert say("drain", "n004", "--why", "another rack")[0] == 0
    code, out, _ = say("drain", "n001", "--why", "I know", "--force", "--json")
    answer = json.loads(out)
    assert (code, answer["node"], answer["act"], answer["state"]) == (0, "n001", "drain", "done")
    for node in ("n000", "n001", "n004"):
        assert say("resume", node, "--why", "done") == (0, f"resume {node}: done: gets jobs again\n", "")
    assert scene.store.outages.current()["n000"].stage is Health.HEALTHY
    audit = [(line.what, line.subject, line.why) for line in scene.store.audit.read()]
    assert ("drain", "n001", "I know") in audit
    assert ("resume", "n000", "done") in audit


def test_a_check_does_nothing_and_says_what_it_would_meet(scene: Scene, say: Say) -> None:
    assert say("drain", "n006", "--check")[:2] == (0, "drain n006: nothing is against it\n")
    assert "DRAIN" not in scene.slurm.held["n006"].states
    code, out, _ = say("resume", "n006", "--check")
    assert code == 1
    assert "it cannot be done\n  n006 was not taken out by Drover" in out
    assert say("drain", "n006", "--why", "a fan", "--force")[0] == 0
    wait_until(lambda: scene.in_engine("n006", Health.DRAINED), "it is drained")
    code, out, _ = say("resume", "n006", "--check", "--json")
    answer = json.loads(out)
    assert (code, answer["safe"], answer["stage"], answer["validates"]) == (1, False, "drained", None), (
        "it is silent here"
    )
    assert any("not probed since" in line for line in answer["grounds"])
    scene.store.probes.verdicts.write(
        [ProbeVerdict("p1", "n006", 2, False, "hbm_copy", "HBM 9 % slow", T0 + 1, ProbeReason.PERSON)]
    )
    code, out, _ = say("resume", "n006", "--check")
    assert code == 1
    assert out.startswith("resume n006: it is not safe; it is put back at once\n")
    assert "failed: HBM 9 % slow" in out
    with pytest.raises(SystemExit, match="2"):
        say("drain", "n006")
    assert say("resume", "n006", "--why", "done", "--force")[0] == 0


def test_a_job_that_would_lose_too_many_nodes_is_named_and_a_person_may_still_drain(scene: Scene, say: Say) -> None:
    bucket = training_bucket(INDEX, 0)
    jobs = np.full(INDEX.gpu_count, -1, np.int32)
    jobs[[8, 12]] = 0
    scene.pipeline.judge_now(lambda engine: engine.on_bucket(replace(bucket, jobs=jobs), bucket.end_ms + 7000))
    assert say("drain", "n008", "--why", "a fan")[0] == 0
    wait_until(lambda: scene.in_engine("n008", Health.DRAINED), "it is drained")
    reason = "the guard holds it back: 2 of 2 nodes of job 812 would be out (at most 1 may be)"
    code, out, _ = say("drain", "n012", "--check")
    assert (code, reason in out, "job 812 holds 1 of its 2 GPUs there" in out) == (1, True, False), (
        "holders are the store's"
    )
    code, _, err = say("drain", "n012", "--why", "a fan")
    assert (code, f"{reason}; --force does it all the same" in err) == (1, True)
    assert "DRAIN" not in scene.slurm.held["n012"].states
    assert say("drain", "n012", "--why", "a fan", "--force")[0] == 0
    audit = [(line.what, line.detail) for line in scene.store.audit.read(subject="n012")]
    assert ("drain (refused)", f"{reason}; --force does it all the same (over TLS an admin's)") in audit
    for node in ("n008", "n012"):
        assert say("resume", node, "--why", "done", "--force")[0] == 0
    idle = replace(bucket, start_ms=bucket.end_ms, jobs=np.full(INDEX.gpu_count, -1, np.int32))
    scene.pipeline.judge_now(lambda engine: engine.on_bucket(idle, idle.end_ms + 7000))


def test_isolate_requeues(scene: Scene, say: Say) -> None:
    scene.slurm.start("n002", "17")
    assert say("isolate", "n002", "--why", "corrupts")[:2] == (0, "isolate n002: done: closed; requeued: 17\n")
    assert say("resume", "n002", "--why", "was not it", "--force")[0] == 0


def test_a_reset_is_done_where_no_job_runs_and_a_reboot_that_nobody_set_up_is_not(scene: Scene, say: Say) -> None:
    code, _, err = say("reset", "n005", "--why", "XID 119")
    assert (code, "jobs may run on n005: drain it first, or give --force" in err) == (1, True)
    assert say("drain", "n005", "--why", "XID 119", "--force")[0] == 0
    wait_until(lambda: scene.desk.context.outages.current["n005"].stage is Health.DRAINED, "it is drained")
    wait_until(lambda: scene.in_engine("n005", Health.DRAINED), "and known to be")
    assert say("reset", "n005", "--check")[:2] == (0, "reset n005: nothing is against it\n")
    assert say("reset", "n005", "--why", "XID 119")[:2] == (0, "reset n005: done: all reset\n")
    assert scene.desk.context.outages.current["n005"].stage is Health.DRAINED, "it is out as before"
    code, _, err = say("reboot", "n005", "--why", "XID 119", "--force")
    assert (code, "no command for it: set act.reboot_command in the collector's settings" in err) == (1, True)
    code, out, _ = say("reboot", "n005", "--check")
    assert (code, "no command for it" in out) == (1, True)
    lines = [(line.what, line.why, line.detail) for line in scene.store.audit.read(subject="n005")]
    assert ("reset", "XID 119", "done: all reset") in lines
    assert ("reset (refused)", "XID 119", "jobs may run on n005: drain it first, or give --force") in lines
    assert any(what == "reboot (refused)" for what, _, _ in lines)
    assert say("resume", "n005", "--why", "done", "--force")[0] == 0


def test_a_drain_of_somebody_else_is_undone_by_no_force(scene: Scene, say: Say) -> None:
    scene.slurm.drain_by("n003", "ann", "new cables")
    code, out, _ = say("drain", "n003", "--why", "slow", "--force")
    assert (code, out) == (1, "drain n003: failed: it is drained by ann (new cables): left unchanged\n")
    code, _, err = say("resume", "n003", "--why", "fast again", "--force")
    assert code == 1
    assert "n003 was not taken out by Drover: only the person who did can put it back" in err
    assert scene.slurm.held["n003"].reason == "new cables"


def test_a_node_that_is_out_for_months_is_listed_with_what_it_costs(scene: Scene) -> None:
    scene.store.outages.write(
        [NodeOutage("n007", Health.REPAIR, T0 - 100 * DAY_MS, "i1", "no spare part", "drover", 0)]
    )
    with grpc.insecure_channel(scene.address) as channel:
        (duty,) = FleetStub(channel).ListActions(pb.ActionsRequest(node="n007"), timeout=120).duties
    assert (duty.stage, duty.gpu_hours_lost) == ("repair", 2400.0)


@pytest.mark.parametrize(
    ("words", "exit_code", "text"),
    [
        (("drain", "zz", "--why", "x"), 4, "no node 'zz' in the fleet file"),
        (("drain", "n005", "--why", "  "), 2, "say why"),
        (("isolate", "n005"), 2, "--why"),
    ],
)
def test_what_makes_no_sense_is_refused(
    say: Say, words: tuple[str, ...], exit_code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code, _, err = say(*words)
    except SystemExit as error:  # argparse
        code, err = error.code, capsys.readouterr().err  # type: ignore[assignment]  # a number
    assert code == exit_code
    assert text in err
