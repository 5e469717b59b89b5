"""Drift: what differs from the peers, and what only looks so."""

from __future__ import annotations

import pytest

from drover_collector.detectors._lib.examples import START_MS, small_fleet, training_bucket
from drover_collector.detectors._lib.inventory import MAX_VALUES, UNKNOWN, Inventory
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.drift import detector as drift
from drover_collector.detectors.drift.texts import (
    ATTRIBUTES,
    NIC,
    Attribute,
    Deviation,
    compare,
    finding,
)
from drover_collector.engine.engine import Engine
from drover_collector.incidents.incident import opened
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    Finding,
    Health,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
    from_dict,
    to_dict,
)

MINUTE, HOUR = 60_000, 3_600_000
INDEX = small_fleet(16, 8, 4)  # four racks of four nodes


class Fleet:
    """Inventories that nodes reported, and the detector's findings at a time."""

    def __init__(self) -> None:
        self.findings = Inventory(INDEX)
        self.facts = {node.name: self._facts() for node in INDEX.nodes}
        for name in self.facts:
            self.findings.update(name, self.facts[name], START_MS)

    @staticmethod
    def _facts() -> dict[str, str]:
        facts = {"driver_version": "570.172.08", "host.kernel": "5.15.0-1071", "nic.mlx5_0.firmware": "28.39.1002"}
        facts["nic.mlx5_0.board"] = "MT_0000000838"
        for slot in range(8):
            mine = {"model": "H100", "vbios": "96.00.A5.00.01", "power_limit_set_w": "700", "ecc_mode": "on"}
            facts |= {f"gpu{slot}.{key}": value for key, value in mine.items()}
        return facts

    def change(self, node: int, at_ms: int, **facts: str) -> None:
        """`driver_version`, or `gpu3__vbios` for what the agent calls gpu3.vbios; `all__KEY`: of all its GPUs."""
        name = INDEX.nodes[node].name
        for key, value in facts.items():
            if key.startswith("all__"):
                self.facts[name] |= {f"gpu{slot}.{key[5:]}": value for slot in range(8)}
            else:
                self.facts[name][key.replace("__", ".")] = value
        self.findings.update(name, self.facts[name], START_MS + at_ms)

    def look(self, at_ms: int) -> list[Finding]:
        bucket = training_bucket(INDEX, 0)
        found, _ = drift.detect(Window(INDEX, (bucket,), True, (), START_MS, self.findings), None, START_MS + at_ms)
        return found


def test_an_old_driver_is_reported_once_it_has_settled() -> None:
    fleet = Fleet()
    fleet.change(5, HOUR, driver_version="535.54.03")
    assert fleet.look(HOUR + 5 * MINUTE) == []
    (found,) = fleet.look(HOUR + 7 * MINUTE)
    assert (found.kind, found.cause, found.scope, found.node) == (IncidentKind.DRIFT, "driver", "node", "n05")
    assert (found.severity, found.action) == (Severity.WARNING, RecommendedAction.WATCH)
    assert found.since_ms == START_MS + HOUR
    assert "535.54.03" in found.summary
    assert "15 of 16" in found.summary


def test_one_node_that_is_ahead_is_a_note_until_nobody_follows_for_two_hours() -> None:
    fleet = Fleet()
    fleet.change(5, HOUR, driver_version="580.65.06")
    (found,) = fleet.look(2 * HOUR)
    assert (found.severity, found.action) == (Severity.INFO, RecommendedAction.NONE)
    assert "an older version" in found.summary
    (found,) = fleet.look(3 * HOUR + MINUTE)
    assert (found.severity, found.action) == (Severity.WARNING, RecommendedAction.WATCH)
    assert "silence it until the others follow" in found.advice


def test_a_rollout_is_no_fault_of_the_rest_and_who_was_missed_is_reported_when_it_rests() -> None:
    fleet = Fleet()
    for n in range(15):  # a node an hour; the last one is missed
        fleet.change(n, (n + 1) * HOUR, driver_version="580.65.06")
        findings = fleet.look((n + 1) * HOUR + 30 * MINUTE)
        assert [f.severity for f in findings] in ([], [Severity.INFO])  # the very first looks like a trial
    assert fleet.look(40 * HOUR) == []
    (found,) = fleet.look((15 + 73) * HOUR)
    assert (found.node, found.cause, found.severity) == ("n15", "driver", Severity.WARNING)


