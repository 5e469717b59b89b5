"""The file that the running agent keeps for `drover-agent gate`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from drover_agent.commands.gate import judge, read
from drover_agent.config import GateConfig
from drover_agent.runtime.agent import Agent, Readers
from drover_agent.runtime.gate_file import FRESH_S, GateFile, boot_s
from drover_agent.sources.base import NodeEvent
from drover_core.model.events import EventKind
from drover_proto import telemetry_pb2 as pb
from testbed.telemetry_server import TelemetryServer, play
from testbed.uplinks import running, settings, xid
from testbed.waiting import until

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
REFUSE = pb.GateVerdict(answer="refuse", text="drain n1 for xid/xid_79", incident="inc1", mode="enforce")


def gate_file(folder: Path, boot: str = BOOT, **more: object) -> GateFile:
    return GateFile(GateConfig(file=str(folder / "gate.json"), **more), "n1", boot)  # type: ignore[arg-type]  # settings of many types


def event(code: str, kind: EventKind = EventKind.XID, gpu: int | None = 3, **more: bool) -> NodeEvent:
    return NodeEvent(0, gpu, kind, code, "what happened", "kmsg", **more)


def faults(folder: Path) -> list[str]:
    return [fault["text"].partition(":")[0] for fault in json.loads((folder / "gate.json").read_text())["faults"]]


def test_a_verdict_on_the_stream_is_what_the_gate_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = TelemetryServer(after_welcome=[pb.CollectorMessage(gate_verdict=REFUSE)])
        gate = gate_file(tmp_path)
        async with running(Agent(settings(tmp_path, await server.start()), "n1", readers=Readers(gate))) as agent:
            await until(lambda: (tmp_path / "gate.json").exists(), "the verdict")
            agent.accept(1, xid("79"))
        assert (tmp_path / "gate.json").stat().st_mode & 0o777 == 0o644, "an init container is not root"
        assert server.broken == []

    play(scenario())
    found, trouble = read(str(tmp_path / "gate.json"))
    assert trouble == ""
    answer = judge(found, boot_s())
    assert answer.refused
    assert answer.reason == "drover:inc1: drain n1 for xid/xid_79"
    assert not judge(found, boot_s() + 3700).refused
    assert faults(tmp_path) == ["XID 79 on GPU 0"]


def test_an_agent_that_starts_again_keeps_the_last_verdict_of_this_boot(tmp_path: Path) -> None:
    gate_file(tmp_path).take_verdict(REFUSE)
    gate_file(tmp_path).write()
    assert judge(read(str(tmp_path / "gate.json"))[0], boot_s()).refused
    gate_file(tmp_path, "the next boot").write()
    assert json.loads((tmp_path / "gate.json").read_text())["verdict"] is None


def test_an_agent_that_starts_again_keeps_what_this_node_found_as_long_as_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the same lines of the kernel log as backlog, and would not judge them again."""
    gate = gate_file(tmp_path, unanswered="closed")
    gate.take_verdict(pb.GateVerdict(answer="pass", mode="enforce"))
    gate.note_event(event("79"))
    gate.note_event(event("gpu_lost", EventKind.LIFECYCLE, 5))
    gate_file(tmp_path, unanswered="closed").write()
    assert faults(tmp_path) == ["XID 79 on GPU 3"], "a lost GPU is found again, or is back"
    assert judge(read(str(tmp_path / "gate.json"))[0], boot_s() + FRESH_S + 1).refused
    gate_file(tmp_path, "the next boot").write()
    assert faults(tmp_path) == []
    gate.write()
    later = boot_s() + 3601
    monkeypatch.setattr("drover_agent.runtime.gate_file.boot_s", lambda: later)
    gate_file(tmp_path).write()
    assert faults(tmp_path) == []


def test_a_file_of_the_agent_before_this_version_is_read(tmp_path: Path) -> None:
    gate = gate_file(tmp_path)
    gate.note_event(event("79"))
    found = json.loads((tmp_path / "gate.json").read_text())
    for fault in found["faults"]:
        del fault["end"]
    (tmp_path / "gate.json").write_text(json.dumps(found))
    gate_file(tmp_path).write()
    assert faults(tmp_path) == ["XID 79 on GPU 3"]


