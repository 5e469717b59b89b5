"""Dry checks of what Drover may do in a scheduler: it is asked, and nothing is changed."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drover_cli.doctor.finding import Finding, bad, ok, unknown, warn
from drover_collector.actions.base import ActError, AwayError, LaterError
from drover_collector.actions.kubernetes.gpu_taints import GROUP, NOT_SERVED, RULE_VERSIONS
from drover_collector.actions.settings import KubernetesConfig, SlurmConfig
from drover_collector.actions.slurm.scontrol import Scontrol
from drover_collector.actions.slurm.slurmrestd import Slurmrestd
from drover_collector.config import CollectorConfig
from drover_collector.detectors.conditions.rules import RULES
from drover_collector.policy.policy import Policy
from drover_core.model.fleet import FleetSpec
from drover_core.settings import SettingsError

SHOWN = 5
NO_OWNERS = "what made the pods of a job is not known to its end: Job instead of JobSet"
RBAC = "kubectl apply -k deploy/kubernetes/access"
# What deploy/kubernetes/rights/rbac.yaml grants: verb, resource, subresource, and whether Drover cannot act without it.
RIGHTS = (
    ("get", "nodes", "", True),
    ("list", "nodes", "", True),
    ("patch", "nodes", "", True),
    ("list", "pods", "", True),
    ("patch", "nodes", "status", False),
    ("create", "pods", "eviction", False),
)
DEVICES = "resource.k8s.io"
# verb, API group, resource: for rules with take_out = "gpu", and for the controllers of pods (docs/how-to/owners.md).
GPU_RIGHTS = (
    ("list", DEVICES, "resourceslices"),
    ("list", DEVICES, "resourceclaims"),
    ("list", DEVICES, "devicetaintrules"),
    ("create", DEVICES, "devicetaintrules"),
    ("patch", DEVICES, "devicetaintrules"),
    ("delete", DEVICES, "devicetaintrules"),
)
OWNER_RIGHTS = (
    ("get", "", "pods"),
    ("get", "batch", "jobs"),
    ("get", "apps", "replicasets"),
    ("get", "apps", "statefulsets"),
    ("get", "jobset.x-k8s.io", "jobsets"),
    ("get", "ray.io", "rayclusters"),
)


def slurm(config: CollectorConfig, spec: FleetSpec, client: Any = None) -> list[Finding]:
    """Whether the controller answers, knows the nodes, and lets this user change them."""
    settings = config.act.slurm
    pools = settings.pools
    names = [node.name for node in spec.nodes if not pools or node.pool in pools]
    made = client or (Scontrol(settings) if settings.slurmrestd is None else Slurmrestd(settings))
    try:
        known = made.nodes(names)
    except (AwayError, LaterError, ActError) as error:
        return [bad("slurm", str(error), "is slurmctld up, act.slurm.conf right, and munge the same as there?")]
    missing = [name for name in names if name not in known]
    if names and not known:
        text = f"answers, and knows none of the {len(names)} nodes of the fleet file"
        return [
            bad("slurm", text, "the same names in slurm.conf and fleet.toml; and a scontrol of slurmctld's version")
        ]
    found = [ok("slurm", f"answers, and knows {len(known)} of {len(names)} nodes of the fleet file")]
    if missing:
        listed = ", ".join(missing[:SHOWN]) + (f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else "")
        remedy = "names must be the same in slurm.conf and fleet.toml; or leave their pool out of act.slurm.pools"
        found.append(warn("slurm", f"does not know {listed}: they cannot be drained", remedy))
    return [*found, slurm_rights(settings)]


def slurm_rights(settings: SlurmConfig) -> Finding:
    """Slurm says to nobody beforehand what they may do: only root, SlurmUser and its administrators drain nodes."""
    user = getpass.getuser()
    if settings.slurmrestd is not None:
        text = "whether the token may change nodes is not known before it is used"
        return unknown("slurm rights", text, "its user must be SlurmUser or an administrator: sacctmgr show user")
    if user == "root":
        text = "this is root, who may change nodes; the service runs as another user"
        return unknown("slurm rights", text, "run this as the service: sudo -u drover drover doctor ...")
    text = f"whether {user} may change nodes is not known before it is done"
    return unknown("slurm rights", text, f"sacctmgr modify user {user} set adminlevel=admin (ansible: slurm_access)")


def _conditions(config: KubernetesConfig) -> str:
    if not config.conditions:
        return "their conditions are not read (act.kubernetes.conditions)"
    more = f", {len(config.warn_conditions)} by settings" if config.warn_conditions else ""
    fewer = f", without {', '.join(config.ignore_conditions)}" if config.ignore_conditions else ""
    return f"their conditions are read: {len(RULES)} types are judged{more}{fewer}"


def kubernetes(config: CollectorConfig, client: Any = None, review: Any = None) -> list[Finding]:
    """Whether the API answers, and what this token may, by SelfSubjectAccessReview.

    Rights of single GPUs are looked at where the policy has a rule that wants one out, those of owners always.
    """
    from drover_collector.actions.kubernetes.api import KubernetesApi

    api = client or KubernetesApi(config.act.kubernetes)
    try:
        count = len(api.statuses())
    except (AwayError, LaterError, ActError) as error:
        return [bad("kubernetes", str(error), f"check act.kubernetes, its token and the network; {RBAC}")]
    found = [ok("kubernetes", f"answers, with {count} nodes; {_conditions(config.act.kubernetes)}")]
    for verb, resource, part, needed in RIGHTS:
        named = f"{verb} {resource}{f'/{part}' if part else ''}"
        try:
            may = (review or api.may)(verb, resource, part)
        except (AwayError, LaterError, ActError) as error:
            return [*found, unknown("kubernetes rights", str(error), RBAC)]
        if not may:
            made = bad if needed else warn
            found.append(made("kubernetes rights", f"this token may not {named}", RBAC))
    if len(found) == 1:
        found.append(ok("kubernetes rights", ", ".join(f"{v} {r}{f'/{p}' if p else ''}" for v, r, p, _ in RIGHTS)))
    try:
        return [*found, *single_gpus(config, api), _of_group(api, "kubernetes owners", OWNER_RIGHTS, NO_OWNERS)]
    except (AwayError, LaterError, ActError) as error:
        return [*found, unknown("kubernetes rights", str(error), RBAC)]


def single_gpus(config: CollectorConfig, api: Any) -> list[Finding]:
    """Whether a rule's `take_out = "gpu"` can be done: the cluster has the API, and this token the rights.

    Raises:
        ActError and its kinds.
    """
    try:
        policy = Policy.load(None if config.policy.path is None else Path(config.policy.path), config.policy.preset)
    except SettingsError:
        return []  # reported by the check of the policy
    if not policy.isolates:
        return []
    if not served(api):
        remedy = 'Kubernetes 1.36 or newer, or the feature gates of docs/how-to/kubernetes.md; else take_out = "node"'
        return [warn("kubernetes GPUs", f'{NOT_SERVED}: rules with take_out = "gpu" take the node', remedy)]
    return [_of_group(api, "kubernetes GPUs", GPU_RIGHTS, 'rules with take_out = "gpu" take the node')]


def served(api: Any) -> bool:
    """Return whether the API server has DeviceTaintRules. Raises ActError and its kinds."""
    for version in RULE_VERSIONS:
        found = api.read(f"{GROUP}/{version}") or {}
        if any(one.get("name") == "devicetaintrules" for one in found.get("resources") or ()):
            return True
    return False


def _of_group(api: Any, name: str, rights: Sequence[tuple[str, str, str]], else_: str) -> Finding:
    """Return whether a token has all rights of a feature. Raises ActError and its kinds.

    Args:
        else_: what happens without one.
    """
    lacks = [f"{verb} {resource}" for verb, group, resource in rights if not api.may(verb, resource, "", group)]
    if lacks:
        return warn(name, f"this token may not {', '.join(lacks)}: {else_}", RBAC)
    return ok(name, ", ".join(f"{verb} {resource}" for verb, _, resource in rights))
