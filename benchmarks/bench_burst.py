"""A burst: 1,000 of 12,500 nodes fail within one second in enforce mode. Prints one JSON line.

A real collector (mutual TLS, embedded store, policy nvidia in enforce mode, a stand-in scheduler as `[act.command]`,
one webhook on a real socket) with a real stream of each node, all reporting and healthy. Then 1,000 of them, spread
over the fleet, send XID 79 of GPU 0 on their own streams. Times count from when the last event was sent, so they hold
its way to the collector too. `judged` is when the Fleet API counts an incident for each failed node and the mass event:
what it shows is stored, unless the store took longer than 2 s (`stored_s` says when nothing waited for it any more).

    python benchmarks/bench_burst.py [--nodes 12500] [--failing 1000] [--open 60] [--every 10]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import grpc
from load.collector import Collector, running
from load.fleet import Shape
from load.generator import Generator
from load.measure import Plan, loading

from drover_collector.policy.circuit_breaker import MASS, of_guard
from drover_collector.policy.guard import GuardLimits
from drover_collector.policy.policy import Policy
from drover_core.model.events import Incident, from_json
from drover_proto import fleet_pb2 as pb
from testbed.receivers import Request, http_receiver
from testbed.waiting import wait_until

GPUS = 8
PRESET = "nvidia"
BURST_S = 0.9  # within which the events are sent; the rest of the second is for the generator
HEALTHY_S = 400.0  # after all streams are open
JUDGED_S = 120.0
WAIT_S = 10.0  # of the route before an opening is sent; a mass event's is sent at once
AFTER_S = 30.0  # watched after all is judged: no further page and no further drain
LOOK_S = 0.05  # between two looks
MIB = 2**20


def spread(nodes: int, failing: int) -> tuple[int, ...]:
    """Numbers of the nodes that fail: evenly over the fleet, so over its racks and leaves."""
    return tuple(n * nodes // failing for n in range(failing))


def most_drains(limits: GuardLimits, nodes: int) -> int:
    """How many nodes may be drained before the breaker opens, which is less where the pace lets fewer go."""
    opens_at = max(limits.mass_nodes, -int(-limits.mass_ratio * nodes // 1))
    return min(opens_at - 1, limits.per_hour or opens_at)


def settings(folder: Path, url: str) -> str:
    """Further tables of the collector's file: enforce mode, the stand-in scheduler and the webhook."""
    policy = (resources.files("drover_collector.policy") / "presets" / f"{PRESET}.toml").read_text("utf-8")
    (folder / "policy.toml").write_text(policy.replace('mode = "observe"', 'mode = "enforce"'))
    assert Policy.named(str(folder / "policy.toml")).mode == "enforce"
    (folder / "scheduler").mkdir()
    secret = folder / "webhook.secret"
    secret.touch(0o600)
    secret.write_text("whsec_a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s=\n")
    program = [sys.executable, str(ROOT / "tests/testbed/command_scheduler.py"), str(folder / "scheduler")]
    return (
        f'[policy]\npath = "{folder}/policy.toml"\n'
        f'[act]\nmode = "enforce"\nvalidate = false\n[act.command]\nprogram = {json.dumps(program)}\n'
        f'[[notify.webhook]]\nname = "ops"\nurl = "{url}"\nsecret_file = "{secret}"\n'
        f'[[notify.route]]\nreceivers = ["ops"]\ngroup_wait_s = {WAIT_S}\n'
    )


@dataclass(slots=True)
class Watch:
    """What the Fleet API says while the burst goes on, by one thread. Times are of the epoch."""

    collector: Collector
    failing: int
    before: int  # incidents that were open before
    pages_before: int
    answers_s: list[float] = field(default_factory=list)  # of GetStatus
    judged_s: float = 0.0
    pending_s: float = 0.0
    refused: int = 0  # GetStatus without an answer
    ending: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ending.wait(LOOK_S):
            asked_s = time.time()
            try:
                status = self.collector.status()
            except grpc.RpcError:
                self.refused += 1
                continue
            now_s = time.time()
            self.answers_s.append(now_s - asked_s)
            if not self.pending_s and status.pending:
                self.pending_s = now_s
            if not self.judged_s and total(status) >= self.before + self.failing + 1:
                self.judged_s = now_s