@pytest.mark.parametrize(
    ("happened", "fault"),
    [
        (event("79"), "XID 79 on GPU 3"), (event("43"), ""), (event("not a number"), ""),
        (event("79", backlog=True), ""), (event("79", forgeable=True), ""),
        (event("gpu_lost", EventKind.LIFECYCLE), "gpu_lost on GPU 3"),
        (event("driver_hung", EventKind.LIFECYCLE, None), "driver_hung"), (event("aer", EventKind.KERNEL), ""),
    ],
)  # fmt: skip
def test_faults_that_the_node_sees_itself(happened: NodeEvent, fault: str, tmp_path: Path) -> None:
    gate = gate_file(tmp_path)
    gate.write()
    gate.note_event(happened)
    assert faults(tmp_path) == ([fault] if fault else [])


def test_a_fault_ends_when_its_gpu_is_back_or_the_collector_knows_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_file(tmp_path)
    gate.note_event(event("gpu_lost", EventKind.LIFECYCLE))
    gate.note_event(event("gpu_back", EventKind.LIFECYCLE, 4))
    assert faults(tmp_path) == ["gpu_lost on GPU 3"]
    gate.note_event(event("gpu_back", EventKind.LIFECYCLE))
    assert faults(tmp_path) == []
    gate.note_event(event("79"))
    gate.note_event(event("79"))
    gate.take_verdict(pb.GateVerdict(answer="pass", mode="enforce"))
    assert faults(tmp_path) == ["XID 79 on GPU 3"], "the event may still be on its way"
    later = boot_s() + FRESH_S + 1
    monkeypatch.setattr("drover_agent.runtime.gate_file.boot_s", lambda: later)
    gate.take_verdict(pb.GateVerdict(answer="pass", mode="enforce"))
    assert faults(tmp_path) == []


def test_a_folder_that_is_not_there_is_said_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = gate_file(tmp_path / "gone")
    with caplog.at_level("INFO"):
        gate.take_verdict(REFUSE)
        gate.take_verdict(REFUSE)
    assert [record.message for record in caplog.records] == [
        f"`drover-agent gate` gets no verdict: there is no folder {tmp_path}/gone (RuntimeDirectory=drover in the unit"
        " makes it)"
    ]


def test_an_agent_does_not_wait_for_a_writer_of_a_fifo_in_the_files_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate.json")
    gate_file(tmp_path).take_verdict(REFUSE)
    assert judge(read(str(tmp_path / "gate.json"))[0], boot_s()).refused


def test_a_file_that_others_may_have_written_does_not_become_the_agents_word(tmp_path: Path) -> None:
    """`/tmp` as its folder: somebody puts a refusal there, and this agent would write it again as its own."""
    gate_file(tmp_path).take_verdict(REFUSE)
    path = tmp_path / "gate.json"
    path.chmod(0o666)
    gate_file(tmp_path).write()
    assert not judge(read(str(path))[0], boot_s()).refused


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("received_s", 10**6),
        ("received_s", 10**400),
        ("received_s", "x"),
        ("text", None),
        ("answer", ["refuse"]),
        ("", 0),
    ],
)
def test_a_damaged_verdict_refuses_no_job_later_and_stops_no_agent(key: str, value: object, tmp_path: Path) -> None:
    gate_file(tmp_path).take_verdict(REFUSE)
    path = tmp_path / "gate.json"
    found = json.loads(path.read_text())
    found["verdict"][key] = value
    found["faults"] = [] if key else [{"at_s": 10**400, "text": "x"}]
    path.write_text(json.dumps(found))
    gate_file(tmp_path).write()
    later = 10**6 + 1 if value == 10**6 else boot_s()
    assert judge(read(str(path))[0], later).refused is (key == "text"), "only what nobody can take for something else"
