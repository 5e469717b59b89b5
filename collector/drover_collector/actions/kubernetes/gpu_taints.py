"""One GPU out of service in Kubernetes: a DeviceTaintRule for the device that dynamic resource allocation has for it.

    drover-gpu-UUID        the rule; its label says that it is Drover's, its annotations why, with node and slot
    drover.dev/isolated    key of its taint, NoSchedule, with the incident as value: no new claim gets the device, pods
                           that run keep it

A rule names driver, pool and device, not the UUID (DeviceTaintSelector of the API group resource.k8s.io; KEP 5055). The
driver of NVIDIA calls devices gpu-MINOR, so after a boot the same name may be another board: `mend` compares the rule
with the device's attribute "uuid" in the newest ResourceSlices, and moves the rule, or removes it from a board that it
was not made for. DeviceTaintRule is v1alpha3 until Kubernetes 1.35, v1beta2 in 1.36, v1 from 1.37 on; ResourceSlices
and ResourceClaims are v1 from 1.34 on, v1beta2 and v1beta1 before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from drover_collector.actions.base import (
    ActError,
    CheckLease,
    ForeignError,
    GpuState,
    LaterError,
    NotAloneError,
    Result,
    gpu_of,
    mark_of,
    own_mark,
    reason_of,
)
from drover_collector.actions.kubernetes.api import good
from drover_core.model.events import Action, GpuRef

DRIVER = "gpu.nvidia.com"
TAINT, REASON, UUID, NODE, SLOT = (f"drover.dev/{name}" for name in ("isolated", "reason", "uuid", "node", "slot"))
LABEL, OURS = "app.kubernetes.io/managed-by", "drover"
GROUP = "/apis/resource.k8s.io"
RULE_VERSIONS = ("v1", "v1beta2", "v1alpha3")
OTHER_VERSIONS = ("v1", "v1beta2", "v1beta1")
PAGE = "500"
PATIENCE = 6  # tries, about 40 s, for a driver that starts again
NOT_SERVED = (
    "this cluster serves no DeviceTaintRule (resource.k8s.io): before Kubernetes 1.36 it needs the API version v1alpha3"
    " and the feature gates DRADeviceTaints and DRADeviceTaintRules"
)
Json = dict[str, Any]


class Client(Protocol):
    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> tuple[int, Json]: ...

    def node(self, name: str) -> Json | None: ...


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as dynamic resource allocation has it."""

    driver: str
    pool: str
    name: str

    @property
    def selector(self) -> dict[str, str]:
        return {"driver": self.driver, "pool": self.pool, "device": self.name}


@dataclass(frozen=True, slots=True)
class Slices:
    """The newest ResourceSlices of NVIDIA's driver: device -> UUID, of whole GPUs; nodes with MIG devices of a GPU.

    `torn`: nodes of pools that lack a slice: while a driver writes them, a device that is missing is not gone
    (`resourceSliceCount` of the API's ResourcePool).
    """

    uuids: Mapping[Device, str]
    nodes: Mapping[Device, str]
    parents: frozenset[str]
    torn: frozenset[str]

    def boards(self, node: str) -> frozenset[str]:
        """Return the UUIDs of a node's GPUs; none while a pool of its lacks a slice."""
        return frozenset(u for device, u in self.uuids.items() if self.nodes[device] == node and node not in self.torn)

    def lacks(self, uuid: str) -> bool:
        """Return whether no node has a GPU, as a whole or split."""
        return uuid not in self.parents and uuid not in self.uuids.values()

    def fits(self, uuid: str, selector: Mapping[str, str]) -> bool:
        """Return whether a selector is about this GPU, or about none while the driver does not list it."""
        right = self.device(uuid)
        if right is not None:
            return selector == right.selector
        return all(device.selector != selector for device, own in self.uuids.items() if own != uuid)

    def device(self, uuid: str) -> Device | None:
        """Return the device with a UUID; None: none has it, or several, and nobody knows which is meant."""
        found = self.devices(uuid)
        return found[0] if len(found) == 1 else None

    def devices(self, uuid: str) -> list[Device]:
        return [device for device, own in self.uuids.items() if own == uuid]


