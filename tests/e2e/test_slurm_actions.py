"""Real Slurm, real agent, /dev/kmsg, two real collectors on one store: what the active one does to nodes, and what the
other never does. Needs root and Slurm's packages."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from drover_agent.main import main
from drover_cli.doctor import schedulers
from drover_cli.doctor.finding import FindingState
from drover_collector.actions.settings import ActConfig, SlurmConfig
from drover_collector.actions.slurm.scontrol import Scontrol, SlurmNode
from drover_collector.config import CollectorConfig
from drover_core.model.fleet import load_toml
from drover_proto import fleet_pb2 as pb
from testbed.acting import Acting, acting
from testbed.front import front
from testbed.killing import Killed
from testbed.nvml import FakeNvml, build
from testbed.slurm import Slurm
from testbed.slurm import running as running_slurm
from testbed.system_processes import running
from testbed.waiting import wait_until

pytestmark = pytest.mark.system

KILLED = ("n1", "n2", "n3")  # of those on which a third collector is killed
NODES = ("gpu01", "gpu02", "gpu03", "gpu04", "gpu05", "gpu06", *KILLED)
# scontrol, but for the call in which it kills the collector, its parent: before it is made, or when it is done.
SCONTROL = """#!/bin/sh
here=$(dirname "$0")
die() { [ "$(cat "$here/kill_at" 2>/dev/null)" = "scontrol $1" ] && kill -9 $PPID && exec sleep 0.2; }
die "$1 before"
/usr/bin/scontrol "$@"
status=$?
die "$1 after"
exit $status
"""
SLOW_S = 300.0  # Slurm takes its time for a requeued job


class Scene(NamedTuple):
    slurm: Slurm
    active: Acting
    standby: Acting

    def node(self, name: str) -> SlurmNode:
        return Scontrol(SlurmConfig(conf=f"{self.slurm.folder}/slurm.conf")).nodes([name])[name]

    def states(self, name: str) -> frozenset[str]:
        return self.node(name).states


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("acting")
    (folder / "slurm").mkdir()
    (folder / "front").mkdir()
    with (
        running_slurm(folder / "slurm", NODES) as slurm,
        front(folder / "front") as server,
        acting(folder / "one", slurm, server.url("acting")) as one,
    ):
        wait_until(lambda: one.role() == "active", "one is active")
        with acting(folder / "two", slurm, server.url("acting")) as two:
            assert two.role() == "standby"
            yield Scene(slurm, one, two)
            assert (one.role(), two.role()) == ("active", "standby")
        lines = (folder / "two" / "drover_collector.main.log").read_text().splitlines()
        acted = [line for line in lines if "drover_collector.actions." in line and "drain" in line]
        assert acted == [], "the one without the lease has done nothing"


def test_xid_79_in_the_kernel_log_drains_the_node_with_the_incident_in_its_reason(scene: Scene, tmp_path: Path) -> None:
    """The agent speaks to the collector that does not act; the other one acts, once."""
    if shutil.which("gcc") is None:
        pytest.skip("the stand-in for NVML is compiled with gcc: apt-get install gcc libc6-dev")
    fake = FakeNvml(tmp_path / "nvml.script", build(tmp_path))
    fake.healthy(8)
    job = scene.slurm.submit("sleep 600", "-w", "gpu01")
    scene.slurm.wait_for(job, "RUNNING")
    args = ["run", "--set", "node=gpu01", "--set", f'collectors=["{scene.standby.agents}"]']
    args += ["--set", f"spool.dir={tmp_path}/spool", "--set", "kmsg_accept_user_facility=true", "--set", "batch_s=1"]
    args += ["--set", f"gate.file={tmp_path}/gate.json"]
    gate = partial(main, ["gate", f"--file={tmp_path}/gate.json"])
    with running(tmp_path, "drover_agent.main", *args, env={**os.environ, **fake.env()}):
        wait_until(lambda: scene.active.reports("gpu01", 0), "the agent reports")
        assert gate() == 0
        with Path("/dev/kmsg").open("w") as kernel_log:
            kernel_log.write(
                "<4>NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=drover-test, GPU has fallen off the bus.\n"
            )
        wait_until(lambda: "DRAIN" in scene.states("gpu01"), "the node drains")
        wait_until(lambda: gate() == 1, "the collector that does not act has its agent's gate refuse jobs")
    wait_until(lambda: [a for a in scene.active.actions("gpu01") if a.state == "done"], "the outcome is stored")
    (action,) = scene.active.actions("gpu01")
    assert (action.act, action.by, action.actuator) == ("drain", "drover", "slurm")
    assert action.incident_id
    assert scene.node("gpu01").reason.startswith(f"drover:{action.incident_id}: xid/xid_79: ")
    assert scene.slurm.states()[job] == "RUNNING", "a drain lets jobs end"
    assert scene.active.stage("gpu01") == "draining"
    scene.slurm.command("scancel", job)
    wait_until(partial(_empty, scene, "gpu01"), "its jobs are gone", SLOW_S)
    assert "DRAIN" in scene.states("gpu01"), "it comes back when it is validated, not when it is empty"


def _empty(scene: Scene, node: str) -> bool:
    return scene.active.stage(node) in ("drained", "validating")


def test_isolate_requeues_the_job_which_starts_elsewhere(scene: Scene) -> None:
    job = scene.slurm.submit("sleep 600", f"--exclude=gpu01,gpu04,gpu05,gpu06,{','.join(KILLED)}")
    scene.slurm.wait_for(job, "RUNNING")
    stays = scene.slurm.submit("sleep 600", "--no-requeue", "-w", "gpu04")
    scene.slurm.wait_for(stays, "RUNNING")
    first = scene.slurm.command("squeue", "--noheader", "--job", job, "--format=%N").strip()
    reply = scene.active.act("isolate", first, "it corrupts data")
    assert reply.state == "done"
    assert reply.detail == f"closed; requeued: {job}"
    assert scene.node(first).reason == "drover:hand: it corrupts data"

    def elsewhere() -> bool:
        fields = scene.slurm.command("squeue", "--noheader", "--job", job, "--format=%T %N").split()
        return len(fields) == 2 and fields[0] == "RUNNING" and fields[1] != first

    wait_until(elsewhere, "the job runs on another node", SLOW_S)
    reply = scene.active.act("isolate", "gpu04", "likewise")
    assert reply.detail == (
        f"closed; requeued: no job; Slurm does not let be requeued, and run on to their end: {stays}"
    )
    assert scene.slurm.states()[stays] == "RUNNING"
    scene.slurm.command("scancel", job, stays)
    for node in (first, "gpu04"):
        wait_until(partial(_empty, scene, node), f"{node} is empty", SLOW_S)
        assert scene.active.act("resume", node, "the test is over", force=True).detail == "gets jobs again"
        assert "DRAIN" not in scene.states(node)


def test_a_drain_of_somebody_else_stays(scene: Scene) -> None:
    scene.slurm.command("scontrol", "update", "nodename=gpu05", "state=drain", "reason=new cables")
    reply = scene.active.act("drain", "gpu05", "it is slow")
    assert (reply.state, reply.detail) == ("failed", "it is drained by root (new cables): left unchanged")
    with pytest.raises(grpc.RpcError) as refused:
        scene.active.act("resume", "gpu05", "it is fast again", force=True)
    assert "was not taken out by Drover" in (refused.value.details() or "")
    assert scene.node("gpu05").reason == "new cables"
    scene.slurm.command("scontrol", "update", "nodename=gpu05", "state=undrain")
    # and one that was ours, until somebody took it over
    assert scene.active.act("drain", "gpu05", "it is slow").state == "done"
    scene.slurm.command("scontrol", "update", "nodename=gpu05", "state=drain", "reason=mine now")
    wait_until(lambda: scene.active.stage("gpu05") == "healthy", "the collector has seen it")
    with pytest.raises(grpc.RpcError):
        scene.active.act("resume", "gpu05", "it is fast again", force=True)
    assert scene.node("gpu05").reason == "mine now"
    assert [a.state for a in scene.active.actions("gpu05") if a.act == "drain"] == ["failed", "undone"]


def test_doctor_asks_slurm_and_changes_nothing(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text("".join(f'[[nodes]]\nnames = "{name}"\n' for name in (*NODES, "gpu99")))
    settings = SlurmConfig(enabled=True, conf=f"{scene.slurm.folder}/slurm.conf")
    before = [scene.states(name) for name in NODES]
    found = schedulers.slurm(CollectorConfig(act=ActConfig(slurm=settings)), load_toml(tmp_path / "fleet.toml"))
    assert [(each.state, each.text) for each in found[:2]] == [
        (FindingState.OK, f"answers, and knows {len(NODES)} of {len(NODES) + 1} nodes of the fleet file"),
        (FindingState.WARN, "does not know gpu99: they cannot be drained"),
    ]
    assert [scene.states(name) for name in NODES] == before


def test_the_one_without_the_lease_refuses(scene: Scene) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        scene.standby.act("drain", "gpu06", "it is slow")
    assert "not the active one" in (refused.value.details() or "")
    assert "DRAIN" not in scene.states("gpu06")


def test_slurmctld_is_stopped_and_started_again_in_the_middle(scene: Scene) -> None:
    scene.slurm.stop("slurmctld")
    reply = scene.active.act("drain", "gpu06", "slow")
    assert reply.state == "intended", "it cannot be done now, and is not forgotten"
    scene.slurm.start_controller()

    def done() -> bool:
        return [a.state for a in scene.active.actions("gpu06")] == ["done"]

    wait_until(done, "the drain is done once slurmctld is back", SLOW_S)
    assert scene.node("gpu06").reason == "drover:hand: slow"
    assert "does not answer" not in " ".join(scene.active.stub.GetStatus(pb.StatusRequest(), timeout=120).troubles)


def test_a_collector_killed_in_the_middle_has_changed_slurm_once_when_the_next_has_ended(
    scene: Scene, tmp_path: Path
) -> None:
    """Between the drain and the requeue of an isolation, after the requeue, after a resume, after an advice: counted in
    slurmctld's own log. Every other step: test_action_killed.py."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    (tmp_path / "squeue").symlink_to("/usr/bin/squeue")
    settings = f'[act.slurm]\nenabled = true\nscontrol = "{scontrol}"\nconf = "{scene.slurm.folder}/slurm.conf"\n'
    jobs = [scene.slurm.submit("sleep 600", "-w", node) for node in ("n1", "n2")]
    for job in jobs:
        scene.slurm.wait_for(job, "RUNNING")
    seen = len(log(scene))

    def logged(words: str) -> int:
        return log(scene)[seen:].count(words)

    with Killed(tmp_path, {"n1": "by_hand", "n2": "by_hand", "n3": "advise"}, settings) as killed:
        for node, job, at in (("n1", jobs[0], "scontrol update after"), ("n2", jobs[1], "scontrol requeue after")):
            killed.dies(at, partial(killed.ask, "isolate", node))
            killed.start()
            assert killed.ended(node, "isolate").state == "done"
            assert logged(f"update_node: node {node} state set to DRAINING") == 1, at
            wait_until(partial(restarted, scene, job), "it was requeued", SLOW_S)
            assert restarted(scene, job) == "1", at
        killed.dies("scontrol update after", partial(killed.ask, "resume", "n1"))
        killed.start()
        assert killed.ended("n1", "resume").state == "done"
        assert "DRAIN" not in scene.states("n1")
        assert logged("update_node: node n1 state set to IDLE") == 1
        killed.dies("scontrol update after", partial(killed.fault, "n3"))
        killed.start()
        assert killed.ended("n3", "advise").state == "done"
        assert scene.node("n3").weight == 10_000
        assert logged("nodes n3 weight set to: 10000") == 1


def log(scene: Scene) -> str:
    return (scene.slurm.folder / "slurmctld.log").read_text()


def restarted(scene: Scene, job: str) -> str:
    """How often Slurm has started it again; empty: not yet."""
    times = re.search(r"Restarts=(\d+)", scene.slurm.command("scontrol", "show", "job", job))
    return "" if times is None or times[1] == "0" else times[1]
