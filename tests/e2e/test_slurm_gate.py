"""Real Slurm with `drover-agent gate` as Prolog and HealthCheckProgram. Needs root and Slurm's packages."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drover_collector.actions.settings import SlurmConfig
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.actions.slurm.scontrol import Scontrol
from drover_core.model.events import Act, Action, ActionState
from testbed.slurm import Slurm
from testbed.slurm import running as running_slurm

pytestmark = pytest.mark.system

NODES = ("gpu01", "gpu02", "gpu03", "gpu04")
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
CHECKED_S = 20  # on four nodes at once; a slow machine does not end as many processes each second as 1 would start
LONGER = f"sleep {CHECKED_S + 5}"  # a job in which each node is checked
CAUSE = "drain {node} for xid/xid_79"
PROGRAM = """#!/bin/sh
export SLURM_CONF={folder}/slurm.conf PYTHONPATH={path}
exec {python} -m drover_agent.main gate --drain --file {folder}/$SLURMD_NODENAME.json
"""

EPILOG = """#!/bin/sh
export PYTHONPATH={path}
said={folder}/epilog.$SLURM_JOB_ID
{python} -m drover_agent.main gate --deep --seconds 5 --spool {folder} --file {folder}/$SLURMD_NODENAME.json > $said
echo $? >> $said
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("gate")
    for name in ("prolog", "health"):
        program = folder / name
        path = ":".join(entry for entry in sys.path if entry)
        program.write_text(PROGRAM.format(path=path, python=sys.executable, folder=folder))
        program.chmod(0o755)
    epilog, path = folder / "epilog", ":".join(entry for entry in sys.path if entry)
    epilog.write_text(EPILOG.format(path=path, python=sys.executable, folder=folder))
    epilog.chmod(0o755)
    settings = [
        f"Prolog={folder}/prolog",
        f"Epilog={epilog}",
        "PrologFlags=Alloc",
        f"HealthCheckProgram={folder}/health",
    ]
    settings += [f"HealthCheckInterval={CHECKED_S}", "HealthCheckNodeState=ANY"]
    for node in NODES:
        write(folder, node, "pass")
    with running_slurm(folder, NODES, settings=settings) as running:
        yield running


def write(folder: Path, node: str, answer: str, age_s: float = 0.0, closed_by: str = "") -> None:
    """Write what the agent of a node would have received."""
    known = {
        "received_s": time.clock_gettime(time.CLOCK_BOOTTIME) - age_s, "answer": answer,
        "text": CAUSE.format(node=node), "incident": f"inc-{node}", "mode": "enforce",
        "closed_by": closed_by,
    }  # fmt: skip
    head = {"format": 1, "node": node, "boot": BOOT, "unanswered": "open", "age_s": 3600.0}
    whole = folder / f"{node}.new"
    whole.write_text(json.dumps({**head, "verdict": known, "faults": []}))
    whole.rename(folder / f"{node}.json")


def states(slurm: Slurm, node: str) -> frozenset[str]:
    return Scontrol(SlurmConfig(conf=f"{slurm.folder}/slurm.conf")).nodes([node])[node].states


def reason(slurm: Slurm, node: str) -> str:
    return Scontrol(SlurmConfig(conf=f"{slurm.folder}/slurm.conf")).nodes([node])[node].reason


def place(slurm: Slurm, job: str) -> str:
    """The node on which a job runs; "": on none."""
    return slurm.command("squeue", "--noheader", "--job", job, "--states=RUNNING", "--format=%N").strip()


def test_without_leave_jobs_begin_on_every_node(slurm: Slurm) -> None:
    """All gates have something against their nodes, and the guard holds: the partition lives."""
    for node in NODES:
        write(slurm.folder, node, "held")
    jobs = [slurm.submit("true", "-w", node) for node in NODES]
    for job in jobs:
        slurm.wait_for(job, "COMPLETED")
    assert not any("DRAIN" in states(slurm, node) for node in NODES)


