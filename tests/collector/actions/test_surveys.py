"""What schedulers say of all nodes: who is closed, and whose slurmd or kubelet answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drover_collector.actions.kubernetes.actuator import KubernetesActuator
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.actions.slurm.scontrol import states_of
from drover_collector.engine.node_state import Survey
from testbed.slurm_stand_in import SlurmStandIn


@pytest.mark.parametrize(
    ("shown", "closed", "answers"),
    [
        ("IDLE", False, True),
        ("MIXED+DRAIN", True, True),
        ("DOWN", True, True),  # an administrator set it, or its slurmd restarted
        ("IDLE*", False, False),
        ("ALLOCATED+NOT_RESPONDING", False, False),
        ("DOWN*+DRAIN", True, False),
        ("IDLE+CLOUD+POWERED_DOWN", True, None),
        ("IDLE~", True, None),
        ("DOWN+REBOOT_ISSUED", True, None),
        ("UNKNOWN", True, None),
    ],
)
def test_slurm_says_whose_slurmd_answers(shown: str, closed: bool, answers: bool | None) -> None:
    slurm = SlurmStandIn("n1")
    slurm.held["n1"] = replace(slurm.held["n1"], states=states_of(shown.split("+")))
    expected = Survey({"n1"} if closed else set(), {} if answers is None else {"n1": answers})
    assert SlurmActuator(slurm, 10_000).survey(["n1", "unknown"]) == expected


def test_kubernetes_says_whose_kubelet_reports() -> None:
    class Client:
        def statuses(self) -> dict[str, str]:
            return {
                "n1": "Ready", "n2": "Ready,SchedulingDisabled", "n3": "NotReady", "n4": "Unknown", "strange": "Ready",
            }  # fmt: skip

    actuator = KubernetesActuator(Client(), ())  # type: ignore[arg-type]  # all that a survey asks of it
    found = actuator.survey(["n1", "n2", "n3", "n4", "n5"])
    assert found.closed == {"n2", "n3", "n4"}
    assert found.answers == {"n1": True, "n2": True, "n3": False, "n4": False}, "n5 is unknown to the API server"
