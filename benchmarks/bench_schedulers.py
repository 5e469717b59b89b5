"""One node alone: from the decision to drain it to the scheduler's answer; Kubernetes API server and slurmctld.

Needs root and the real parts that tests/system_setup.sh installs. A real collector (mutual TLS, embedded store,
enforce mode) gets every node's reports over a stream of its own; one after the other they send XID 79, and each is
drained.
Prints one JSON line. Times, in ms:

    decision_to_answer   from the decision's own time, which is when the event was received and so holds its storing,
                         to the answer of the scheduler
    intent_to_answer     from the stored intent's time to that answer: look, survey, look, act
    act                  from the intent's time to the action's: with the looks after the act and the stored outcome
    ack_to_seen          from outside: from the event's Ack at its agent to when a watcher of its own sees the drain

The answer is noted outside of Drover: for Kubernetes when a watch of all nodes shows cordon and taint, for Slurm when
`scontrol update` has ended, by a script around it (some ms of a shell's start are in it). etcd syncs its writes.
NVSentinel's figures next to them are published ones, not measured here.

    python benchmarks/bench_schedulers.py [--runs 50] [--only kubernetes|slurm]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import yaml
from load.collector import running
from load.fleet import Shape, name
from load.measure import Plan, loading

from drover_collector.store import Store
from drover_core.model.events import Action, ActionState
from testbed.acting import POLICY
from testbed.kubernetes_server import ADMIN, KubernetesServer, kubernetes
from testbed.slurm import Slurm
from testbed.slurm import running as running_slurm
from testbed.waiting import wait_until

PUBLISHED = {"name": "NVSentinel, published", "p50_ms": 26.0, "p99_ms": 165.0}
GPUS = 8
EVERY_S = 5.0  # between messages of a stream
OPEN_S = 3.0
GAP_S = 1.5  # between two events: each node is alone
REPORT_S = 60.0
DONE_S = 120.0
LOOK_S = 0.02  # between two looks of the watcher
RBAC = [ROOT / f"deploy/kubernetes/{name}.yaml" for name in ("access/account", "rights/rbac")]
ACCOUNT = "drover/drover-collector"
PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/drover/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}
WRAPPER = """#!/bin/sh
scontrol "$@"
status=$?
[ "$1" = update ] && [ $status = 0 ] && echo "$(date +%s%N) $2" >> {log}
exit $status
"""


@dataclass(slots=True)
class Scheduler:
    """What was seen of it from outside. Times are of the epoch, in seconds.

    Attributes:
        settings: the actuator's table. answered: node -> when its drain was answered; seen: when a watcher saw it.
    """

    settings: str
    answered: dict[str, float] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    ending: threading.Event = field(default_factory=threading.Event)
    log: Path | None = None

    def read(self) -> None:
        """Take up what the script around scontrol has noted."""
        if self.log is not None and self.log.exists():
            self.answered.update(updates(self.log.read_text()))


def updates(text: str) -> dict[str, float]:
    """Node -> when its first `scontrol update` ended; lines are "NANOSECONDS nodename=NODE"."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        at_ns, _, what = line.partition(" ")
        found.setdefault(what.removeprefix("nodename="), int(at_ns) / 1e9)
    return found


def drained_in(text: str) -> list[str]:
    """Nodes whose reason is Drover's, in what `scontrol -o show node` prints."""
    return re.findall(r"^NodeName=(\S+).* Reason=drover:", text, re.MULTILINE)


def is_drained(node: Mapping[str, Any]) -> bool:
    """Whether a node of the Kubernetes API has our cordon and taint."""
    spec = node.get("spec", {})
    return bool(spec.get("unschedulable")) and any(t.get("key") == "drover.dev/drain" for t in spec.get("taints", ()))


@contextlib.contextmanager
def slurm_scheduler(folder: Path, nodes: Sequence[str]) -> Iterator[Scheduler]:
    (folder / "slurm").mkdir()
    with running_slurm(folder / "slurm", nodes) as slurm:
        program, log = folder / "scontrol", folder / "updates"
        program.write_text(WRAPPER.format(log=log))
        program.chmod(0o755)
        (folder / "squeue").symlink_to("/usr/bin/squeue")
        made = Scheduler(
            f'[act.slurm]\nenabled = true\nscontrol = "{program}"\nconf = "{slurm.folder}/slurm.conf"\n', log=log
        )
        watching = threading.Thread(target=watch_slurm, args=(slurm, made), daemon=True)
        watching.start()
        try:
            yield made
        finally:
            made.ending.set()
            watching.join()


def watch_slurm(slurm: Slurm, made: Scheduler) -> None:
    while not made.ending.wait(LOOK_S):
        done = subprocess.run(
            ["scontrol", "-o", "show", "node"], env=dict(slurm.env), capture_output=True, text=True, check=False
        )
        now_s = time.time()
        for node in drained_in(done.stdout):
            made.seen.setdefault(node, now_s)


@contextlib.contextmanager
def kubernetes_scheduler(folder: Path, nodes: Sequence[str]) -> Iterator[Scheduler]:
    (folder / "kubernetes").mkdir()
    with kubernetes(folder / "kubernetes", synced=True) as server:
        for manifest in (each for file in RBAC for each in yaml.safe_load_all(file.read_text("utf-8"))):
            server.call("POST", PATHS[manifest["kind"]], manifest)
        ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        for node in nodes:
            server.call("POST", "/api/v1/nodes", {"metadata": {"name": node}})
            merge = {"Content-Type": "application/merge-patch+json"}
            server.call("PATCH", f"/api/v1/nodes/{node}/status", ready, **merge)
        token = folder / "token"
        token.touch(0o600)
        token.write_text(server.token(ACCOUNT))
        made = Scheduler(
            f'[act.kubernetes]\nenabled = true\nserver = "{server.url}"\n'
            f'token_file = "{token}"\nca_file = "{server.ca}"\n'
        )
        threading.Thread(target=watch_kubernetes, args=(server, made), daemon=True).start()
        yield made