def total(status: pb.Status) -> int:
    return sum(status.open_incidents_by_severity.values())


class Stamped(list[Request]):
    """Requests, and when each came (epoch)."""

    def __init__(self) -> None:
        super().__init__()
        self.at_s: list[float] = []

    def append(self, request: Request) -> None:
        self.at_s.append(time.time())
        super().append(request)

    def pages(self) -> list[tuple[float, str, str]]:
        """(when, step, cause) of each message."""
        bodies = [request.json for request in self]
        steps = [(body["type"].removeprefix("incident."), body["data"]["cause"]) for body in bodies]
        return [(at_s, *step) for at_s, step in zip(self.at_s, steps, strict=False)]


def drained(folder: Path) -> list[float]:
    """When the stand-in scheduler drained each node, sorted (epoch)."""
    return sorted(file.stat().st_mtime for file in (folder / "scheduler").glob("*.json"))


def of_events(generators: Sequence[Generator]) -> dict[str, float]:
    """Of all generators: how many events were sent and acknowledged, and when."""
    newest = [generator.newest for generator in generators]
    firsts = [n["event_first_s"] for n in newest if n.get("event_first_s")]
    return {
        "sent": sum(n.get("events_sent", 0) for n in newest),
        "acked": sum(n.get("events_acked", 0) for n in newest),
        "first_s": min(firsts, default=0.0),
        "last_s": max((n.get("event_last_s", 0.0) for n in newest), default=0.0),
        "acked_s": max((n.get("event_acked_s", 0.0) for n in newest), default=0.0),
    }


def decided(collector: Collector) -> dict[str, int]:
    """Nodes whose drain the guard holds back, and that were to be drained; open mass events."""
    state = collector.stub.GetPolicy(pb.PolicyRequest(), timeout=60)
    held = {json.loads(text)["node"] for text in state.held_json}
    request = pb.DecisionsRequest(outcome="act", limit=1000)
    acted = collector.stub.ListDecisions(request, timeout=60).decisions_json
    events = sum(of_guard(from_json(Incident, text)) for text in state.breaker_json)
    return {"held": len(held), "to_drain": len({json.loads(text)["node"] for text in acted}), "mass_events": events}


def until_healthy(collector: Collector, shape: Shape) -> None:
    """Wait until every node reports and every GPU healthy."""
    seen, until_s = "", time.monotonic() + HEALTHY_S
    while time.monotonic() < until_s:
        with contextlib.suppress(grpc.RpcError):  # of one that is busy with the streams that open
            status = collector.status()
            if status.nodes_reporting == shape.streams and status.gpus_by_health["healthy"] == shape.total:
                return
            seen = f"{status.nodes_reporting} nodes report, GPUs {dict(status.gpus_by_health)}, {list(status.troubles)}"
        time.sleep(2.0)
    raise SystemExit(f"not all nodes are healthy {HEALTHY_S:g} s after the last stream was to be open: {seen}")


