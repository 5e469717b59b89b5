"""What others know of a fleet's nodes: Slurm, Kubernetes, an Ansible inventory.

Formats: `scontrol -o show node` of scontrol(1); topology.conf(5), tree and block; `kubectl get nodes -o json` with the
labels of NVIDIA's GPU feature discovery (`nvidia.com/gpu.*`), of Topograph (`network.topology.nvidia.com/*`, its
docs/engines/k8s.md) and Kubernetes' well-known ones; `ansible-inventory --list`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from drover_cli.errors import CliError
from drover_core.model.fleet import FleetError, expand

PRODUCT, COUNT, CLIQUE = "nvidia.com/gpu.product", "nvidia.com/gpu.count", "nvidia.com/gpu.clique"
REPLICAS = "nvidia.com/gpu.replicas"
RACKS = (
    "topology.kubernetes.io/rack", "network.topology.nvidia.com/accelerator", CLIQUE,
)  # fmt: skip
LEAFS = ("network.topology.nvidia.com/leaf", "network.topology.nvidia.com/block")
POOLS = (
    "cloud.google.com/gke-nodepool", "eks.amazonaws.com/nodegroup", "kubernetes.azure.com/agentpool",
    "karpenter.sh/nodepool", "topology.kubernetes.io/zone",
)  # fmt: skip
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


@dataclass(frozen=True, slots=True)
class Found:
    """What a source says of a node. "" and None: nothing."""

    rack: str = ""
    leaf: str = ""
    pool: str = ""
    sku: str = ""
    gpus: int | None = None

    def over(self, other: Found) -> Found:
        """Return what this one says, and what it leaves open from `other`."""
        mine = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) not in ("", None)}
        return replace(other, **mine)


Nodes = dict[str, Found]


def of_scontrol(text: str) -> Nodes:
    """Return the nodes of `scontrol -o show node`. The pool is the node's first partition.

    Raises:
        CliError: it is something else.
    """
    found: Nodes = {}
    for entry in re.split(r"^(?=NodeName=)", text, flags=re.MULTILINE):
        name = re.match(r"NodeName=(\S+)", entry)
        if name is None:
            continue
        partitions = re.search(r"\bPartitions=(\S+)", entry)
        gres = re.search(r"\bGres=(\S+)", entry)
        models, gpus = _gres(gres[1] if gres else "")
        found[name[1]] = Found(pool=partitions[1].split(",")[0] if partitions else "", sku=models, gpus=gpus)
    if not found:
        raise CliError("Slurm: this is not what `scontrol -o show node` prints: it has no NodeName=")
    return found


def _gres(text: str) -> tuple[str, int]:
    """Return model and number of GPUs of `gpu:h100:8(S:0-1),shard:32`; gres.conf(5)."""
    models, count = [], 0
    for entry in re.sub(r"\([^)]*\)", "", text).split(","):
        kind, *rest = entry.split(":")
        if kind != "gpu" or not rest:
            continue
        number = rest[-1]
        count += int(number) if number.isdecimal() else 0
        models += rest[:1] if len(rest) > 1 else []
    return models[0] if models else "", count


def of_topology(text: str) -> Nodes:
    """Return the leaf switch of each node of a topology.conf; of a block topology, the block as its rack.

    Raises:
        CliError: it names no nodes, or not as a host list.
    """
    found: Nodes = {}
    joined = re.sub(r"\\[ \t]*\r?\n", " ", text)  # a line goes on after a backslash, as in slurm.conf
    for number, line in enumerate(joined.splitlines(), 1):
        pairs = (word.partition("=") for word in line.partition("#")[0].split())
        words = {key.lower(): value for key, _, value in pairs}
        nodes, leaf, rack = words.get("nodes", ""), words.get("switchname", ""), words.get("blockname", "")
        if not nodes or not (leaf or rack):
            continue
        try:
            names = [name for pattern in _patterns(nodes) for name in expand(pattern)]
        except FleetError as error:
            raise CliError(f"topology.conf: line {number}: {error}") from None
        for name in names:
            found[name] = Found(leaf=leaf, rack=rack).over(found.get(name, Found()))
    if not found:
        raise CliError("topology.conf: no line has SwitchName= or BlockName= with Nodes=")
    return found


def _patterns(text: str) -> Iterator[str]:
    """Yield the host lists of `a[1-2,5],b3`: commas within brackets part nothing."""
    yield from (part for part in re.split(r",(?![^\[]*\])", text) if part)


def of_kubernetes(text: str) -> Nodes:
    """Return the nodes of `kubectl get nodes -o json`.

    Raises:
        CliError: it is something else.
    """
    listed = _json(text, "kubectl get nodes -o json").get("items")
    if not isinstance(listed, list):
        raise CliError('Kubernetes: this is not what `kubectl get nodes -o json` prints: it has no "items"')
    found: Nodes = {}
    for item in listed:
        try:
            meta, labels = item["metadata"], item["metadata"].get("labels") or {}
            capacity = (item.get("status") or {}).get("capacity") or {}
            counts = [str(capacity[key]) for key in GPU_RESOURCES if key in capacity] or [str(labels.get(COUNT, ""))]
            found[str(meta["name"])] = Found(
                _first(labels, RACKS), _first(labels, LEAFS), _first(labels, POOLS), str(labels.get(PRODUCT, "")),
                _physical(counts[0], labels),
            )  # fmt: skip
        except (TypeError, KeyError, AttributeError):
            raise CliError("Kubernetes: an item is no node: it has no metadata.name") from None
    return found


def _physical(capacity: str, labels: Mapping[str, Any]) -> int | None:
    """Return the GPUs behind a capacity: with time-slicing or MPS it is their count times the replicas of each."""
    count, replicas = str(labels.get(COUNT, "")), str(labels.get(REPLICAS, ""))
    if not capacity.isdecimal():
        return None
    shared = count.isdecimal() and replicas.isdecimal() and int(capacity) == int(count) * int(replicas)
    return int(count) if shared else int(capacity)


def of_ansible(text: str) -> Nodes:
    """Return the hosts of `ansible-inventory --list` that run Drover's agent (group `drover_agents`, else all).

    Of their variables `rack`, `leaf`, `pool`, `sku` and `gpus` are read, each also with `drover_` before its name.

    Raises:
        CliError: it is something else.
    """
    inventory = _json(text, "ansible-inventory --list")
    group = "drover_agents" if "drover_agents" in inventory else "all"
    hosts, variables = _hosts(inventory, group, set()), (inventory.get("_meta") or {}).get("hostvars") or {}
    if not hosts:
        raise CliError(f"Ansible: group {group} of the inventory has no hosts")
    found: Nodes = {}
    for host in hosts:
        own = variables.get(host) or {}
        given = {key: own.get(f"drover_{key}") or own.get(key) for key in ("rack", "leaf", "pool", "sku", "gpus")}
        gpus = str(given.pop("gpus"))
        given = {key: value for key, value in given.items() if value is not None}
        found[host] = Found(**{k: str(v) for k, v in given.items()}, gpus=int(gpus) if gpus.isdecimal() else None)
    return found


def _hosts(inventory: Mapping[str, Any], group: str, seen: set[str]) -> list[str]:
    if group in seen:
        return []
    seen.add(group)
    entry = inventory.get(group) or {}
    found = list(entry.get("hosts") or ())
    for child in entry.get("children") or ():
        found += _hosts(inventory, child, seen)
    return list(dict.fromkeys(found))


def _json(text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CliError(f"this is not what `{what}` prints")
    return found


def _first(labels: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    return next((str(labels[key]) for key in keys if labels.get(key)), "")