def test_a_planned_power_cap_on_a_rack_is_no_drift_and_a_single_gpu_with_a_low_limit_is() -> None:
    fleet = Fleet()
    for n in range(4, 8):  # within five minutes, as agents look
        fleet.change(n, HOUR + n * MINUTE, all__power_limit_set_w="500")
        assert fleet.look(HOUR + n * MINUTE + 1000) == []
    assert fleet.look(3 * HOUR) == []
    fleet.change(12, 3 * HOUR, gpu3__power_limit_set_w="500")
    (found,) = fleet.look(4 * HOUR)
    assert (found.node, found.gpu, found.cause, found.action) == ("n12", 3, "power_limit", RecommendedAction.ADVISE)


def test_a_limit_above_the_others_is_a_note() -> None:
    fleet = Fleet()
    fleet.change(12, HOUR, gpu3__power_limit_set_w="750")
    assert [f.severity for f in fleet.look(2 * HOUR)] == [Severity.INFO]


def test_all_gpus_of_a_node_alike_are_one_finding_of_the_node() -> None:
    fleet = Fleet()
    fleet.change(2, HOUR, all__ecc_mode="off", all__vbios="90.00.01.00.01")
    (found,) = fleet.look(2 * HOUR)
    assert (found.scope, found.node, found.gpu, found.cause) == ("node", "n02", None, "ecc_mode")
    assert len(found.evidence) == 2


def test_firmware_of_an_adapter_is_compared_among_the_same_boards() -> None:
    fleet = Fleet()
    fleet.change(3, HOUR, nic__mlx5_0__firmware="26.33.1048")
    assert [f.cause for f in fleet.look(2 * HOUR)] == ["nic_firmware"]
    fleet.change(3, HOUR, nic__mlx5_0__board="MT_0000000223")  # another card has another firmware
    assert fleet.look(2 * HOUR) == []


def test_a_second_standard_and_a_fleet_without_agreement_are_no_drift() -> None:
    fleet = Fleet()
    for n in (0, 5, 10):  # a fifth of the nodes, found so
        fleet.facts[f"n{n:02d}"]["driver_version"] = "535.54.03"
    fleet.findings = Inventory(INDEX)
    for name, facts in fleet.facts.items():
        fleet.findings.update(name, facts, START_MS)
    assert fleet.look(HOUR) == []


def test_values_that_are_not_reported_are_unknown_and_no_drift() -> None:
    fleet = Fleet()
    fleet.change(5, HOUR, gpu3__ecc_mode="")
    assert fleet.look(2 * HOUR) == []
    fleet.change(5, 2 * HOUR, gpu3__ecc_mode="on")  # back to its former value: nothing has changed
    assert fleet.findings.gpu["ecc_mode"].changed_ms.max() == 0


def test_what_most_have_not_reported_is_not_judged() -> None:
    findings = Inventory(INDEX)
    for n in range(5):
        findings.update(f"n{n:02d}", {"driver_version": "570" if n else "535"}, START_MS)
    found, _ = drift.detect(
        Window(INDEX, (training_bucket(INDEX, 0),), True, (), START_MS, findings), None, START_MS + HOUR
    )
    assert found == []


def test_an_inventory_is_bounded_and_strangers_are_left_out() -> None:
    findings = Inventory(INDEX)
    findings.update("nobody", {"driver_version": "570"}, START_MS)
    assert findings.version == 0
    findings._numbers = {str(n): n for n in range(MAX_VALUES)}
    findings.values = list(findings._numbers)
    findings.update("n00", {"driver_version": "another"}, START_MS)
    assert findings.node["driver"].codes[0] == UNKNOWN


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [("570.9", "570.10", -1), ("96.00.A5.00.01", "96.00.A5.00.01", 0), ("6.8.0-45", "5.15.0-1071", 1)],
)
def test_versions_compare_by_their_numbers(a: str, b: str, expected: int) -> None:
    assert compare(a, b) == expected


def test_a_vbios_is_compared_as_bytes() -> None:
    fleet = Fleet()
    fleet.change(5, HOUR, gpu3__vbios="96.00.74.00.1C")
    (found,) = fleet.look(2 * HOUR)
    assert (found.cause, found.severity) == ("vbios", Severity.WARNING)
    assert compare("96.00.74.00.1C", "96.00.A5.00.01", 16) == -1


