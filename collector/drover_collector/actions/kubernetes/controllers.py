"""What made a pod: its owner references, followed up to what a person wrote, such as a JobSet or a PyTorchJob.

The chains (the controllers' own documentation): Pod, Job, JobSet, TrainJob (Kubeflow's Trainer); Pod, PyTorchJob; Pod,
ReplicaSet, Deployment; Pod, StatefulSet, LeaderWorkerSet, where the StatefulSet of workers belongs to the pod of their
leader; Pod, RayCluster, RayJob or RayService (KubeRay). A kind that is not in `PLURALS` is asked for nothing: it is
taken for the last one. "Owners and Dependents" in the Kubernetes documentation says what a controller reference is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from drover_collector.actions.base import ActError, AwayError

MAX_HOPS = 6
MAX_KEPT = 20_000  # answers, until all are asked for again
# Group and kind of what may have an owner itself -> its name in paths.
PLURALS: Mapping[tuple[str, str], str] = {
    ("", "Pod"): "pods", ("batch", "Job"): "jobs", ("apps", "ReplicaSet"): "replicasets",
    ("apps", "StatefulSet"): "statefulsets", ("jobset.x-k8s.io", "JobSet"): "jobsets",
    ("ray.io", "RayCluster"): "rayclusters",
}  # fmt: skip
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_VERSION = re.compile(r"(?:([a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?)/)?(v[a-z0-9]{1,20})")
_KIND = re.compile(r"[A-Z][A-Za-z0-9]{0,62}")


class Objects(Protocol):
    def read(self, path: str) -> dict[str, Any] | None:
        """Return an object; None: there is none. Raises ActError."""


class Controllers:
    """Asks once for each object. Not for several threads at once."""

    def __init__(self, api: Objects) -> None:
        self._api = api
        self._above: dict[str, tuple[str, str, str] | None] = {}  # path -> (path of its controller, kind, name)
        self.trouble = ""  # why a chain could not be followed to its end

    def of(self, pod: Mapping[str, Any]) -> str:
        """Return KIND/NAME of what made a pod, as far up as may be read; "": nothing did.

        Raises:
            AwayError: the API server does not answer.
        """
        namespace = str((pod.get("metadata") or {}).get("namespace") or "")
        step, found = _controller(pod, namespace), ""
        for _ in range(MAX_HOPS):
            if step is None:
                break
            path, kind, name = step
            found = found if kind == "Pod" and found else f"{kind}/{name}"
            step = self._next(path, namespace) if path else None
        return found

    def _next(self, path: str, namespace: str) -> tuple[str, str, str] | None:
        if path not in self._above:
            if len(self._above) >= MAX_KEPT:
                self._above.clear()
            try:
                made = self._api.read(path)
            except AwayError:
                raise
            except ActError as error:  # no right to read this kind: what is below it is known
                self.trouble = str(error)
                made = None
            self._above[path] = _controller(made or {}, namespace)
        return self._above[path]


def _controller(made: Mapping[str, Any], namespace: str) -> tuple[str, str, str] | None:
    """Return (path, kind, name) of the controller of an object; the path is "" where nothing above it is asked for."""
    references = (made.get("metadata") or {}).get("ownerReferences") or ()
    each = next((r for r in references if isinstance(r, dict) and r.get("controller") is True), None)
    if each is None:
        return None
    kind, name = str(each.get("kind") or ""), str(each.get("name") or "")
    version = _VERSION.fullmatch(str(each.get("apiVersion") or ""))
    if version is None or not _KIND.fullmatch(kind) or not _NAME.fullmatch(name) or not _NAME.fullmatch(namespace):
        return None
    group, plural = version[1] or "", PLURALS.get((version[1] or "", kind))
    root = f"/apis/{group}/{version[2]}" if group else f"/api/{version[2]}"
    return (f"{root}/namespaces/{namespace}/{plural}/{name}" if plural else ""), kind, name
