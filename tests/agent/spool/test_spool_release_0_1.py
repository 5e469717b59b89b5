"""An agent that starts with the spool of release 0.1 sends what that release could not: everything, once."""

from __future__ import annotations

from pathlib import Path

from testbed.release_0_1 import EXPECTED, unpacked


def test_what_an_agent_of_0_1_kept_is_sent_once_and_under_its_own_numbers(tmp_path: Path) -> None:
    with unpacked(tmp_path) as left:
        found = left.ask("deliver")
    before, after = (EXPECTED["events"][when] for when in ("before", "after"))
    kept = [event[0] for event in after if event not in before]
    assert len(kept) == 4
    sent = found["sent"]
    assert sent[:4] == kept, "and nothing that was acknowledged before"
    assert not {event[0] for event in after} & set(sent[4:]), "its own start and end have numbers of their own"
    assert found["samples"] == EXPECTED["samples"]["after"], "as the agent of 0.1 itself would have delivered them"
    assert found["events"] == after
