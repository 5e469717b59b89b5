"""Kubernetes: Drover closes a node by a cordon and its own taint with the incident, and undoes only its own.

    drover.dev/drain    taint, NoSchedule: the mark. Pods that run may end; DaemonSets that tolerate it may still start
    drover.dev/reason   annotation: the reason, as in any scheduler
    drover.dev/cordon   annotation: the mark, where the cordon is ours. One that was there before is not, nor one that
                        somebody else has set after ours was lifted: the API server's managedFields say who has set
                        it, and where it keeps none, a look that finds the cordon lifted takes the annotation away
    drover.dev/advise   taint, PreferNoSchedule, and label: other nodes first
    DroverHealthy       condition: False while it is out

Lists in a node's spec are replaced as a whole: every change is made to what was read, with its resourceVersion, so that
a taint that somebody else has set in between is a conflict and not lost.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from drover_collector.actions.base import (
    ACTS,
    GPU_ACTS,
    ActError,
    AwayError,
    CheckLease,
    ForeignError,
    GpuState,
    LaterError,
    NodeState,
    Result,
    Scheduler,
    Service,
    mark_of,
    own_mark,
    reason_of,
)
from drover_collector.actions.kubernetes import pod_saves
from drover_collector.actions.kubernetes.api import MANAGER, ConflictError, HeldError
from drover_collector.actions.kubernetes.gpu_taints import GpuTaints
from drover_collector.engine.node_state import Survey
from drover_core.model.events import Act, Action, GpuRef
from drover_core.model.saving import JobSave

DRAIN, REASON, CORDON, ADVISE = (f"drover.dev/{name}" for name in ("drain", "reason", "cordon", "advise"))
CONDITION = "DroverHealthy"
CHANGES = 5  # tries of one change that meets others'
MIRROR = "kubernetes.io/config.mirror"  # of a pod that the kubelet has from a file: it cannot be evicted
# Names under which the API server merges old changes of unknown authors (capmanagers.go,
# skipnonapplied.go of apimachinery's managedfields).
NOBODYS = ("ancient-changes", "before-first-apply")
Node = dict[str, Any]


class Client(Protocol):
    def node(self, name: str) -> Node | None: ...

    def statuses(self) -> Mapping[str, str]: ...

    def patch_node(self, name: str, patch: Mapping[str, Any]) -> None: ...

    def patch_conditions(self, name: str, condition: Mapping[str, str]) -> None: ...

    def pods(self, node: str) -> list[dict[str, Any]]: ...

    def eviction_version(self) -> str: ...

    def evict(self, pod: Mapping[str, Any], version: str) -> bool: ...

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]: ...


def kept_closed(node: object) -> bool:
    """Return whether Drover itself keeps a node closed, by its taint or its cordon."""
    if not isinstance(node, dict):
        return False
    annotations = (node.get("metadata") or {}).get("annotations") or {}
    return _value(node, DRAIN) is not None or CORDON in annotations


class KubernetesActuator(Scheduler):
    """
    Args:
        gpu_resources: beginnings of the names of resources that make a pod a job.
    """

    name = "kubernetes"
    label = "Kubernetes"
    acts = ACTS | GPU_ACTS

    def __init__(self, client: Client, gpu_resources: Sequence[str]) -> None:
        self._client = client
        self._gpu_resources = tuple(gpu_resources)
        self._gpus = GpuTaints(client, self._gpu_resources)

    def do(self, action: Action, check_lease: CheckLease) -> Result:
        if action.action is Act.ISOLATE_GPU:
            return self._gpus.isolate(action, check_lease)
        if action.action is Act.RETURN_GPU:
            return self._gpus.give_back(action, check_lease)
        return super().do(action, check_lease)

    def why_not_alone(self, node: str, gpu: GpuRef) -> str:
        return self._gpus.why_not_alone(node, gpu)

    def isolated(self) -> Sequence[GpuState]:
        return self._gpus.isolated()

    def mend(self, state: GpuState, check_lease: CheckLease) -> str:
        return self._gpus.mend(state, check_lease)

    def before(self, node: str) -> str:  # noqa: ARG002  # an advice replaces nothing
        return ""

    def observe(self, node: str) -> NodeState:
        return _state(self._node(node), self._jobs(self._client.pods(node)))

    def observe_all(self, nodes: Sequence[str]) -> Mapping[str, NodeState]:
        """One by one: those asked for are few, and a list of all nodes of a large cluster weighs 100 MB."""
        found = {}
        for name in nodes:
            node = self._client.node(name)
            if node is not None:
                jobs = self._jobs(self._client.pods(name)) if _closed(node) else None
                found[name] = _state(node, jobs)
        return found

    def find_saves(self, node: str) -> tuple[JobSave, ...]:
        reports = _condition_of(self._node(node), "Ready").get("status") == "True"
        pods = {_name(pod): pod for pod in self._client.pods(node)}
        return tuple(pod_saves.save_of(pods[job], job, reports=reports) for job in self._jobs(list(pods.values())))

    def ask_to_save(self, save: JobSave) -> None:
        pod_saves.ask(self._client, save)

    def survey(self, nodes: Sequence[str]) -> Survey:
        """By kubectl's own column: a node that is not plain "Ready" is cordoned, or its kubelet does not report.

        A kubelet that reports "not ready" reads as one that does not answer: the column does not part the two.
        """
        wanted = set(nodes)
        statuses = {name: status for name, status in self._client.statuses().items() if name in wanted}
        closed = {name for name, status in statuses.items() if status != "Ready"}
        return Survey(closed, {name: "Ready" in status.split(",") for name, status in statuses.items()})

    # ---- acts

    def _advise(self, action: Action, check_lease: CheckLease) -> Result:
        """Drover's advice for an older incident becomes that of this one: it ends with the newest."""

        def change(node: Node) -> Node | None:
            if _value(node, ADVISE) == own_mark(action) and _labels(node).get(ADVISE) == own_mark(action):
                return None
            taints = [*_without(node, ADVISE), {"key": ADVISE, "value": own_mark(action), "effect": "PreferNoSchedule"}]
            return {"metadata": {"labels": {ADVISE: own_mark(action)}}, "spec": {"taints": taints}}

        changed = self._change(action.node, check_lease, change)
        self._verify(action.node, lambda n: _value(n, ADVISE) == own_mark(action), "its taint")
        return Result("pods get other nodes first" if changed else "advised already")

    def _unadvise(self, action: Action, check_lease: CheckLease) -> Result:
        def change(node: Node) -> Node | None:
            mine = _value(node, ADVISE) == own_mark(action)
            if not mine and _labels(node).get(ADVISE) != own_mark(action):
                return None
            taints = _without(node, ADVISE) if mine else _taints(node)
            return {"metadata": {"labels": {ADVISE: None}}, "spec": {"taints": taints}}

        changed = self._change(action.node, check_lease, change)
        self._verify(action.node, lambda n: _value(n, ADVISE) != own_mark(action), "the end of its advice")
        return Result("no longer advised" if changed else "no advice of this incident is there")

    def _drain(self, action: Action, check_lease: CheckLease) -> Result:
        there = ""

        def change(node: Node) -> Node | None:
            nonlocal there
            if (mark := _value(node, DRAIN)) is not None:
                there = (
                    "drained already" if mark == own_mark(action) else f"drained already for another incident, {mark}"
                )
                return None
            notes: dict[str, str | None] = {REASON: reason_of(action), CORDON: own_mark(action)}
            if _cordoned(node):
                there, notes[CORDON] = "cordoned already by somebody else, whose cordon stays; tainted", None
            taints = [*_taints(node), {"key": DRAIN, "value": own_mark(action), "effect": "NoSchedule"}]
            return {"metadata": {"annotations": notes}, "spec": {"unschedulable": True, "taints": taints}}

        changed = self._change(action.node, check_lease, change)
        node = self._verify(action.node, lambda n: _value(n, DRAIN) is not None and _closed(n), "its drain")
        condition = ""
        if changed or _mine(node, action):
            condition = self._condition(check_lease, node, "False", "Drained", reason_of(action))
        jobs = self._jobs(self._client.pods(action.node))
        run_on = f"run on to their end: {', '.join(jobs)}" if jobs else "no GPU pod runs"
        return Result(f"{there or 'cordoned and tainted'}; {run_on}{condition}")

    def _isolate(self, action: Action, check_lease: CheckLease) -> Result:
        """Closed first. Pods that nothing would start again elsewhere are left to end: evicted, they would be lost."""
        self._drain(action, check_lease)
        evicted, alone, held = [], [], []
        version = ""
        for pod in self._client.pods(action.node):
            meta = pod["metadata"]
            name = _name(pod)
            if _belongs(pod) or meta.get("deletionTimestamp"):
                continue
            if _owner(pod) is None:
                alone.append(name)
                continue
            version = version or self._client.eviction_version()
            check_lease()
            try:
                if self._client.evict(pod, version):
                    evicted.append(name)
            except HeldError as error:
                held.append(f"{name} ({error})")
        done = f"closed; evicted: {', '.join(evicted) or 'no pod'}"
        if alone:
            done += f"; nothing would start them elsewhere, and they run on to their end: {', '.join(alone)}"
        if held:
            raise LaterError(f"{done}; held by a disruption budget: {', '.join(held)}")
        return Result(done)

    def _resume(self, action: Action, check_lease: CheckLease) -> Result:
        closed_by_others = False

        def change(node: Node) -> Node | None:
            nonlocal closed_by_others
            if _value(node, DRAIN) is None and not _closed(node):
                return None
            if not _mine(node, action):
                raise ForeignError(_foreign(node))
            mine = _cordon_is_ours(node, own_mark(action))
            closed_by_others = not mine and _cordoned(node)
            spec: dict[str, Any] = {"taints": _without(node, DRAIN)}
            if mine:
                spec["unschedulable"] = None
            return {"metadata": {"annotations": {REASON: None, CORDON: None}}, "spec": spec}

        changed = self._change(action.node, check_lease, change)
        node = self._verify(action.node, lambda n: _value(n, DRAIN) is None, "its resume")
        condition = self._condition(check_lease, node, "True", "Resumed", action.why or "resumed")
        if closed_by_others:
            return Result(f"our taint is gone; the cordon is somebody else's, and stays{condition}")
        return Result(f"{'gets pods again' if changed else 'in service already'}{condition}")

    def disown(self, node: str, check_lease: CheckLease) -> bool:
        def change(found: Node) -> Node | None:
            return {"metadata": {"annotations": {CORDON: None}}} if _lifted(found) else None

        return self._change(node, check_lease, change)

    # ---- parts of acts

    def _node(self, name: str) -> Node:
        found = self._client.node(name)
        if found is None:
            raise ActError(
                f"Kubernetes knows no node {name}; the fleet file must name nodes as `kubectl get nodes` does"
            )
        return found

    def _change(self, name: str, check_lease: CheckLease, change: Callable[[Node], Node | None]) -> bool:
        """Send the patch that `change` makes of the present node; return whether there was something to do."""
        for _ in range(CHANGES):
            node = self._node(name)
            patch = change(node)
            if patch is None:
                return False
            patch["metadata"]["resourceVersion"] = node["metadata"]["resourceVersion"]
            check_lease()
            try:
                self._client.patch_node(name, patch)
                return True
            except ConflictError:
                continue
        raise LaterError(f"somebody else kept changing the node during {CHANGES} tries")

    def _verify(self, name: str, good: Callable[[Node], bool], what: str) -> Node:
        node = self._node(name)
        if not good(node):
            raise LaterError(f"Kubernetes took {what} and does not show it ({_text(node)})")
        return node

    def _condition(self, check_lease: CheckLease, node: Node, status: str, reason: str, message: str) -> str:
        """Set the condition. It informs people, closes nothing, and may fail without the right to set it."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        there = _condition_of(node, CONDITION)
        if (there.get("status"), there.get("reason"), there.get("message")) == (status, reason, message):
            return ""
        since = there.get("lastTransitionTime", now) if there.get("status") == status else now
        check_lease()
        try:
            self._client.patch_conditions(
                node["metadata"]["name"],
                {
                    "type": CONDITION, "status": status, "reason": reason, "message": message,
                    "lastHeartbeatTime": now, "lastTransitionTime": since,
                },
            )  # fmt: skip
        except AwayError:
            raise
        except ActError as error:
            return f"; {error}"
        return ""

    def _jobs(self, pods: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Pods that hold GPUs, until they are gone; not those of DaemonSets, which never end."""
        return tuple(sorted(_name(p) for p in pods if not _belongs(p) and self._holds_gpus(p["spec"])))

    def _holds_gpus(self, spec: Mapping[str, Any]) -> bool:
        """A claim of dynamic resource allocation may be for anything: taken for a GPU's."""
        if spec.get("resourceClaims"):
            return True
        containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
        wanted = (name for c in containers for name in (c.get("resources") or {}).get("limits") or ())
        return any(name.startswith(self._gpu_resources) for name in wanted)


