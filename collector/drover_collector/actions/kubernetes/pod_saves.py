"""Ask pods to save themselves: by an annotation that each may read from a file of its own.

    drover.dev/save-first: "true"   the pod's author says that it listens
    drover.dev/save-asked: TIME     Drover asks; the kubelet writes it into a downward API volume of the pod

Why so: the collector reaches no process on a node, and the agent takes no orders. `pods/exec` would be a right to run
anything in any pod; with `patch` of `pods` an image could be changed. `patch` of `pods/status` changes annotations too,
and nothing of a pod's spec (pkg/registry/core/pod/strategy.go, podStatusStrategy.PrepareForUpdate). It is a role of its
own, deploy/kubernetes/rights/save-first, that only those apply who use it.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Protocol

from drover_collector.actions.base import ActError
from drover_collector.actions.kubernetes.api import MANAGER, good
from drover_core.model.saving import JobSave

WANTED, ASKED = "drover.dev/save-first", "drover.dev/save-asked"
RIGHTS = "deploy/kubernetes/rights/save-first has the right to ask pods"


class Client(Protocol):
    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]: ...


def save_of(pod: Mapping[str, Any], job: str, *, reports: bool) -> JobSave:
    """Return how a pod is asked, or why it is not. `reports`: its node's kubelet does."""
    meta = pod["metadata"]
    if not reports:
        return JobSave(job, why_not="the kubelet of its node does not report")
    if meta.get("deletionTimestamp"):
        return JobSave(job, why_not="it is ending already")
    if (meta.get("annotations") or {}).get(WANTED) != "true":
        return JobSave(job, why_not=f'it has no annotation {WANTED}: "true"')
    return JobSave(job, f"annotation {ASKED}")


def ask(client: Client, save: JobSave) -> None:
    """Raises ActError and its kinds. A pod that is gone has left the node: that is an answer."""
    namespace, _, name = save.job.partition("/")
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    status, body = client.request(
        "PATCH", f"/api/v1/namespaces/{namespace}/pods/{name}/status", {"metadata": {"annotations": {ASKED: now}}},
        {"fieldManager": MANAGER},
    )  # fmt: skip
    if status == 403:
        raise ActError(f"cannot annotate pod {save.job}: {body.get('message') or 'no reason given'} (403); {RIGHTS}")
    if status != 404:
        good(status, body, f"annotate pod {save.job}")