def test_a_planned_cap_that_is_lifted_node_by_node_is_reported_nobody_and_one_forgotten_is() -> None:
    fleet = Fleet()
    for node in range(4):
        fleet.change(node, HOUR + node * MINUTE, all__power_limit_set_w="525")
    assert fleet.look(2 * HOUR) == []
    for node in range(3):
        fleet.change(node, 3 * HOUR + node * MINUTE, all__power_limit_set_w="700")
        assert fleet.look(3 * HOUR + (node + 1) * MINUTE) == []
    (found,) = fleet.look(4 * HOUR)
    assert (found.cause, found.node) == ("power_limit", "n03")


def test_who_mends_one_of_two_does_not_end_the_incident_of_the_other() -> None:
    fleet, state = Fleet(), drift.DriftState()
    fleet.findings = Inventory(INDEX)
    for number, node in enumerate(INDEX.nodes):
        odd = {"gpu3.ecc_mode": "off"} if number in (2, 9) else {}
        fleet.findings.update(node.name, fleet.facts[node.name] | odd, START_MS)
    window = Window(INDEX, (training_bucket(INDEX, 0),), True, (), START_MS, fleet.findings)
    found, state = drift.detect(window, state, START_MS + HOUR)
    assert {f.node for f in found} == {"n02", "n09"}
    fleet.findings.update("n02", fleet.facts["n02"], START_MS + HOUR)
    found, state = drift.detect(window, state, START_MS + HOUR + 5 * MINUTE)
    assert {f.node for f in found} == {"n09"}


def test_a_restart_forgets_nobody_that_was_reported_of() -> None:
    """Two differ; one is repaired after a restart: that undoes a planned setting only if none was reported before."""
    fleet, state = Fleet(), drift.DriftState()
    fleet.findings = Inventory(INDEX)
    for number, node in enumerate(INDEX.nodes):
        odd = {"gpu3.ecc_mode": "off"} if number in (2, 9) else {}
        fleet.findings.update(node.name, fleet.facts[node.name] | odd, START_MS)
    window = Window(INDEX, (training_bucket(INDEX, 0),), True, (), START_MS, fleet.findings)
    found, _ = drift.detect(window, state, START_MS + HOUR)
    incidents = [opened(f, ("gpu", f.node or "", f.gpu), f.ts_ms).incident for f in found]
    fleet.findings.update("n02", fleet.facts["n02"], START_MS + HOUR)
    again, _ = drift.detect(window, drift.restored(incidents), START_MS + HOUR + 5 * MINUTE)
    assert {f.node for f in again} == {"n09"}
    assert drift.detect(window, None, START_MS + HOUR + 5 * MINUTE)[0] == []


@pytest.mark.parametrize("attribute", [*ATTRIBUTES, NIC._replace(key="nic.mlx5_0", words="firmware of mlx5_0")])
@pytest.mark.parametrize("earlier", [False, True], ids=["", "of an earlier release"])
def test_what_differs_is_known_after_a_restart(attribute: Attribute, earlier: bool) -> None:
    value = "525" if attribute.unit else "96.00.A5.00.01"
    window = Window(INDEX, (training_bucket(INDEX, 0),), True, (), START_MS)
    found = finding("drift", window, [Deviation(attribute, 0, None, value, "700", 9, 10, START_MS, True)], START_MS)
    stored = to_dict(opened(found, ("node", "n00", None), START_MS).incident)
    if earlier:  # it had sentences alone
        del stored["snapshots"]
    assert from_dict(Incident, stored).snapshot_of("drift") == {"differs": {attribute.key: value}}


def test_a_fault_on_a_node_with_drift_is_an_incident_of_its_own() -> None:
    engine = Engine(INDEX, Policy.named("nvidia"), START_MS)
    for name, facts in Fleet().facts.items():
        odd = {"driver_version": "535.54.03"} if name == "n05" else {}
        engine.on_inventory(name, facts | odd, START_MS)
    for number in range(40):
        bucket = training_bucket(INDEX, number, silent=(5,) if number > 10 else ())
        engine.on_bucket(bucket, bucket.end_ms + 7_000)
    kinds = {i.kind: i for i in engine.incidents.values() if i.node == "n05"}
    assert set(kinds) == {IncidentKind.DRIFT, IncidentKind.LIVENESS}
    assert kinds[IncidentKind.DRIFT].opened_ms < kinds[IncidentKind.LIVENESS].opened_ms
    assert engine.health_of("n04")[0] is Health.HEALTHY