def burst(shape: Shape, failing: Sequence[int], plan: Plan) -> dict[str, Any]:
    """One burst, and what it came to."""
    folder = Path(tempfile.mkdtemp(prefix="drover-burst-"))
    got = Stamped()
    try:
        with http_receiver() as receiver:
            receiver.got = got
            with (
                running(folder, shape, settings=settings(folder, receiver.url)) as collector,
                loading(collector, plan, failing) as (generators, begin_s),
            ):
                time.sleep(max(0.0, begin_s - time.time()))
                until_healthy(collector, shape)
                watch = Watch(collector, len(failing), total(collector.status()), len(got))
                return measured(watch, generators, got, shape)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measured(watch: Watch, generators: Sequence[Generator], got: Stamped, shape: Shape) -> dict[str, Any]:
    collector = watch.collector
    before, load1 = collector.usage(), os.getloadavg()[0]
    watching = threading.Thread(target=watch.run, daemon=True)
    watching.start()
    at_s = time.time() + 1.0
    for generator in generators:
        generator.fail(at_s, BURST_S)
    try:
        wait_until(lambda: watch.judged_s and watch.pending_s, "all is judged", JUDGED_S)
        wait_until(lambda: not waiting(collector), "all is stored", JUDGED_S)
        stored_s = time.time()
    except AssertionError as error:
        print(f"{error}: {collector.status()}\n{collector.log.read_text()[-3000:]}", file=sys.stderr)
        stored_s = 0.0
    spent = collector.usage().cpu_s - before.cpu_s
    decisions = decided(collector)
    time.sleep(AFTER_S)
    watch.ending.set()
    watching.join()
    sent = of_events(generators)
    return figures(watch, got.pages()[watch.pages_before :], sent, drained(collector.folder)) | {
        "nodes": shape.streams, "load1": round(load1, 1), "stored_s": since(stored_s, sent["last_s"]),
        **decisions, "collector_cpu_s": round(spent, 2),
        "rss_mib": round(collector.usage().rss_bytes / MIB),
        "most_drains": most_drains(Policy.named(PRESET).guard, shape.streams),
        "troubles": list(collector.status().troubles)[:5],
    }  # fmt: skip


def waiting(collector: Collector) -> int:
    """Results of detection that the store has not taken yet."""
    return round(collector.page().get("drover_pipeline_outcomes_waiting", 1.0))


def since(at_s: float, from_s: float) -> float | None:
    return round(at_s - from_s, 2) if at_s else None  # None: it has not happened


def figures(
    watch: Watch, pages: Sequence[tuple[float, str, str]], sent: dict[str, float], drains: Sequence[float]
) -> dict[str, Any]:
    """What was seen, in seconds after the last event was sent."""
    last_s = sent["last_s"]
    opened = [at_s for at_s, step, _ in pages if step == "opened"]
    mass = [at_s for at_s, step, cause in pages if (step, cause) == ("opened", MASS)]
    done_s = max(watch.judged_s, *mass, 0.0)
    return {
        "events": sent["sent"],
        "sent_within_s": round(last_s - sent["first_s"], 2),
        "acked": sent["acked"],
        "last_ack_s": since(sent["acked_s"], last_s),
        "judged_s": since(watch.judged_s, last_s),
        "decision_pending_s": since(watch.pending_s, last_s),
        "page_s": since(min(mass, default=0.0), last_s),
        "pages": len(opened),
        "further_messages": dict(Counter(f"{step} {cause}" for _, step, cause in pages if step != "opened")),
        "drains": len(drains),
        "last_drain_s": since(max(drains, default=0.0), last_s),
        "drains_after_page_and_5_s": sum(at_s > done_s + 5 for at_s in drains),
        "status_answers": len(watch.answers_s),
        "status_unanswered": watch.refused,
        "status_s": {
            "median": round(sorted(watch.answers_s)[len(watch.answers_s) // 2], 3) if watch.answers_s else None,
            "max": round(max(watch.answers_s, default=0.0), 3),
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=12_500, help="of 8 GPUs, each with a real stream")
    parser.add_argument("--failing", type=int, default=1_000, help="of these")
    parser.add_argument("--open", type=float, default=60.0, help="seconds within which the streams open")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between messages of a stream")
    args = parser.parse_args(argv)
    shape = Shape(args.nodes, GPUS)
    plan = Plan(shape, 3, args.open, args.every, 1, HEALTHY_S + JUDGED_S + AFTER_S + 600)
    found = burst(shape, spread(args.nodes, args.failing), plan)
    print(json.dumps({"benchmark": "burst", "cores": os.cpu_count(), "failing": args.failing, **found}))


if __name__ == "__main__":
    main()