def test_a_prolog_on_a_sick_node_requeues_the_job_elsewhere_and_drains(slurm: Slurm) -> None:
    for node in NODES:
        write(slurm.folder, node, "pass")
    slurm.command("scontrol", "update", "nodename=gpu02,gpu03,gpu04", "weight=100")  # gpu01 is the first choice
    (slurm.folder / "health").rename(slurm.folder / "health.off")  # only the prolog is asked
    write(slurm.folder, "gpu01", "refuse")
    job = slurm.submit("sleep 60")
    slurm.wait(lambda: "DRAIN" in states(slurm, "gpu01"), "the node drains")
    slurm.wait(lambda: place(slurm, job) in NODES[1:], "the job runs elsewhere")
    assert reason(slurm, "gpu01") == f"drover:inc-gpu01: {CAUSE.format(node='gpu01')}", "not Slurm's own, Prolog error"
    assert not any("DRAIN" in states(slurm, node) for node in NODES[1:])
    slurm.command("scancel", job)
    (slurm.folder / "health.off").rename(slurm.folder / "health")


def test_the_health_check_drains_with_drovers_reason_which_its_actuator_knows_as_its_own(slurm: Slurm) -> None:
    write(slurm.folder, "gpu03", "refuse")
    slurm.wait(lambda: "DRAIN" in states(slurm, "gpu03"), "slurmd's health check drains the node")
    client = Scontrol(SlurmConfig(conf=f"{slurm.folder}/slurm.conf"))
    assert reason(slurm, "gpu03") == f"drover:inc-gpu03: {CAUSE.format(node='gpu03')}"
    drain = Action("a", "d", "inc-gpu03", "gpu03", Act.DRAIN, "slurm", ActionState.INTENDED, 0, why="xid_79 on gpu03")
    done = SlurmActuator(client, 10_000).do(drain, lambda: None)
    assert done.detail.startswith("drained already")
    assert "DRAIN" not in states(slurm, "gpu04"), "the others' health checks pass"


def test_an_epilog_probes_after_the_job_and_a_machine_without_gpus_says_so(slurm: Slurm) -> None:
    write(slurm.folder, "gpu02", "pass")
    job = slurm.submit("true", "-w", "gpu02")
    slurm.wait_for(job, "COMPLETED")
    said = slurm.folder / f"epilog.{job}"
    slurm.wait(lambda: said.exists() and said.read_text().endswith("0\n"), "the epilog ends, with 0")
    assert "pass: not probed: no NVIDIA GPU here" in said.read_text()
    slurm.wait(lambda: "IDLE" in states(slurm, "gpu02"), "the node takes the next job")


def test_a_node_that_was_put_back_while_its_agent_was_away_gets_jobs_and_is_not_drained_again(slurm: Slurm) -> None:
    write(slurm.folder, "gpu04", "refuse", age_s=600)
    job = slurm.submit(LONGER, "-w", "gpu04")  # meanwhile the health check runs too
    slurm.wait_for(job, "COMPLETED")
    assert "DRAIN" not in states(slurm, "gpu04")


def test_a_node_that_drover_put_back_a_moment_ago_runs_its_first_job_and_stays_in_service(slurm: Slurm) -> None:
    """Slurm begins a job at once, before the node's agent has received that it is back."""
    for node in NODES:
        write(slurm.folder, node, "pass")
    client = Scontrol(SlurmConfig(conf=f"{slurm.folder}/slurm.conf"))
    client.update("gpu04", state="drain", reason="drover:inc-gpu04: xid_79")
    write(slurm.folder, "gpu04", "refuse", closed_by="slurm")
    job = slurm.submit(LONGER, "-w", "gpu04")
    client.update("gpu04", state="undrain")
    slurm.wait_for(job, "COMPLETED")
    assert "DRAIN" not in states(slurm, "gpu04")
