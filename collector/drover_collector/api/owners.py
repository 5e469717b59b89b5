"""Whose jobs are: what agents and Kubernetes reported of their owners, and the team that the settings name.

It is for people and sums. Nothing here is asked by a detector, the policy or an actuator: a user may write into the
environment of his job what he likes.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from drover_collector.api.snapshot import DAY_MS, ApiSnapshot
from drover_collector.config import TeamConfig
from drover_collector.store import Store
from drover_core.jobs.owner import JobOwner, OwnerError, from_message, merged, parts
from drover_core.model.kinds import OWNER, EventKind
from drover_proto import fleet_pb2 as pb

MOST = 100_000  # owners that are read for one answer, the newest
KEPT_S = 30.0
BEFORE_MS = 2 * DAY_MS  # owners of jobs that go on are reported once a day
NAMED_BY = "name"  # of the pod


def add_owners(facts: ApiSnapshot, rows: Sequence[pb.JobRow]) -> None:
    """Fill in whose the jobs are, as far as that is known."""
    jobs = tuple(sorted(row.job for row in rows))

    def read() -> Mapping[str, JobOwner]:
        return read_owners(facts.store, facts.now_ms() - DAY_MS - BEFORE_MS, jobs)

    known = facts.once(("owners", jobs), KEPT_S, read)
    for row in rows:
        if (owner := _owner(known, row.job)) is not None:
            row.owner.CopyFrom(message(owner, facts.config.teams))


def teams_of(store: Store, teams: Sequence[TeamConfig], jobs: Sequence[str], since_ms: int) -> dict[str, str]:
    """Return job -> its team, of those of the jobs whose team is known."""
    known = read_owners(store, since_ms - BEFORE_MS) if jobs else {}
    owners = ((job, _owner(known, job)) for job in jobs)
    named = ((job, place_of(owner, teams)[0]) for job, owner in owners if owner is not None)
    return {job: team for job, team in named if team}


def read_owners(store: Store, since_ms: int, jobs: Sequence[str] | None = None) -> dict[str, JobOwner]:
    """Return the owners reported since then, by job. `jobs`: of these; None: of all."""
    if jobs is not None and not jobs:
        return {}
    return merged(_parsed(store.events.messages_of_code(EventKind.RANK, OWNER, since_ms, MOST, jobs)))


def _parsed(messages: Iterable[str]) -> Iterator[JobOwner]:
    for each in messages:
        with contextlib.suppress(OwnerError):  # it stays in the store as it came
            yield from_message(each)


def _owner(known: Mapping[str, JobOwner], job: str) -> JobOwner | None:
    """Return whose a job is. A pod's namespace is a part of its name, which the kubelet gives."""
    owner = known.get(job)
    namespace, slash, _ = job.partition("/")
    if not slash:
        return owner
    if owner is None:
        return JobOwner(job, NAMED_BY, account=namespace)
    return JobOwner(
        job, owner.by, account=namespace, project=owner.project, controller=owner.controller, ray_job=owner.ray_job,
        ray_work=owner.ray_work,
    )  # fmt: skip


def place_of(owner: JobOwner, teams: Sequence[TeamConfig]) -> tuple[str, str]:
    """Return (team, project) of an owner; "" is not known."""
    if not owner.account:
        return "", owner.project
    for each in teams:
        if fnmatch.fnmatchcase(owner.account, each.account):
            return each.team or owner.account, each.project or owner.project
    return owner.account, owner.project


def message(owner: JobOwner, teams: Sequence[TeamConfig]) -> pb.JobOwner:
    team, project = place_of(owner, teams)
    named = [f"team {team}"] if team and team != owner.account else []
    return pb.JobOwner(
        user=owner.user, account=owner.account, team=team, project=project, array=owner.array, het=owner.het,
        controller=owner.controller, ray_job=owner.ray_job, ray_work=owner.ray_work, said_by=owner.by,
        text=", ".join([*named, *parts(replace(owner, project=project))]),
    )  # fmt: skip
