"""`drover ack`, `assign`, `comment`, `ticket` and `outcome` send one note each and print what was stored."""

from __future__ import annotations

import pytest

from drover_cli.main import main
from drover_core.model.events import Audit, to_json
from drover_proto import fleet_pb2 as pb
from testbed.fleet_stand_in import FleetStandIn


class Stub(FleetStandIn):
    asked: list[tuple[str, str, str]]

    def NoteIncident(self, request: pb.IncidentNoteAsk) -> pb.IncidentNoteReply:
        self.asked.append((request.act, request.text, request.value))
        line = Audit("a1", 1_800_000_000_000, "alex", request.act, "5f0c77", request.text, state=request.value)
        return pb.IncidentNoteReply(audit_json=to_json(line))


@pytest.mark.parametrize(
    ("given", "asked", "said"),
    [
        (["ack", "5f", "--why", "on it"], ("acknowledge", "on it", ""), "acknowledged by alex: on it"),
        (["ack", "5f", "--undo"], ("unacknowledge", "", ""), "acknowledgement taken back by alex"),
        (["assign", "5f", "bo"], ("assign", "", "bo"), "assigned to bo by alex"),
        (["assign", "5f"], ("assign", "", ""), "assigned to nobody by alex"),
        (["comment", "5f", "a\x1b[31m b"], ("comment", "a\x1b[31m b", ""), "comment by alex: a [31m b"),
        (["ticket", "5f", "OPS-1"], ("ticket", "", "OPS-1"), "ticket OPS-1 linked by alex"),
        (["outcome", "5f", "false_alarm"], ("outcome", "", "false_alarm"), "it was a false alarm, by alex"),
    ],
)  # fmt: skip
def test_a_note_is_sent_and_said(
    given: list[str], asked: tuple[str, str, str], said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    stub = Stub()
    stub.asked = []
    stub.install(monkeypatch)
    assert main(given) == 0
    assert stub.asked == [asked]
    assert capsys.readouterr().out == f"5f0c77: {said}\n"
