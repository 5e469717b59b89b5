"""Dry checks of the jobs that hold nodes for probes ([probes.slurm]): Slurm is asked, and no job is submitted.

Of `scontrol show config` and `show partition` (scontrol(1), slurm.conf(5)), `sacctmgr show qos` (sacctmgr(1)), and
`sbatch --test-only`, by which slurmctld itself says whether this user may have such a job.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from drover_cli.doctor.finding import Finding, bad, ok, unknown, warn
from drover_collector.actions.base import ActError
from drover_collector.actions.run_program import Ran, run
from drover_collector.actions.slurm.scontrol import failure
from drover_collector.actions.slurm.slurmrestd import in_hostlist
from drover_collector.config import CollectorConfig
from drover_collector.probes.settings import HoldConfig
from drover_core.model.fleet import FleetSpec

NAME = "probe jobs"
SHOWN = 5
LINES = (
    "in slurm.conf: PreemptType=preempt/partition_prio, PreemptMode=CANCEL, and PartitionName={} ... PriorityTier=0"
    " PreemptMode=CANCEL (docs/how-to/probe.md)"
)
QOS_LINES = "in slurm.conf: PreemptType=preempt/qos; and sacctmgr modify qos OTHERS set preempt+={}"
Ask = Callable[[Sequence[str]], Ran]


def slurm(config: CollectorConfig, spec: FleetSpec, ask: Ask | None = None) -> list[Finding]:
    """Whether Slurm takes such jobs of this user, and whether those of others preempt them.

    Args:
        ask: runs a program; for tests.
    """
    settings = config.probes.slurm
    asked = ask or _asker(settings)
    near = Path(settings.sbatch)
    scontrol = str(near.with_name("scontrol")) if near.name != settings.sbatch else "scontrol"
    try:
        slurm_config = _pairs(_said(asked, scontrol, "show", "config"))
        listed = [_words(line) for line in _said(asked, scontrol, "-o", "show", "partition").splitlines() if line]
    except ActError as error:
        return [bad(NAME, str(error), "is slurmctld up, and probes.slurm.conf right?")]
    found = [_taken(settings, asked)]
    kind = slurm_config.get("PreemptType", "")
    if settings.partition:
        found += _partition(settings, spec, kind, slurm_config.get("PreemptMode", ""), listed)
    if settings.qos:
        found += _qos(settings.qos, kind, asked, near)
    return [*found, _same_uid()]


def _taken(settings: HoldConfig, ask: Ask) -> Finding:
    where = {"partition": settings.partition, "qos": settings.qos, "account": settings.account}
    options = [*(f"--{key}={value}" for key, value in where.items() if value), *settings.options]
    try:
        _said(ask, settings.sbatch, "--test-only", "--nodes=1", "--ntasks=1", "--exclusive", "--time=1", "--chdir=/",
              *options, "--wrap=true")  # fmt: skip
    except ActError as error:
        remedy = (
            f"partition, qos and account as Slurm knows them, open to {_user()} (AllowAccounts, AllowGroups, sacctmgr)"
        )
        return bad(NAME, f"Slurm would take no job {' '.join(options)} of {_user()}: {error}", remedy)
    return ok(NAME, f"Slurm takes a job {' '.join(options)} of {_user()}")


def _partition(
    settings: HoldConfig, spec: FleetSpec, kind: str, cluster_mode: str, listed: Sequence[Mapping[str, str]]
) -> list[Finding]:
    name = settings.partition
    mine = next((each for each in listed if each.get("PartitionName") == name), None)
    if mine is None:
        known = ", ".join(each.get("PartitionName", "") for each in listed) or "none"
        remedy = f"name one of them in probes.slurm.partition, or add it; {LINES.format(name)}"
        return [bad(NAME, f"Slurm has no partition {name} (it has {known})", remedy)]
    found = []
    never = f"jobs in {name} would hold nodes and give way to nobody"
    if mine.get("State") != "UP":
        found.append(
            bad(NAME, f"partition {name} is {mine.get('State')}", f"scontrol update partition={name} state=up")
        )
    if "FORCE" in mine.get("OverSubscribe", ""):
        text = f"partition {name} has OverSubscribe=FORCE: others' jobs run next to a probe"
        found.append(bad(NAME, text, f"OverSubscribe=NO or EXCLUSIVE for {name} in slurm.conf"))
    by_qos = settings.qos and kind == "preempt/qos"
    if not by_qos:
        if kind != "preempt/partition_prio":
            found.append(bad(NAME, f"{never}: PreemptType is {kind or 'not set'}", LINES.format(name)))
        mode = mine.get("PreemptMode") or cluster_mode
        if mode == "OFF":
            found.append(bad(NAME, f"{never}: its PreemptMode is OFF", LINES.format(name)))
        found += _tiers(name, mine, listed, never)
    pools = settings.pools
    names = [node.name for node in spec.nodes if node.gpus and (not pools or node.pool in pools)]
    missing = [node for node in names if not in_hostlist(node, mine.get("Nodes", ""))]
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        text = f"{', '.join(missing[:SHOWN])}{more} not in partition {name}: probed only when drained"
        found.append(warn(NAME, text, f"Nodes= of {name} in slurm.conf; or leave their pool out of probes.slurm.pools"))
    return found or [ok(NAME, f"partition {name} is up, below all others, and gives way")]


def _tiers(name: str, mine: Mapping[str, str], listed: Sequence[Mapping[str, str]], never: str) -> list[Finding]:
    """A job is preempted by those of partitions with a higher PriorityTier, and by no others (slurm.conf(5))."""
    tier = int(mine.get("PriorityTier", "1"))
    level = [
        each["PartitionName"]
        for each in listed
        if each.get("PartitionName") != name and int(each.get("PriorityTier", "1")) <= tier
    ]
    if not level:
        return []
    text = f"{never} of {', '.join(level[:SHOWN])}: PriorityTier {tier} of {name} is not below theirs"
    return [bad(NAME, text, f"PriorityTier=0 for {name} and 1 or more for the others; {LINES.format(name)}")]


def _qos(name: str, kind: str, ask: Ask, near: Path) -> list[Finding]:
    if kind != "preempt/qos":
        text = f"PreemptType is {kind or 'not set'}: QOS {name} preempts and gives way to nobody by itself"
        return [] if kind == "preempt/partition_prio" else [bad(NAME, text, QOS_LINES.format(name))]
    sacctmgr = str(near.with_name("sacctmgr")) if near.name != str(near) else "sacctmgr"
    try:
        lines = _said(ask, sacctmgr, "-nP", "show", "qos", "format=name,preempt").splitlines()
    except ActError as error:
        return [unknown(NAME, f"whether others preempt QOS {name} is not known: {error}", QOS_LINES.format(name))]
    over = [line.partition("|")[0] for line in lines if name in line.partition("|")[2].split(",")]
    if not over:
        return [bad(NAME, f"no QOS preempts {name}: its jobs would give way to nobody", QOS_LINES.format(name))]
    return [ok(NAME, f"jobs of QOS {', '.join(over[:SHOWN])} preempt those of {name}")]


def _same_uid() -> Finding:
    """Slurm gives a job its submitter's uid, by number; the probe service takes root and its own user for it."""
    uid = os.getuid()
    if uid == 0:
        text = "this is root, whom probe services take for a job of theirs; the collector runs as another user"
        return unknown(NAME, text, "run this as the service: sudo -u drover drover doctor ...")
    text = f"whether {_user()} has uid {uid} on the nodes too, where the probe service runs as it, is not known here"
    return unknown(
        NAME,
        text,
        f"on a node: id -u drover must print {uid}; else usermod -u, here or there, or the collector as root",
    )


def _user() -> str:
    uid = os.getuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}, which has no name here"


def _asker(settings: HoldConfig) -> Ask:
    env = {"LC_ALL": "C"} | ({"SLURM_CONF": settings.conf} if settings.conf else {})
    return lambda words: run(words, settings.timeout_s, env=env)


def _said(ask: Ask, *words: str) -> str:
    ran = ask(words)
    if ran.status:
        raise failure(ran.said)
    return ran.out


def _pairs(text: str) -> dict[str, str]:
    """`Key   = value` lines."""
    return {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in text.splitlines())}


def _words(line: str) -> dict[str, str]:
    """`Key=value` words; no value of a partition has spaces."""
    return dict(re.findall(r"(\S+?)=(\S*)", line))
