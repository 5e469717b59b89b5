"""Which pod holds which GPU, from the kubelet's pod-resources socket (Kubernetes 1.20 on).

The kubelet knows every GPU that it handed out, used or not. A pod is reported as NAMESPACE/POD: what owns it, a Job or
a training operator's resource, only the API server knows. Older kubelets (before the
feature gate KubeletPodResourcesListUseActivePods) also list pods that have ended, until they are deleted or their
devices are given to others.
"""

from __future__ import annotations

import fnmatch
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drover_proto import podresources_pb2 as pb

CONNECT_LIMIT_S, LIST_LIMIT_S = 0.5, 2.0  # the sampler waits 3 s
MAX_ANSWER = 16 << 20  # bytes; a pod with its devices takes some hundred

# .../kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podUID.slice/cri-containerd-ID.scope,
# /kubepods/burstable/podUID/ID, /kubelet.slice/kubelet-kubepods.slice/... (kind)
_POD = re.compile(r"/(?:[^/\n]*-)?kubepods(?:[-.][^/\n]*)?/")
_UUID = re.compile(
    r"(?:MIG-)?GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|MIG-[0-9a-fA-F]{8}[0-9a-fA-F-]{28}"
)
_NUMBER = re.compile(r"(?:^|-)gpu-(\d+)(?:-mig\b.*)?$|^(?:nvidia)?(\d{1,3})(?=$|[/:])")
DRA_DRIVER = "gpu.nvidia.com"


def in_pod(text: str) -> bool:
    """Whether a /proc/PID/cgroup is that of a pod."""
    return bool(_POD.search(text))


class PodsError(Exception):
    """The kubelet is there and does not answer; the message says why and what mends it."""


class Pods:
    """The kubelet's answers."""

    def __init__(self, path: str, resources: Sequence[str], slot_of: Callable[[str], int | None]) -> None:
        """
        Args:
            path: of the kubelet's socket; empty to do without.
            resources: patterns for names of GPU resources, as in `nvidia.com/mig-*`.
            slot_of: GPU by its UUID, that of an instance on it, or the number of its device file.
        """
        self._path, self._resources, self._slot_of = path, tuple(resources), slot_of
        self._seen = False
        self._channel: Any = None
        self._list: Callable[..., pb.ListPodResourcesResponse] | None = None
        self.unplaced: frozenset[str] = frozenset()  # devices handed out that are no GPU that is known here

    def holders(self) -> dict[int, list[str]] | None:
        """Slot -> the pods that hold it or a part of it; None where there was no kubelet yet.

        Raises:
            PodsError: there is or was one, and it does not answer or must not be asked.
        """
        if not self._is_there():
            return None
        self._seen = True
        found: dict[int, set[str]] = {}
        unplaced = set()
        for pod, device in self._devices(self._ask()):
            slot = self._slot(device)
            if slot is None:
                unplaced.add(device)
            else:
                found.setdefault(slot, set()).add(pod)
        self.unplaced = frozenset(unplaced)
        return {slot: sorted(pods) for slot, pods in found.items()}

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = self._list = None

    def _is_there(self) -> bool:
        try:
            if not self._path or not os.stat(self._path):  # noqa: PTH116  # exists() hides what is forbidden
                return False
        except (FileNotFoundError, NotADirectoryError):
            if self._seen:  # pods go on without it
                self.close()
                raise PodsError(f"{self._path} has gone: the kubelet does not run") from None
            return False
        except PermissionError:
            raise PodsError(f"{self._path}: permission denied; {_RIGHTS}") from None
        return True

    def _may_use(self) -> None:
        """gRPC says the same, wordily; access(2) does not count capabilities."""
        with socket.socket(socket.AF_UNIX) as trial:
            trial.settimeout(CONNECT_LIMIT_S)
            try:
                trial.connect(self._path)
            except PermissionError:
                raise PodsError(f"{self._path}: permission denied; {_RIGHTS}") from None
            except OSError as error:
                raise PodsError(f"{self._path}: {error.strerror or error}; is the kubelet running?") from None

    def _ask(self) -> pb.ListPodResourcesResponse:
        import grpc  # the uplink has loaded it; a node without a kubelet does not need it

        from drover_proto import podresources_pb2 as pb
        from drover_proto.podresources_pb2_grpc import PodResourcesListerStub

        if self._list is None:
            self._may_use()
            options = [
                ("grpc.default_authority", "localhost"),  # Go's server refuses the socket's path in its place
                ("grpc.max_receive_message_length", MAX_ANSWER),
                ("grpc.max_reconnect_backoff_ms", 5000),
                ("grpc.enable_http_proxy", 0),
            ]
            self._channel = grpc.insecure_channel(f"unix:{self._path}", options)
            self._list = PodResourcesListerStub(self._channel).List
        try:
            return self._list(pb.ListPodResourcesRequest(), timeout=LIST_LIMIT_S)
        except grpc.RpcError as error:
            call: Any = error
            # Without its numbers (sizes, times), for a text that changes is reported again each time.
            details = re.sub(r"\d+", "#", str(call.details()))[:200]
            raise PodsError(f"{self._path}: {call.code().name}: {details}") from None

    def _devices(self, answer: pb.ListPodResourcesResponse) -> Iterator[tuple[str, str]]:
        """(pod, device), of GPUs only."""
        for pod in answer.pod_resources:
            name = f"{pod.namespace}/{pod.name}"
            for container in pod.containers:
                for devices in container.devices:
                    if any(fnmatch.fnmatchcase(devices.resource_name, pattern) for pattern in self._resources):
                        yield from ((name, device) for device in devices.device_ids)
                for claim in (one for resource in container.dynamic_resources for one in resource.claim_resources):
                    if claim.driver_name == DRA_DRIVER and claim.device_name:
                        yield name, claim.device_name
                    elif not claim.driver_name:  # Kubernetes before 1.33 gives the CDI names alone
                        gpus = (device.name for device in claim.cdi_devices if DRA_DRIVER in device.name)
                        yield from ((name, gpu) for gpu in gpus)

    def _slot(self, device: str) -> int | None:
        """The forms that device plugins give out: GPU-UUID, MIG-UUID, MIG-GPU-UUID/GI/CI, each with ::N where they are
        shared (NVIDIA), nvidia0, nvidia0/gi3, nvidia0/vgpu1 (GKE), gpu-0 and gpu-0-mig-... (DRA), VENDOR/CLASS=NAME
        (CDI)."""
        name = device.rpartition("=")[2]
        if found := _UUID.search(name):
            return self._slot_of(found[0].removeprefix("MIG-") if found[0].startswith("MIG-GPU-") else found[0])
        number = _NUMBER.search(name)
        return self._slot_of((number[1] or number[2]) if number else name.partition("::")[0])


_RIGHTS = "it is root's: give the agent's unit AmbientCapabilities=CAP_DAC_OVERRIDE, or its group access to the socket"