# ---- what a node says


def _taints(node: Node) -> list[dict[str, Any]]:
    return list(node["spec"].get("taints") or ())


def _without(node: Node, key: str) -> list[dict[str, Any]]:
    return [taint for taint in _taints(node) if taint.get("key") != key]


def _value(node: Node, key: str) -> str | None:
    """The mark in our taint; None: it is not there."""
    return next((str(taint.get("value", "")) for taint in _taints(node) if taint.get("key") == key), None)


def _annotations(node: Node) -> dict[str, str]:
    return node["metadata"].get("annotations") or {}


def _labels(node: Node) -> dict[str, str]:
    return node["metadata"].get("labels") or {}


def _mine(node: Node, action: Action) -> bool:
    return _value(node, DRAIN) == own_mark(action)


def _cordoned(node: Node) -> bool:
    return bool(node["spec"].get("unschedulable"))


def _closed(node: Node) -> bool:
    return _cordoned(node) or _value(node, DRAIN) is not None


def _lifted(node: Node) -> bool:
    """Our taint is there, and the cordon that we have set with it is not."""
    mark = _value(node, DRAIN)
    return mark is not None and not _cordoned(node) and _annotations(node).get(CORDON) == mark


def _cordon_is_ours(node: Node, mark: str) -> bool:
    """Return whether Drover set the cordon: by its annotation, and by the field's last owner where the server keeps it.

    Setting a value again without a change keeps its owner ("Field management" of Server-Side Apply).
    """
    if not _cordoned(node) or _annotations(node).get(CORDON) != mark:
        return False
    kept = node["metadata"].get("managedFields") or ()
    owners = {f.get("manager") for f in kept if "f:unschedulable" in ((f.get("fieldsV1") or {}).get("f:spec") or {})}
    return not owners or not owners.isdisjoint((MANAGER, *NOBODYS))


