"""Orders of a drain, and pods as the API server takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drover_collector.actions.base import Order

MARK = "cf930c65f7571e88"


def order(node: str, mark: str = MARK, may: Callable[[], object] = lambda: None) -> Order:
    return Order("a1", node, mark, "xid/xid_79: GPU has fallen off the bus", "drover", may)


def pod(name: str, node: str, owner: str | None = "Job", gpus: int = 8, **labels: str) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    owners = [{"apiVersion": "batch/v1", "kind": owner, "name": "o", "uid": "u", "controller": True}] if owner else []
    meta = {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": labels}
    return {
        "metadata": {**meta, "ownerReferences": owners},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i", "resources": {"limits": limits}}]},
    }  # fmt: skip