class GpuTaints:
    """Not for several threads at once. All calls raise ActError and its kinds.

    Args:
        gpu_resources: beginnings of the names under which device plugins hand out GPUs.
    """

    def __init__(self, client: Client, gpu_resources: tuple[str, ...]) -> None:
        self._client, self._gpu_resources = client, gpu_resources
        self._found: dict[str, str] = {}  # resource -> path of its served version

    # ---- acts

    def isolate(self, action: Action, check_lease: CheckLease) -> Result:
        gpu = gpu_of(action)
        if (rule := self._rule(gpu.uuid)) is not None:
            if _mark(rule) == own_mark(action):
                moved = self.mend(GpuState(gpu.uuid, action.node), check_lease)
                return Result(f"isolated already, by DeviceTaintRule {_name(gpu.uuid)}{moved and f'; {moved}'}")
            raise ForeignError(f"it is isolated for another incident, {_mark(rule)}: left unchanged")
        device = self._device_of(gpu.uuid, action.node, action.attempts < PATIENCE)
        check_lease()
        notes = {REASON: reason_of(action), UUID: gpu.uuid, NODE: action.node, SLOT: str(gpu.slot)}
        self._create(gpu.uuid, device, own_mark(action), notes)
        rule = self._rule(gpu.uuid)
        if rule is None or _mark(rule) != own_mark(action) or _selector(rule) != device.selector:
            raise LaterError("Kubernetes took the DeviceTaintRule and does not show it")
        jobs = self._holders(device)
        run_on = f"run on to their end: {', '.join(jobs)}" if jobs else "no pod holds it"
        return Result(f"no new pod gets device {device.name} of {action.node} ({gpu.uuid}); {run_on}")

    def give_back(self, action: Action, check_lease: CheckLease) -> Result:
        gpu = gpu_of(action)
        rule = self._rule(gpu.uuid)
        if rule is None:
            return Result("in service already")
        if _mark(rule) != own_mark(action):
            raise ForeignError(f"it is isolated for another incident, {_mark(rule)}: left unchanged")
        check_lease()
        self._delete(rule)
        if self._rule(gpu.uuid) is not None:
            raise LaterError("Kubernetes took the end of the DeviceTaintRule and still shows it")
        return Result("pods get it again")

    # ---- looks

    def isolated(self) -> list[GpuState]:
        rules = self._rules()
        if not rules:
            return []
        slices = self._slices()
        held = self._held()
        found = []
        for rule in rules:
            notes = rule["metadata"].get("annotations") or {}
            uuid = str(notes.get(UUID, ""))
            device = slices.device(uuid)
            slot = str(notes.get(SLOT, ""))
            found.append(
                GpuState(
                    uuid, str(notes.get(NODE, "")), int(slot) if slot.isdecimal() else None, _mark(rule),
                    str(notes.get(REASON, "")), None if device is None else tuple(sorted(held.get(device, ()))),
                    slices.fits(uuid, _selector(rule)), slices.boards(str(notes.get(NODE, ""))), slices.lacks(uuid),
                )
            )  # fmt: skip
        return found

    def mend(self, state: GpuState, check_lease: CheckLease) -> str:
        """Move a rule to where its GPU is now, and remove it where its device is another board.

        Nothing is done while the driver lists neither: it starts again, or the node boots.
        """
        rule = self._rule(state.uuid)
        if rule is None:
            return ""
        slices = self._slices()
        right, there = slices.device(state.uuid), _selector(rule)
        if right is not None and there == right.selector:
            return ""
        if right is None:
            wrong = next((uuid for device, uuid in slices.uuids.items() if device.selector == there), None)
            if wrong is None or wrong == state.uuid:
                return ""
            check_lease()
            self._move(rule, Device(DRIVER, there["pool"], _nowhere(state.uuid)))
            return f"device {there.get('device')} is another board now ({wrong}) and is given out again"
        check_lease()
        self._move(rule, right)
        return f"it is device {right.name} now, no longer {there.get('device')}; the rule was moved"

    def why_not_alone(self, node: str, gpu: GpuRef) -> str:
        """Return why a GPU cannot go without its node; "": nothing is known against it. Raises LaterError, ActError."""
        try:
            if self._rule(gpu.uuid) is None:
                self._device_of(gpu.uuid, node, patient=True)
        except NotAloneError as error:
            return str(error)
        return ""

    # ---- parts

    def _device_of(self, uuid: str, node: str, patient: bool) -> Device:
        """Return the device that a node's driver has for a GPU.

        Raises:
            NotAloneError: there is none, or not for sure. LaterError: its driver may start again, if `patient`.
        """
        slices = self._slices()
        device = slices.device(uuid)
        if device is None:
            if several := slices.devices(uuid):
                named = ", ".join(f"{each.pool}/{each.name}" for each in several)
                raise NotAloneError(f"the ResourceSlices have UUID {uuid} {len(several)} times: {named}")
            if uuid in slices.parents:
                raise NotAloneError("it is split into MIG devices")
            if slices.uuids and node not in slices.nodes.values() and patient:
                raise LaterError(f"no ResourceSlice has any device of {node} now")
            raise NotAloneError(f"no ResourceSlice of {DRIVER} has a device with UUID {uuid}")
        if slices.nodes[device] != node:
            raise NotAloneError(f"the ResourceSlices have UUID {uuid} on {slices.nodes[device] or 'no node'}")
        self._refuse_device_plugin(node)
        return device

    def _move(self, rule: Json, device: Device) -> None:
        """In one call: a rule that is gone in between would put the GPU back."""
        meta = rule["metadata"]
        path = f"{self._path('devicetaintrules', RULE_VERSIONS)}/{meta['name']}"
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "spec": {"deviceSelector": device.selector}}
        status, answer = self._client.request("PATCH", path, body)
        good(status, answer, f"move DeviceTaintRule {meta['name']}")

    def _create(self, uuid: str, device: Device, mark: str, notes: Mapping[str, str]) -> None:
        path = self._path("devicetaintrules", RULE_VERSIONS)
        body = {
            "apiVersion": path.removeprefix("/apis/").removesuffix("/devicetaintrules"), "kind": "DeviceTaintRule",
            "metadata": {"name": _name(uuid), "labels": {LABEL: OURS}, "annotations": dict(notes)},
            "spec": {
                "deviceSelector": device.selector,
                "taint": {"key": TAINT, "value": mark, "effect": "NoSchedule"},
            },
        }  # fmt: skip
        status, answer = self._client.request("POST", path, body)
        if status == 403:
            raise NotAloneError(f"{_said(answer)} (403); deploy/kubernetes/rights/rbac.yaml has the rights it needs")
        good(status, answer, f"create DeviceTaintRule {_name(uuid)}")

    def _delete(self, rule: Json) -> None:
        """By its UID: not one that somebody has made in its place."""
        meta = rule["metadata"]
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": meta["uid"]}}
        path = f"{self._path('devicetaintrules', RULE_VERSIONS)}/{meta['name']}"
        status, answer = self._client.request("DELETE", path, body)
        if status != 404:
            good(status, answer, f"delete DeviceTaintRule {meta['name']}")

    def _rules(self) -> list[Json]:
        return list(self._items("devicetaintrules", RULE_VERSIONS, {"labelSelector": f"{LABEL}={OURS}"}))

    def _rule(self, uuid: str) -> Json | None:
        return next((rule for rule in self._rules() if rule["metadata"]["name"] == _name(uuid)), None)

    def _slices(self) -> Slices:
        """Of each pool the newest generation: older slices are about to go."""
        slices = list(self._items("resourceslices", OTHER_VERSIONS, {"fieldSelector": f"spec.driver={DRIVER}"}))
        newest: dict[str, int] = {}
        missing: dict[tuple[str, int], int] = {}  # (pool, generation) -> how many of its slices are not there
        for one in slices:
            pool = one["spec"].get("pool") or {}
            name, generation = str(pool.get("name", "")), int(pool.get("generation") or 0)
            newest[name] = max(generation, newest.get(name, generation))
            count = int(pool.get("resourceSliceCount") or 0)
            missing[name, generation] = missing.get((name, generation), count) - 1
        uuids, nodes, parents, torn = {}, {}, set(), set()
        for one in slices:
            spec, pool = one["spec"], one["spec"].get("pool") or {}
            name = str(pool.get("name", ""))
            if spec.get("driver") != DRIVER or int(pool.get("generation") or 0) != newest[name]:
                continue
            if missing[name, newest[name]]:
                torn.add(str(spec.get("nodeName") or ""))
            for each in spec.get("devices") or ():
                read = _reader(each)
                parents |= {read("parentUUID")} - {""}
                if read("type") == "gpu" and read("uuid"):
                    device = Device(DRIVER, name, str(each["name"]))
                    uuids[device], nodes[device] = read("uuid"), str(spec.get("nodeName") or "")
        return Slices(uuids, nodes, frozenset(parents), frozenset(torn))

    def _held(self) -> dict[Device, set[str]]:
        """Return device -> claims that have it, without those that only look on (adminAccess)."""
        found: dict[Device, set[str]] = {}
        for claim in self._items("resourceclaims", OTHER_VERSIONS, {}):
            allocation = (claim.get("status") or {}).get("allocation") or {}
            for result in (allocation.get("devices") or {}).get("results") or ():
                if not result.get("adminAccess"):
                    device = Device(*(str(result.get(key, "")) for key in ("driver", "pool", "device")))
                    meta = claim["metadata"]
                    found.setdefault(device, set()).add(f"{meta['namespace']}/{meta['name']}")
        return found

    def _holders(self, device: Device) -> list[str]:
        return sorted(self._held().get(device, ()))

    def _refuse_device_plugin(self, name: str) -> None:
        """Refuse a node whose GPUs a device plugin hands out: taints of devices do not reach its pods."""
        node = self._client.node(name)
        if node is None:
            raise ActError(f"Kubernetes knows no node {name}")
        allocatable = (node.get("status") or {}).get("allocatable") or {}
        plugged = [key for key, value in allocatable.items() if key.startswith(self._gpu_resources) and value != "0"]
        if plugged:
            raise NotAloneError(f"a device plugin hands out the GPUs of {name} as {plugged[0]}, past any device taint")

    def _items(self, resource: str, versions: tuple[str, ...], query: Mapping[str, str]) -> Iterator[Json]:
        """Yield all objects of a resource, page by page."""
        path, after = self._path(resource, versions), ""
        while True:
            asked = {**query, "limit": PAGE} | ({"continue": after} if after else {})
            status, body = self._client.request("GET", path, None, asked)
            if status == 403:
                raise NotAloneError(f"{_said(body)} (403); deploy/kubernetes/rights/rbac.yaml has the rights it needs")
            page = good(status, body, f"list {resource}")
            yield from (item for item in page.get("items") or () if isinstance(item, dict))
            after = str((page.get("metadata") or {}).get("continue") or "")
            if not after:
                return

    def _path(self, resource: str, versions: tuple[str, ...]) -> str:
        """Return the path of a resource in the newest version that the server has. Raises NotAloneError: in none."""
        if (known := self._found.get(resource)) is not None:
            return known
        for version in versions:
            status, body = self._client.request("GET", f"{GROUP}/{version}")
            if status == 404:
                continue
            served = good(status, body, "list what resource.k8s.io has").get("resources") or ()
            if any(one.get("name") == resource for one in served):
                return self._found.setdefault(resource, f"{GROUP}/{version}/{resource}")
        raise NotAloneError(NOT_SERVED)


def _reader(device: Json) -> Callable[[str], str]:
    """Return a reader of a device's attributes; in v1beta1 they lie under "basic"."""
    attributes = (device.get("basic") or device).get("attributes") or {}

    def read(name: str) -> str:
        value = attributes.get(name) or attributes.get(f"{DRIVER}/{name}") or {}
        return str(value.get("string", ""))

    return read


def _name(uuid: str) -> str:
    return f"drover-{uuid.lower()}"


def _nowhere(uuid: str) -> str:
    """Return the name of a device that no driver has: the rule waits there for its GPU."""
    return f"none-{uuid.lower()}"[:63].rstrip("-")


def _mark(rule: Json) -> str:
    notes = rule["metadata"].get("annotations") or {}
    taint = (rule.get("spec") or {}).get("taint") or {}
    mark = str(taint.get("value", ""))
    return mark if mark_of(str(notes.get(REASON, ""))) == mark else ""


def _selector(rule: Json) -> dict[str, str]:
    found = (rule.get("spec") or {}).get("deviceSelector") or {}
    return {key: str(found.get(key) or "") for key in ("driver", "pool", "device")}


def _said(body: Json) -> str:
    return str(body.get("message") or "the API server refuses")
