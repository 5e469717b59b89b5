"""Kubernetes in memory, with GPUs of dynamic resource allocation: ResourceSlices, ResourceClaims, DeviceTaintRules.

Forms are those of resource.k8s.io/v1; the tests hold them against the models of the official client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drover_collector.actions.base import AwayError
from drover_collector.actions.kubernetes.gpu_taints import DRIVER, GROUP

Json = dict[str, Any]


def uuid_of(board: int) -> str:
    return f"GPU-{board:08x}-0000-4000-8000-000000000000"


def slice_of(node: str, devices: Mapping[str, str], generation: int = 1) -> Json:
    """Return the ResourceSlice of a node. `devices`: name -> UUID."""
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{DRIVER}-{generation}"},
        "spec": {
            "driver": DRIVER, "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
            "devices": [
                {"name": name, "attributes": {"type": {"string": "gpu"}, "uuid": {"string": uuid}}}
                for name, uuid in devices.items()
            ],
        },
    }  # fmt: skip


def claim_of(name: str, node: str, device: str) -> Json:
    """Return a ResourceClaim that has a device."""
    result = {"request": "gpu", "driver": DRIVER, "pool": node, "device": device}
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]}},
        "status": {"allocation": {"devices": {"results": [result]}}},
    }  # fmt: skip


class GpuCluster:
    """Nodes n1, n2 of eight GPUs each, gpu-0 to gpu-7.

    Attributes:
        devices: node -> device -> UUID.
        claims, rules: by name.
        versions: resource -> versions in which the server has it.
        allocatable: of each node.
        away: the API server does not answer. refuses: resources that the token may not touch.
    """

    def __init__(self) -> None:
        self.devices = {
            node: {f"gpu-{gpu}": uuid_of(16 * (number + 1) + gpu) for gpu in range(8)}
            for number, node in enumerate(("n1", "n2"))
        }
        self.claims: dict[str, Json] = {}
        self.rules: dict[str, Json] = {}
        every = ("v1", "v1beta2", "v1beta1")
        self.versions: dict[str, tuple[str, ...]] = {
            "devicetaintrules": ("v1",), "resourceslices": every, "resourceclaims": every,
        }  # fmt: skip
        self.allocatable: dict[str, str] = {"cpu": "64", "nvidia.com/gpu": "0"}
        self.away = False
        self.refuses: frozenset[str] = frozenset()
        self._numbers = 0

    # ---- what the actuator asks

    def node(self, name: str) -> Json | None:
        if self.away:
            raise AwayError("Kubernetes does not answer")
        if name not in self.devices:
            return None
        ready = [{"type": "Ready", "status": "True"}]
        status = {"conditions": ready, "allocatable": self.allocatable}
        return {"metadata": {"name": name, "resourceVersion": "1"}, "spec": {}, "status": status}

    def statuses(self) -> dict[str, str]:
        if self.away:
            raise AwayError("Kubernetes does not answer")
        return dict.fromkeys(self.devices, "Ready")

    def pods(self, node: str) -> list[Json]:
        return []

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> tuple[int, Json]:
        if self.away:
            raise AwayError("Kubernetes does not answer")
        version, resource, name = [*path.removeprefix(GROUP + "/").split("/"), "", ""][:3]
        if not resource:
            served = [{"name": each} for each, versions in self.versions.items() if version in versions]
            return (200, {"resources": served}) if served else (404, {})
        if resource in self.refuses:
            return 403, {"message": f'cannot touch resource "{resource}"'}
        if method == "GET":
            return 200, {"items": self._items(resource)}
        return self._change(method, name, dict(body or {}))

    def _items(self, resource: str) -> list[Json]:
        if resource == "resourceslices":
            return [slice_of(node, devices) for node, devices in self.devices.items() if devices]
        return list((self.claims if resource == "resourceclaims" else self.rules).values())

    def _change(self, method: str, name: str, body: Json) -> tuple[int, Json]:
        self._numbers += 1
        version = str(self._numbers)
        if method == "POST":
            name = body["metadata"]["name"]
            if name in self.rules:
                return 409, {"message": "already exists"}
            body["metadata"] |= {"uid": f"u{version}", "resourceVersion": version}
            self.rules[name] = body
            return 201, body
        there = self.rules.get(name)
        if there is None:
            return 404, {"message": "not found"}
        if method == "DELETE":
            if body["preconditions"]["uid"] != there["metadata"]["uid"]:
                return 409, {"message": "the UID in the precondition"}
            del self.rules[name]
            return 200, {}
        if body["metadata"]["resourceVersion"] != there["metadata"]["resourceVersion"]:
            return 409, {"message": "changed"}
        there["spec"]["deviceSelector"] |= body["spec"]["deviceSelector"]
        there["metadata"]["resourceVersion"] = version
        return 200, there

    # ---- what a test looks at

    @property
    def isolated(self) -> list[str]:
        """The UUIDs of the boards that no new pod gets."""
        found = []
        for rule in self.rules.values():
            where = rule["spec"]["deviceSelector"]
            found.append(self.devices.get(where["pool"], {}).get(where["device"], ""))
        return [uuid for uuid in found if uuid]
