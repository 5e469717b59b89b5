"""`drover decisions`: the table, and that a list that was cut says so."""

from __future__ import annotations

import pytest

from drover_cli.main import main
from drover_core.model.events import Decision, RecommendedAction, to_json
from drover_proto import fleet_pb2 as pb
from testbed.fleet_stand_in import FleetStandIn

WAITING = Decision(
    "d1", "i1", 1_800_000_000_000, "n1", RecommendedAction.DRAIN, "approve", "pending_approval", "xid", "XID 79"
)


class Stub(FleetStandIn):
    """Knows three decisions."""

    def ListDecisions(self, request: pb.DecisionsRequest) -> pb.DecisionList:
        return pb.DecisionList(decisions_json=[to_json(WAITING)] * min(request.limit, 3))


@pytest.mark.parametrize(("limit", "cut"), [("2", "the list ends at --limit 2; there may be more\n"), ("4", "")])
def test_a_list_that_was_cut_says_so(
    limit: str, cut: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Stub().install(monkeypatch)
    assert main(["decisions", "--limit", limit]) == 0
    said = capsys.readouterr()
    assert said.err == cut
    assert said.out.count("XID 79") == min(int(limit), 3)
    assert said.out.splitlines()[0].split()[:3] == ["ID", "WHEN", "STATE"]
