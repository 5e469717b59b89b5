"""A return that waits: for values of each GPU, for the end of a finding, for a reset or a reboot newer than a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drover_collector.actions.dispatcher import ActionDispatcher
from drover_collector.actions.node_outage import is_out
from drover_collector.actions.return_conditions import (
    SAID_MS,
    asked_lack,
    faults_of,
    finding_lack,
    rebooted_since,
    remedy_lack,
    telemetry_lack,
)
from drover_collector.detectors.xid.verdicts import Remedy
from drover_collector.engine.node_state import FRESH_MS, NodeNow
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Event,
    EventKind,
    Health,
    ProbeReason,
    WaitsFor,
    Withheld,
)
from drover_core.model.kinds import BOOT_ID
from testbed.desks import T0, Scene, decision, incident, scene_of, verdict
from testbed.waiting import wait_until

ASKED = T0 + 60_000


@pytest.fixture
def scene(kept: Store) -> Scene:
    return scene_of(kept)


def xid(at_ms: int = T0, code: str = "79", gpu: int | None = 0, message: str = "", **more: object) -> Event:
    made = Event(f"e{at_ms}-{code}-{gpu}", at_ms, "n1", gpu, EventKind.XID, code, message, received_ms=at_ms)
    return replace(made, **more)  # type: ignore[arg-type]  # fields by name


def booted(scene: Scene, at_ms: int, boot: str) -> None:
    scene.store.inventories.write_one("n1", at_ms, {"driver": "550", **({BOOT_ID: boot} if boot else {})})


def undrained(scene: Scene) -> bool:
    return any("n1 state=undrain" in effect for effect in scene.slurm.effects)


def lost(now_ms: int, *gpus: int) -> NodeNow:
    """All give values but `gpus`, which have given none since T0."""
    return NodeNow(now_ms + 1, tuple(T0 - 600_000 if gpu in gpus else now_ms + 1 for gpu in range(8)))


# ---- the whole desk


@pytest.mark.parametrize("restarted", [False, True], ids=["same desk", "desk restarted"])
def test_a_node_with_a_gpu_that_gives_no_values_does_not_come_back(scene: Scene, restarted: bool) -> None:
    """Its probes have passed, as those of a simulator or of a driver that has forgotten the GPU."""
    with scene.desk() as desk:
        scene.now_ms = ASKED
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        scene.telemetry = lost(ASKED, 0)
        desk.on_verdicts([verdict(True)])
        wait_until(
            lambda: [a for a in scene.store.actions.newest(node="n1") if "GPU 0" in a.detail], "it waits for values"
        )
        scene.now_ms += FRESH_MS + 1
        scene.telemetry = lost(scene.now_ms, 0)
        done = scene.wait(Act.RESUME)
        assert done.state is ActionState.FAILED
        duty = scene.wait_stage(Health.DRAINED)
        assert duty.waits_for is WaitsFor.TELEMETRY
        assert duty.reason.startswith(
            "held for telemetry: GPU 0 gives no values; 7 of the 8 GPUs of the fleet file do. It is probed and"
        )
        if not restarted:
            scene.telemetry = None
            scene.wait_stage(Health.VALIDATING)
    if restarted:
        with scene.desk() as desk:
            desk.take([decision(node="n2", id_="d2")])
            scene.wait_stage(Health.VALIDATING, "n2")
            assert scene.stage() is Health.DRAINED, "looks go on, and it is held still"
            scene.telemetry = None
            scene.wait_stage(Health.VALIDATING)
    with scene.desk() as desk:
        desk.on_verdicts([replace(verdict(True), request="second")])
        duty = scene.wait_stage(Health.HEALTHY)
        assert duty.waits_for is WaitsFor.NOTHING
    assert undrained(scene)


def test_values_that_come_a_moment_after_its_probes_are_waited_for(scene: Scene) -> None:
    with scene.desk() as desk:
        scene.now_ms = ASKED
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        scene.telemetry = NodeNow(ASKED, (ASKED,) * 8)  # the newest bucket ended before they were asked for
        desk.on_verdicts([verdict(True)])
        wait_until(
            lambda: [a for a in scene.store.actions.newest(node="n1") if "no values now" in a.detail], "it waits"
        )
        assert not undrained(scene)
        scene.telemetry = None
        scene.wait_stage(Health.HEALTHY)


def test_a_node_that_is_read_every_5_min_is_waited_for_until_its_next_reading(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was probed again and again until a reading fell into the two minutes after a pass."""
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    with scene.desk() as desk:
        scene.now_ms = ASKED
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        scene.telemetry = NodeNow(ASKED - 240_000, (ASKED - 240_000,) * 8, late_ms=900_000)
        desk.on_verdicts([verdict(True)])
        wait_until(
            lambda: [a for a in scene.store.actions.newest(node="n1") if "no values now" in a.detail], "it waits"
        )
        scene.now_ms += FRESH_MS + 1  # tried again before others are done
        desk.take([decision(node="n2", id_="d2")])
        scene.wait_stage(Health.VALIDATING, "n2")
        assert scene.stage() is Health.VALIDATING
        scene.telemetry = NodeNow(scene.now_ms, (scene.now_ms,) * 8, late_ms=900_000)
        scene.wait_stage(Health.HEALTHY)


