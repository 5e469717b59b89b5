"""Orders of a drain, and pods as the API server takes them."""

from __future__ import annotations

from typing import Any

from drover_collector.actions.base import CheckLease
from drover_core.model.events import Act, Action
from testbed.desks import action_of

MARK = "cf930c65f7571e88"


def request(act: Act, node: str, mark: str = MARK, check_lease: CheckLease = lambda: None) -> tuple[Action, CheckLease]:
    return action_of(act, node, mark), check_lease


def pod(name: str, node: str, owner: str | None = "Job", gpus: int = 8, **labels: str) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    owners = [{"apiVersion": "batch/v1", "kind": owner, "name": "o", "uid": "u", "controller": True}] if owner else []
    meta = {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": labels}
    return {
        "metadata": {**meta, "ownerReferences": owners},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i", "resources": {"limits": limits}}]},
    }  # fmt: skip
