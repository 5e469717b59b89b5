"""A kubelet's pod-resources socket: a real gRPC server on a real Unix socket; only who answers is fake."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict

from drover_proto import podresources_pb2 as pb
from drover_proto.podresources_pb2_grpc import PodResourcesListerServicer, add_PodResourcesListerServicer_to_server


class Kubelet(PodResourcesListerServicer):
    """Set `pods` (as JSON) to change what it reports, `silent` to let it hang, `refusal` to let it refuse,
    with `words`."""

    def __init__(self, pods: list[dict[str, Any]]) -> None:
        self.pods = pods
        self.refusal: grpc.StatusCode | None = None
        self.words = "refused by the test"
        self.silent = False
        self.asked = 0
        self.end = threading.Event()

    def List(self, request: pb.ListPodResourcesRequest, context: grpc.ServicerContext) -> pb.ListPodResourcesResponse:
        self.asked += 1
        if self.silent:
            self.end.wait(120)
        if self.refusal:
            context.abort(self.refusal, self.words)
        return ParseDict({"podResources": self.pods}, pb.ListPodResourcesResponse())


@contextmanager
def serving(socket: Path, pods: list[dict[str, Any]]) -> Iterator[Kubelet]:
    kubelet = Kubelet(pods)
    server = grpc.server(ThreadPoolExecutor(2))
    add_PodResourcesListerServicer_to_server(kubelet, server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield kubelet
    finally:
        kubelet.end.set()
        server.stop(0).wait()


def pod(name: str, *devices: str, resource: str = "nvidia.com/gpu", namespace: str = "team") -> dict[str, Any]:
    containers = [{"name": "main", "devices": [{"resourceName": resource, "deviceIds": list(devices)}]}]
    return {"name": name, "namespace": namespace, "containers": containers}