@pytest.mark.parametrize("restarted", [False, True], ids=["same desk", "desk restarted"])
def test_after_an_xid_79_it_waits_for_a_boot_and_then_goes_on_by_itself(scene: Scene, restarted: bool) -> None:
    scene.incidents["inc1"] = replace(incident(), detectors=("xid",), gpu=0)
    booted(scene, T0 - 86_400_000, "A")
    scene.store.events.write([xid()])
    scene.now_ms = ASKED
    with scene.desk() as desk:
        desk.take([decision()])
        wait_until(
            lambda: scene.store.outages.current().get("n1") and scene.store.outages.current()["n1"].waits_for,
            "it is held",
        )
        duty = scene.store.outages.current()["n1"]
        assert (duty.stage, duty.waits_for) == (Health.DRAINED, WaitsFor.REBOOT)
        assert duty.reason.startswith(
            "held for a reboot: XID 79 on GPU 0 at 2027-01-15T08:00:00.000Z needs a reboot; the node's last boot is"
            " older. It is probed and put back when that has come; drover resume n1 --why TEXT --force"
        )
        desk.take([decision(node="n2", id_="d2")])
        scene.wait_stage(Health.VALIDATING, "n2")
        assert [node for node, _, _ in scene.probes.asked] == ["n2"], "a GPU off the bus is not probed"
        _, said = desk.resume("n1", "it looks well", "ann", False)
        assert "held for a reboot" in said, "a person is answered the same"
        booted(scene, ASKED + 1_000, "A")  # its agent started again, in the same boot
        if not restarted:
            booted(scene, ASKED + 2_000, "B")
            scene.wait_stage(Health.VALIDATING)
    with scene.desk() as desk:
        if restarted:
            desk.take([decision(node="n3", id_="d3")])
            scene.wait_stage(Health.VALIDATING, "n3")
            assert scene.store.outages.current()["n1"].waits_for is WaitsFor.REBOOT
            booted(scene, ASKED + 2_000, "B")
            scene.wait_stage(Health.VALIDATING)
        desk.on_verdicts([verdict(True)])
        scene.wait_stage(Health.HEALTHY)
    assert ("n1", ProbeReason.VALIDATE, "drover") in scene.probes.asked


def test_an_xid_79_that_comes_while_its_probes_run_holds_the_return(scene: Scene) -> None:
    booted(scene, T0 - 86_400_000, "A")
    scene.now_ms = ASKED
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        scene.store.events.write([xid(ASKED + 1, gpu=5)])
        desk.on_verdicts([verdict(True)])
        assert scene.wait(Act.RESUME).state is ActionState.FAILED
        assert scene.wait_stage(Health.DRAINED).waits_for is WaitsFor.REBOOT
    assert not undrained(scene)


def test_where_the_agent_reports_no_boots_a_person_decides(scene: Scene) -> None:
    booted(scene, T0 - 86_400_000, "")
    scene.store.events.write([xid()])
    scene.now_ms = ASKED
    with scene.desk() as desk:
        desk.take([decision()])
        wait_until(
            lambda: scene.store.outages.current().get("n1") and scene.store.outages.current()["n1"].waits_for,
            "it is held",
        )
        duty = scene.store.outages.current()["n1"]
        assert duty.waits_for is WaitsFor.PERSON
        assert (
            "the node's agent reports no boots. When it has rebooted: drover resume n1 --why TEXT --force"
            in duty.reason
        )
        forced, _ = desk.resume("n1", "I have rebooted it", "ann", True)
        assert forced is not None
        assert desk.wait(forced, 20).state is ActionState.DONE
    duty = scene.store.outages.current()["n1"]
    assert (is_out(duty), duty.waits_for) == (False, WaitsFor.NOTHING)


@pytest.mark.parametrize("by", ["reset", "boot", "telemetry"])
def test_an_xid_that_needs_a_reset_waits_for_one_or_for_a_boot(scene: Scene, by: str) -> None:
    booted(scene, T0 - 86_400_000, "A")
    scene.store.events.write([xid(code="95", gpu=3)])
    scene.now_ms = ASKED
    with scene.desk() as desk:
        desk.take([decision()])
        wait_until(
            lambda: scene.store.outages.current().get("n1") and scene.store.outages.current()["n1"].waits_for,
            "it is held",
        )
        assert scene.store.outages.current()["n1"].waits_for is WaitsFor.RESET
        match by:
            case "reset":
                made = Action("a9", "", "", "n1", Act.RESET, "commands", ActionState.DONE, ASKED + 1, by="ann")
                scene.store.actions.write([made])
            case "boot":
                booted(scene, ASKED + 1, "B")
            case "telemetry":
                scene.telemetry = replace(scene.now, reset_ms={3: ASKED + 1})
        scene.wait_stage(Health.VALIDATING)


