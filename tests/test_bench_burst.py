"""`benchmarks/bench_burst.py` and `bench_schedulers.py`: what they plan and read, without the programs they measure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_burst  # noqa: E402  # it lies next to the other scripts
import bench_schedulers  # noqa: E402  # the same

from drover_collector.config import load_config  # noqa: E402  # the same
from drover_collector.policy.policy import Policy  # noqa: E402  # the same
from testbed.receivers import Request  # noqa: E402  # the same


def test_failing_nodes_lie_all_over_the_fleet_each_once() -> None:
    numbers = bench_burst.spread(12_500, 1_000)
    assert len(set(numbers)) == 1_000
    assert (numbers[0], numbers[-1]) == (0, 12_487)


@pytest.mark.parametrize(("nodes", "most"), [(600, 4), (2_500, 4), (12_500, 10)])
def test_as_many_drains_may_be_as_breaker_and_pace_allow(nodes: int, most: int) -> None:
    """The breaker opens at 5 nodes, of 12,500 at 25; the pace allows 10 an hour."""
    assert bench_burst.most_drains(Policy.named("nvidia").guard, nodes) == most


def test_the_collector_takes_the_settings(tmp_path: Path) -> None:
    text = bench_burst.settings(tmp_path, "http://127.0.0.1:9/")
    (tmp_path / "fleet.toml").write_text('[[nodes]]\nnames = "n1"\ngpus = 8\n')
    (tmp_path / "collector.toml").write_text(f'fleet = "{tmp_path}/fleet.toml"\n{text}')
    config = load_config(tmp_path / "collector.toml", {})
    assert config.act.mode == "enforce"
    assert config.act.command.program
    assert [route.group_wait_s for route in config.notify.route] == [bench_burst.WAIT_S]


def _message(step: str, cause: str) -> Request:
    body = f'{{"type": "incident.{step}", "data": {{"cause": "{cause}"}}}}'
    return Request("POST", "/", {}, body.encode())


def test_times_count_from_the_last_event_and_only_openings_are_pages() -> None:
    got = bench_burst.Stamped()
    for step, cause in (("opened", "mass_event"), ("changed", "mass_event")):
        got.append(_message(step, cause))
    got.at_s = [101.5, 111.0]
    none: Any = None
    watch = bench_burst.Watch(none, 1_000, 0, 0, answers_s=[0.1, 0.3, 0.2], judged_s=102.25, pending_s=101.25)
    sent = {"sent": 1_000, "acked": 1_000, "first_s": 100.0, "last_s": 101.0, "acked_s": 101.4}
    found = bench_burst.figures(watch, got.pages(), sent, [101.1, 109.0])
    assert (found["judged_s"], found["decision_pending_s"], found["page_s"]) == (1.25, 0.25, 0.5)
    assert (found["pages"], found["further_messages"]) == (1, {"changed mass_event": 1})
    assert (found["drains"], found["drains_after_page_and_5_s"]) == (2, 1)
    assert found["status_s"] == {"median": 0.2, "max": 0.3}
    missing = bench_burst.figures(bench_burst.Watch(none, 1, 0, 0), [], sent, [])
    assert missing["judged_s"] is missing["page_s"] is missing["last_drain_s"] is None


def test_what_schedulers_show_is_read() -> None:
    shown = (
        "NodeName=node00000 Arch=x86_64 State=IDLE+DRAIN Reason=drover:1f: xid/xid_79: fell off [root@2026-11-23]\n"
        "NodeName=node00001 Arch=x86_64 State=IDLE+DRAIN Reason=fan [root@2026-11-23]\n"
        "NodeName=node00002 Arch=x86_64 State=IDLE\n"
    )
    assert bench_schedulers.drained_in(shown) == ["node00000"]
    log = "1700000000500000000 nodename=node00000\n1700000009000000000 nodename=node00000\n"
    assert bench_schedulers.updates(log) == {"node00000": 1_700_000_000.5}
    taint = {"key": "drover.dev/drain", "effect": "NoSchedule"}
    assert bench_schedulers.is_drained({"spec": {"unschedulable": True, "taints": [taint]}})
    assert not bench_schedulers.is_drained({"spec": {"unschedulable": True}})
    assert not bench_schedulers.is_drained({"spec": {"taints": [taint]}})


def test_spans_of_each_node_and_the_published_figures_next_to_them() -> None:
    scheduler = bench_schedulers.Scheduler("", {"a": 1.060, "b": 2.100}, {"a": 1.070, "b": 2.200})
    stored = {"a": (1_000, 1_030, 1_090), "b": (2_000, 2_040, 2_190)}
    found = bench_schedulers.figures(["a", "b", "c"], stored, scheduler, {"a": 1.020, "b": 2.020})
    assert found["runs"] == 2
    assert found["decision_to_answer_ms"] == {"p50": 100.0, "p99": 100.0}
    assert found["intent_to_answer_ms"]["p99"] == 60.0
    assert found["act_ms"] == {"p50": 150, "p99": 150}
    assert found["ack_to_seen_ms"]["p99"] == 180.0
    assert found["to_published"] == {"p50": 3.85, "p99": 0.61}
    assert bench_schedulers.percentiles(list(map(float, range(200)))) == {"p50": 100.0, "p99": 198.0}
