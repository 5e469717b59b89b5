"""What `scontrol` and `squeue` print of a large cluster is read to its end, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from drover_collector.actions import run_program as programs
from drover_collector.actions.base import ActError
from drover_collector.actions.settings import SlurmConfig
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.actions.slurm.scontrol import Scontrol

NODES = [f"n{n:04d}" for n in range(600)]
LINE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=56 CPUAlloc=0 CPUTot=224 CPULoad=0.25 AvailableFeatures=(null)"
    " Gres=gpu:8 NodeAddr={name} NodeHostName={name} Version=22.05.8 OS=Linux 6.1.0 RealMemory=2063000 AllocMem=0"
    " State=IDLE+DRAIN ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=train"
    " BootTime=2026-11-01T00:00:00 SlurmdStartTime=2026-11-01T00:00:00 CfgTRES=cpu=224,mem=2063000M,billing=224"
    " Reason=drover:{name}: xid/xid_79: GPU 0 fell off the bus [drover@2026-11-24T00:00:00]"
)


@pytest.fixture
def client(tmp_path: Path) -> Scontrol:
    """A `scontrol` that knows 600 nodes, all drained by Drover."""
    (tmp_path / "nodes").write_text("\n".join(LINE.format(name=name) for name in NODES) + "\n")
    (tmp_path / "jobs").write_text("\n".join(str(100_000 + n) for n in range(9_000)) + "\n")
    for program, file in (("scontrol", "nodes"), ("squeue", "jobs")):
        (tmp_path / program).write_text(f"#!/bin/sh\ncat {tmp_path}/{file}\n")
        (tmp_path / program).chmod(0o755)
    return Scontrol(SlurmConfig(scontrol=str(tmp_path / "scontrol")))


def test_each_node_of_a_large_cluster_counts_for_the_caps_with_its_reason(client: Scontrol) -> None:
    """Only 20 kB were read, some 25 nodes: the rest was in service for the guard, and the last one had no reason."""
    actuator = SlurmActuator(client, 10_000)
    assert actuator.survey(NODES).closed == set(NODES)
    assert {name: state.mark for name, state in actuator.observe_all(NODES).items()} == {name: name for name in NODES}


def test_each_job_is_known(client: Scontrol) -> None:
    assert len(client.jobs("n0000")) == 9_000


def test_more_than_can_be_read_is_an_error_and_not_a_part(client: Scontrol, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MOST_OUT", 100_000)
    with pytest.raises(ActError, match="scontrol printed more than 100000 characters"):
        client.nodes(NODES)