def test_a_node_whose_driver_still_asks_for_a_reset_does_not_come_back(scene: Scene) -> None:
    """Its XID was lost, or was mended by something that mends nothing: the probes pass all the same."""
    scene.now_ms = ASKED
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        scene.telemetry = replace(scene.now, asked={3: 1})
        desk.on_verdicts([verdict(True)])
        assert scene.wait(Act.RESUME).state is ActionState.FAILED
        duty = scene.wait_stage(Health.DRAINED)
        assert duty.waits_for is WaitsFor.RESET
        assert duty.reason.startswith("held for a GPU reset: the driver asks for one now, of GPU 3. It is probed")
        scene.telemetry = None
        scene.wait_stage(Health.VALIDATING)
    assert not undrained(scene)


def test_what_a_driver_asks_for_in_words() -> None:
    assert asked_lack({}) is None
    assert asked_lack({1: 3, 2: 17}) is None, "to drain P2P mends nothing, and what 17 is nobody knows"
    lack = asked_lack({0: 1, 5: 2, 6: 4})
    assert lack is not None
    assert (lack.waits_for, lack.text) == (
        WaitsFor.REBOOT, "held for a reboot: the driver asks for one now, for GPU 5"
    )  # fmt: skip


def test_a_condition_that_still_holds_contradicts_a_pass_until_it_is_over(scene: Scene) -> None:
    scene.now_ms = ASKED
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        scene.telemetry = replace(scene.now, said={"inc1": {"liveness": ASKED - 1_000, "xid": ASKED + 1}})
        desk.on_verdicts([verdict(True)])
        assert scene.wait(Act.RESUME).state is ActionState.FAILED
        duty = scene.wait_stage(Health.DRAINED)
        assert duty.waits_for is WaitsFor.FINDING
        assert duty.reason.startswith("held for a finding: xid/xid_79 of GPU 3 (incident inc1) still holds. It is")
        scene.telemetry = replace(scene.now, said={"inc1": {"xid": ASKED + 1}})
        scene.wait_stage(Health.VALIDATING)
    assert not undrained(scene)


def passes_and_is_contradicted(scene: Scene, desk: ActionDispatcher, request: str, detector: str) -> None:
    scene.now_ms += 1_000
    scene.telemetry = replace(NodeNow(scene.now_ms, (scene.now_ms,) * 8), said={"inc1": {detector: scene.now_ms}})
    desk.on_verdicts([replace(verdict(True), request=request)])


def validations(scene: Scene) -> int:
    return len([d for d in scene.store.outages.history("n1") if d.stage is Health.VALIDATING])


def test_a_port_that_stays_down_has_its_node_probed_again_when_it_is_up_and_not_before(scene: Scene) -> None:
    """No probe looks for it, and its detector says so with each bucket: each pass failed, and a person was paged."""
    scene.now_ms = ASKED
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        passes_and_is_contradicted(scene, desk, "r1", "links")
        assert scene.wait_stage(Health.DRAINED).waits_for is WaitsFor.FINDING
        desk.take([decision(node="n2", id_="d2")])
        scene.wait_stage(Health.VALIDATING, "n2")
        assert validations(scene) == 1, "looks go on, and it is not probed while the port is down"
        scene.now_ms += SAID_MS + 1
        scene.telemetry = None
        scene.wait_stage(Health.VALIDATING)


def test_a_pass_that_is_contradicted_twice_leaves_the_node_to_a_person(scene: Scene) -> None:
    """What shows under the load of the probes alone: it would be probed, contradicted and reported for ever."""
    scene.now_ms = ASKED
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        passes_and_is_contradicted(scene, desk, "r1", "straggler")
        scene.wait_stage(Health.DRAINED)
        scene.now_ms += SAID_MS + 1
        scene.telemetry = None
        scene.wait_stage(Health.VALIDATING)
        passes_and_is_contradicted(scene, desk, "r2", "straggler")
        duty = scene.wait_stage(Health.DRAINED)
        assert duty.reason.startswith("not validated: it passed its validation twice"), duty.reason
        assert duty.withheld is Withheld.REVIEW
        scene.now_ms += 10 * SAID_MS
        scene.telemetry = None
        desk.take([decision(node="n2", id_="d2")])
        scene.wait_stage(Health.VALIDATING, "n2")
        assert validations(scene) == 2
    assert not undrained(scene)


