"""`drover doctor` on the jobs that hold nodes for probes: what would keep them from being taken, or from giving way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from drover_cli.commands import doctor
from drover_cli.doctor import probe_jobs
from drover_cli.doctor.finding import FindingState
from drover_collector.actions.run_program import Ran
from drover_collector.config import CollectorConfig
from drover_collector.probes.settings import HoldConfig, ProbesConfig
from drover_core.model.fleet import FleetSpec, NodeSpec

SPEC = FleetSpec(tuple(NodeSpec(f"gpu{n:02d}", "r1", "l1", "train", "H100", 8) for n in (1, 2, 3)), (), "f")
# As Slurm 22.05 prints them, without what is not looked at.
CONFIG = "Configuration data as of 2026\nPreemptMode      = CANCEL\nPreemptType      = preempt/partition_prio\n"
PROBES = (
    "PartitionName=probes AllowGroups=ALL AllowAccounts=ALL Default=NO GraceTime=0 Nodes=gpu[01-03]"
    " PriorityJobFactor=1 PriorityTier=0 OverSubscribe=NO PreemptMode=CANCEL State=UP TotalNodes=3"
)
ALL = "PartitionName=all Default=YES Nodes=gpu[01-03] PriorityTier=1 OverSubscribe=NO PreemptMode=CANCEL State=UP"
UNTAKEN = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"


def looked(
    partitions: Sequence[str] = (ALL, PROBES), config: str = CONFIG, hold: HoldConfig | None = None, taken: str = "",
    qos: str = "normal|\nlow|\nhigh|low,other\n",
) -> dict[FindingState, list[str]]:  # fmt: skip
    """State -> texts, of a Slurm that answers so."""
    asked: list[tuple[str, ...]] = []

    def ask(words: Sequence[str]) -> Ran:
        asked.append(tuple(words))
        match words:
            case ["scontrol", "show", "config"]:
                return Ran(0, config, "")
            case ["scontrol", "-o", "show", "partition"]:
                return Ran(0, "\n".join(partitions) + "\n", "")
            case ["sbatch", "--test-only", *_]:
                return Ran(int(bool(taken)), "", taken or "sbatch: Job 7 to start at 2026-11-22T12:00:00")
            case ["sacctmgr", *_]:
                return Ran(0, qos, "")
        raise AssertionError(words)

    settings = CollectorConfig(probes=ProbesConfig(slurm=hold or HoldConfig(partition="probes")))
    found = probe_jobs.slurm(settings, SPEC, ask)
    assert all(each.remedy for each in found if each.state is not FindingState.OK)
    assert all("--test-only" in words for words in asked if words[0] == "sbatch"), "no job is submitted"
    return {state: [each.text for each in found if each.state is state] for state in FindingState}


def test_a_partition_that_gives_way() -> None:
    found = looked()
    assert (found[FindingState.BAD], found[FindingState.WARN]) == ([], [])
    taken, partition = found[FindingState.OK]
    assert taken.startswith("Slurm takes a job --partition=probes of ")
    assert partition == "partition probes is up, below all others, and gives way"
    assert len(found[FindingState.UNKNOWN]) == 1, "the uid on the nodes"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"partitions": (ALL,)}, "Slurm has no partition probes (it has all)"),
        ({"partitions": (ALL, PROBES.replace("PriorityTier=0", "PriorityTier=1"))},
         "give way to nobody of all: PriorityTier 1 of probes is not below theirs"),
        ({"partitions": (ALL, PROBES.replace("PreemptMode=CANCEL", "PreemptMode=OFF"))}, "its PreemptMode is OFF"),
        ({"partitions": (ALL, PROBES.replace("OverSubscribe=NO", "OverSubscribe=FORCE:4"))}, "OverSubscribe=FORCE"),
        ({"partitions": (ALL, PROBES.replace("State=UP", "State=DOWN"))}, "partition probes is DOWN"),
        ({"config": CONFIG.replace("partition_prio", "none")}, "PreemptType is preempt/none"),
        ({"taken": UNTAKEN}, "Invalid account or account/partition"),
    ],
    ids=["no partition", "not below", "mode off", "oversubscribed", "down", "no preemption", "user not taken"],
)  # fmt: skip
def test_what_would_hold_nodes_for_ever_or_never(more: dict[str, object], text: str) -> None:
    (bad,) = looked(**more)[FindingState.BAD]  # type: ignore[arg-type]  # parameters by name
    assert text in bad


def test_nodes_that_are_not_in_the_partition_are_named() -> None:
    found = looked((ALL, PROBES.replace("gpu[01-03]", "gpu[01,03]")))
    assert found[FindingState.WARN] == ["gpu02 not in partition probes: probed only when drained"]
    of_pool = HoldConfig(partition="probes", pools=("infer",))
    assert looked((ALL, PROBES.replace("gpu[01-03]", "gpu99")), hold=of_pool)[FindingState.WARN] == []


def test_a_qos_that_others_preempt() -> None:
    by_qos = CONFIG.replace("partition_prio", "qos")
    assert "jobs of QOS high preempt those of low" in looked(config=by_qos, hold=HoldConfig(qos="low"))[FindingState.OK]
    (bad,) = looked(config=by_qos, hold=HoldConfig(qos="normal"))[FindingState.BAD]
    assert bad == "no QOS preempts normal: its jobs would give way to nobody"
    (bad,) = looked(config=CONFIG.replace("partition_prio", "none"), hold=HoldConfig(qos="low"))[FindingState.BAD]
    assert "PreemptType is preempt/none" in bad


def test_a_slurm_that_does_not_answer_and_programs_that_are_not_there(tmp_path: Path) -> None:
    settings = CollectorConfig(probes=ProbesConfig(slurm=HoldConfig(partition="p", sbatch=f"{tmp_path}/sbatch")))
    (found,) = probe_jobs.slurm(settings, SPEC)
    assert (found.state, "cannot be started" in found.text) == (FindingState.BAD, True)


def test_it_is_looked_at_where_the_settings_name_a_partition(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text('[[nodes]]\nnames = "n[0-2]"\ngpus = 8\n')
    config = CollectorConfig(fleet=str(tmp_path / "fleet.toml"), probes=ProbesConfig(slurm=HoldConfig(partition="p")))
    assert list(doctor.scheduler_checks(config)) == ["probe jobs"]
    assert list(doctor.scheduler_checks(CollectorConfig(fleet=config.fleet))) == []