def _condition_of(node: Node, kind: str) -> dict[str, str]:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c.get("type") == kind), {})


def _state(node: Node, jobs: tuple[str, ...] | None) -> NodeState:
    """A node whose kubelet does not report, or never has, is down."""
    mark = _value(node, DRAIN)
    reason = by = ""
    if _closed(node):
        service = Service.DRAINING if jobs else Service.DRAINED
        reason, by = "cordoned", "somebody else"
        if mark is not None:
            written = _annotations(node).get(REASON, "")
            reason, by = (
                written if mark_of(written) == mark else f"drover:{mark}: no reason is noted any more",
                "drover",
            )
    elif _condition_of(node, "Ready").get("status") != "True":
        service = Service.DOWN
        reason = _condition_of(node, "Ready").get("message", "its kubelet has not reported yet")
    else:
        service = Service.IN
    return NodeState(node["metadata"]["name"], service, reason, by, jobs, _text(node), _lifted(node))


def _text(node: Node) -> str:
    """As in kubectl: ready or not, cordoned or not, and the taints."""
    words = ["Ready" if _condition_of(node, "Ready").get("status") == "True" else "NotReady"]
    words += ["SchedulingDisabled"] if _cordoned(node) else []
    words += [f"{t.get('key')}={t.get('value', '')}:{t.get('effect')}" for t in _taints(node)]
    return ", ".join(words)


def _foreign(node: Node) -> str:
    mark = _value(node, DRAIN)
    whose = "cordoned by somebody else" if mark is None else f"drained for another incident, {mark}"
    return f"it is {whose}: left unchanged"


def _name(pod: Mapping[str, Any]) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def _owner(pod: Mapping[str, Any]) -> str | None:
    """The kind of the controller that would start it again elsewhere."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((str(o.get("kind")) for o in owners if o.get("controller")), None)


def _belongs(pod: Mapping[str, Any]) -> bool:
    """It is of the node, and goes with it: of a DaemonSet or of the kubelet's own files."""
    return _owner(pod) == "DaemonSet" or MIRROR in (pod["metadata"].get("annotations") or {})