def watch_kubernetes(server: KubernetesServer, made: Scheduler) -> None:
    """A watch of all nodes as any controller has one: until the server ends."""
    request = urllib.request.Request(f"{server.url}/api/v1/nodes?watch=1", headers={"Authorization": f"Bearer {ADMIN}"})
    context = ssl.create_default_context(cafile=str(server.ca))
    with contextlib.suppress(OSError), urllib.request.urlopen(request, context=context) as lines:
        for line in lines:
            now_s, node = time.time(), json.loads(line)["object"]
            if is_drained(node):
                made.answered.setdefault(node["metadata"]["name"], now_s)
                made.seen.setdefault(node["metadata"]["name"], now_s)


SCHEDULERS = {"kubernetes": kubernetes_scheduler, "slurm": slurm_scheduler}


def measure(kind: str, runs: int) -> dict[str, Any]:
    """One scheduler, a node for each run."""
    with tempfile.TemporaryDirectory(prefix="drover-schedulers-") as text:
        folder, shape, load1 = Path(text), Shape(runs, GPUS), os.getloadavg()[0]
        (folder / "policy.toml").write_text(POLICY)
        plan = Plan(shape, 1, OPEN_S, EVERY_S, round(EVERY_S), REPORT_S + DONE_S + runs * GAP_S)
        nodes = [name(n) for n in range(runs)]
        with SCHEDULERS[kind](folder, nodes) as scheduler:
            act = '[act]\nmode = "enforce"\nvalidate = false\n'
            settings = f'[policy]\npath = "{folder}/policy.toml"\n{act}{scheduler.settings}'
            with (
                running(folder, shape, settings=settings) as collector,
                loading(collector, plan, range(runs)) as (generators, _),
            ):
                wait_until(lambda: collector.status().nodes_reporting == runs, "all nodes report", REPORT_S + OPEN_S)
                generators[0].fail(time.time() + 1.0, runs * GAP_S)
                try:
                    wait_until(lambda: len(scheduler.seen) == runs, "all are drained", runs * GAP_S + DONE_S)
                except AssertionError as error:
                    log = collector.log.read_text("utf-8", "replace")[-3000:]
                    raise SystemExit(
                        f"{error}: {len(scheduler.seen)} of {runs}; {collector.status().troubles}\n{log}"
                    ) from None
                time.sleep(2.0)  # outcomes are stored, and the generator says what it knows each second
                acks = dict(generators[0].newest["event_acks"])
            scheduler.read()
        stored = versions(folder, nodes)
    return figures(nodes, stored, scheduler, acks) | {"load1": round(load1, 1)}


def versions(folder: Path, nodes: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    """Node -> times (epoch, ms) of the decision, the intent and the outcome, as the store has them."""
    store = Store.open(f"chdb://{folder}/store")
    try:
        decided = {d.id: d.ts_ms for d in store.decisions.newest(limit=100_000)}
        found = {}
        for action in store.actions.newest():
            history: list[Action] = store.actions.history(action.id)
            if action.node in nodes and action.state is ActionState.DONE:
                found[action.node] = (decided[action.decision_id], history[0].ts_ms, action.ts_ms)
        return found
    finally:
        store.close()


def figures(
    nodes: Sequence[str], stored: Mapping[str, tuple[int, int, int]], scheduler: Scheduler, acks: Mapping[str, float]
) -> dict[str, Any]:
    spans: dict[str, list[float]] = {
        key: [] for key in ("decision_to_answer", "intent_to_answer", "decision_to_intent", "act", "ack_to_seen")
    }
    for node in nodes:
        if node not in stored or node not in acks:
            continue
        decided, intended, done = stored[node]
        answered = scheduler.answered[node] * 1000
        spans["decision_to_answer"].append(answered - decided)
        spans["decision_to_intent"].append(intended - decided)
        spans["intent_to_answer"].append(answered - intended)
        spans["act"].append(done - intended)
        spans["ack_to_seen"].append(1000 * (scheduler.seen[node] - acks[node]))
    found: dict[str, Any] = {f"{key}_ms": percentiles(values) for key, values in spans.items()}
    whole = found["decision_to_answer_ms"]
    return {
        "runs": len(spans["act"]),
        "left_out": {
            "not done": sum(node not in stored for node in nodes),
            "no Ack noted": sum(node in stored and node not in acks for node in nodes),
        },
        **found,
        "to_published": {q: round(whole[q] / PUBLISHED[f"{q}_ms"], 2) for q in ("p50", "p99") if whole},
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Of fewer than 100 values the 99th percentile is the highest."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {q: min(len(ordered) - 1, int(share * len(ordered))) for q, share in (("p50", 0.5), ("p99", 0.99))}
    return {q: round(ordered[n], 1) for q, n in at.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="of each scheduler, a node for each")
    parser.add_argument("--only", choices=tuple(SCHEDULERS), help="one scheduler alone")
    args = parser.parse_args(argv)
    kinds = [args.only] if args.only else list(SCHEDULERS)
    found = {kind: measure(kind, args.runs) for kind in kinds}
    print(json.dumps({"benchmark": "schedulers", "cores": os.cpu_count(), "published": PUBLISHED, **found}))


if __name__ == "__main__":
    main()
