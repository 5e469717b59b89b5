"""Kubernetes in memory, with GPUs of dynamic resource allocation: ResourceSlices, ResourceClaims, DeviceTaintRules.

Forms are those of resource.k8s.io/v1; the tests hold them against the models of the official client.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from drover_collector.actions.base import AwayError
from drover_collector.actions.kubernetes.gpu_taints import DRIVER, GROUP
from testbed.kubernetes_server import KubernetesServer
from testbed.waiting import wait_until

Json = dict[str, Any]


def uuid_of(board: int) -> str:
    return f"GPU-{board:08x}-0000-4000-8000-000000000000"


def slice_of(node: str, devices: Mapping[str, str], generation: int = 1, count: int = 1) -> Json:
    """Return the ResourceSlice of a node. `devices`: name -> UUID; `count`: slices of its pool."""
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{DRIVER}-{generation}"},
        "spec": {
            "driver": DRIVER, "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": count},
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
        slices_missing: each driver is about to write one more slice.
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
        self.slices_missing = False
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
            count = 1 + self.slices_missing
            return [slice_of(node, devices, count=count) for node, devices in self.devices.items() if devices]
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


@contextmanager
def behind(server: KubernetesServer, cluster: GpuCluster) -> Iterator[None]:
    """Let a real API server answer resource.k8s.io/v1 with `cluster`, as an aggregated API: who may do what is its own.

    The server of the tests is older than this group, and its build crashes on custom resources (reflect2 under Go 1.18
    and newer).
    """

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            if not path.startswith(f"{GROUP}/v1"):
                status, answer = 404, {}
            else:
                status, answer = cluster.request(self.command, path.rstrip("/"), json.loads(sent or b"{}"))
            text = json.dumps({"kind": "APIResourceList", "groupVersion": "resource.k8s.io/v1", **answer}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PATCH = do_DELETE = _do

        def log_message(self, format: str, *args: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(server.ca, server.folder / "certs/apiserver.key")
    made.socket = tls.wrap_socket(made.socket, server_side=True)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    port = made.server_address[1]
    try:
        server.call(
            "POST", "/api/v1/namespaces/default/services",
            {"metadata": {"name": "devices"}, "spec": {"type": "ExternalName", "externalName": "localhost",
             "ports": [{"port": port}]}},
        )  # fmt: skip
        server.call(
            "POST", "/apis/apiregistration.k8s.io/v1/apiservices",
            {
                "metadata": {"name": "v1.resource.k8s.io"},
                "spec": {
                    "group": "resource.k8s.io", "version": "v1", "groupPriorityMinimum": 100, "versionPriority": 10,
                    "insecureSkipTLSVerify": True,
                    "service": {"namespace": "default", "name": "devices", "port": port},
                },
            },
        )  # fmt: skip

        def served() -> bool:
            try:
                return bool(server.call("GET", f"{GROUP}/v1").get("resources"))
            except AssertionError:  # not yet
                return False

        wait_until(served, "the API server asks the aggregated one", 30.0)
        yield
    finally:
        made.shutdown()
        thread.join()
        made.server_close()