def test_a_node_without_gpus_needs_values_of_its_own_alone(scene: Scene) -> None:
    scene.now_ms = ASKED
    scene.telemetry = NodeNow(ASKED + 1, ())
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        desk.on_verdicts([verdict(True)])
        scene.wait_stage(Health.HEALTHY)


# ---- the rules


def test_values_older_than_the_bound_or_than_the_probes_are_none() -> None:
    fresh = NodeNow(ASKED, (ASKED, ASKED - FRESH_MS))
    assert telemetry_lack(fresh, ASKED) is None
    lack = telemetry_lack(fresh, ASKED, ASKED - 5)
    assert lack is not None
    assert "GPU 1 gives no values; 1 of the 2" in lack.text
    old = telemetry_lack(fresh, ASKED + 1)
    assert old is not None
    assert "GPU 1 gives" in old.text
    for unknown in (None, NodeNow(0, ()), NodeNow(ASKED - FRESH_MS - 1, (ASKED,))):
        lack = telemetry_lack(unknown, ASKED)
        assert lack is not None
        assert "the node reports no values now" in lack.text


BOOTS = {
    "another since": ([(1, "A"), (9, "B")], True),
    "the same": ([(1, "A"), (9, "A")], False),
    "another before": ([(1, "A"), (4, "B")], False),
    "first known since": ([(9, "B")], False),  # upgraded meanwhile: whether it is newer is not known
    "first known since, and then another": ([(7, "B"), (9, "C")], True),
    "unknown between": ([(1, "A"), (6, ""), (9, "B")], True),
    "none": ([], False),
    "never known": ([(1, ""), (9, "")], False),
}


@pytest.mark.parametrize("case", list(BOOTS))
def test_an_unknown_boot_is_never_a_newer_one(case: str) -> None:
    boots, newer = BOOTS[case]
    assert rebooted_since(boots, 5) is newer


def test_an_xid_that_names_its_boot_is_compared_by_it() -> None:
    """It waited in the spool until the node had been booted; or the boot that it names is not stored yet."""
    assert rebooted_since([(1, "A"), (3, "B")], 5, "A")
    assert not rebooted_since([(1, "A"), (3, "B")], 5, "B")
    assert not rebooted_since([(1, "A"), (3, "B")], 2, "B"), "an error of the boot itself, before its agent reported"
    assert not rebooted_since([(1, "A")], 5, "B")
    assert rebooted_since([(1, "A"), (9, "B")], 5, "C"), "as of one that names none"


def test_which_errors_need_a_reset_or_a_reboot() -> None:
    asks = "Xid 154, GPU recovery action changed from 0x0 (None) to {} ({})"
    events = [
        xid(1), xid(2), xid(3, "31"), xid(4, "79", 1, backlog=True), xid(5, "79", 2, forgeable=True), xid(6, "95", 3),
        xid(7, "48", 4), xid(8, "154", 4, asks.format("0x0", "None")),
        xid(9, "154", 5, asks.format("0x2", "Node Reboot Required")), xid(10, "74", 6), xid(11, "64", 7),
    ]  # fmt: skip
    assert [(f.gpu, f.name, f.at_ms, f.remedy) for f in faults_of(events)] == [
        (0, "XID 79", 2, Remedy.REBOOT), (3, "XID 95", 6, Remedy.RESET), (5, "XID 154", 9, Remedy.REBOOT),
        (6, "XID 74", 10, Remedy.RESET), (7, "XID 64", 11, Remedy.RESET),
    ]  # fmt: skip
    boots = [(1, "A")]
    lack = remedy_lack(faults_of(events), boots, dict.fromkeys(range(8), 99))
    assert lack is not None
    assert "XID 79 on GPU 0" in lack.text
    assert "XID 95" not in lack.text, "a reset is known; it is none for what needs a reboot"
    lack = remedy_lack(faults_of([xid(20)]), [(30, "A")], {})
    assert lack is not None
    assert (lack.waits_for, "no boot of the node is known to be newer" in lack.text) == (WaitsFor.REBOOT, True)


def test_what_only_a_load_shows_contradicts_only_if_it_was_said_since_the_probes() -> None:
    said = {"i": {"straggler": ASKED - 1}}
    assert finding_lack(said, {"i": "it"}, ASKED) is None
    assert finding_lack(said, {"i": "it"}, ASKED, ASKED - 1) is None
    assert finding_lack(said, {"i": "it"}, ASKED, ASKED - 2) is not None
    assert finding_lack(said, {}, ASKED, ASKED - 2) is None, "none that wants it out"
    assert finding_lack({"i": {"memory": ASKED - 60_000}}, {"i": "it"}, ASKED) is not None
    assert finding_lack({"i": {"memory": ASKED - 60_001}}, {"i": "it"}, ASKED) is None
