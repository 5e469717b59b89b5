"""Whose a job is, as the message of an event: what the agent read of its processes, or the collector of Kubernetes.

One JSON object: `v` 1, `job` the scheduler's name of the job, `by` who says it (`environment` of its processes, or
`kubernetes`), `text` a sentence for people, and the fields of `JobOwner` that are known. All but the job's name and
`uid` may be what a user wrote: they are shown and summed up, and nothing is ever done because of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace

MAX_CHARS = 128  # of a value; what is longer is cut
MAX_MESSAGE = 4_000
MAX_UID = 2**32 - 2  # (uid_t)-1 is no user: chown(2)
ENVIRONMENT, KUBERNETES = "environment", "kubernetes"
_JOB = re.compile(r"[!-~]{1,320}")  # a pod's NAMESPACE/NAME has 63 and 253 characters at most


class OwnerError(ValueError):
    """A message that is no owner."""


@dataclass(frozen=True, slots=True)
class JobOwner:
    """Whose a job is; "" is not known.

    Attributes:
        by: ENVIRONMENT or KUBERNETES; of both together the latter.
        user: its name on the node. uid: of its processes, by the kernel; None: not known, or it is no person's.
        account: Slurm's account, or the namespace of a pod.
        array: ARRAY_TASK of a Slurm job array. het: JOB+OFFSET of a part of a heterogeneous job.
        controller: KIND/NAME of what made the pod, such as JobSet/llama.
        ray_job: id of Ray's job. ray_work: names of the actors' classes and of the tasks that run.
    """

    job: str
    by: str = ENVIRONMENT
    user: str = ""
    uid: int | None = None
    account: str = ""
    project: str = ""
    array: str = ""
    het: str = ""
    controller: str = ""
    ray_job: str = ""
    ray_work: str = ""


_TEXTS = tuple(each.name for each in fields(JobOwner) if each.name not in ("job", "by", "uid"))


def clean(value: str) -> str:
    """Return a value that a user wrote without what does not print, and cut."""
    if len(value) <= MAX_CHARS and value.isprintable():
        return value.strip()
    return "".join(c for c in value[: 4 * MAX_CHARS] if c.isprintable()).strip()[:MAX_CHARS]


def to_message(owner: JobOwner) -> str:
    known = {name: value for name, value in asdict(owner).items() if value not in ("", None)}
    return json.dumps({"v": 1, **known, "text": sentence(owner)}, separators=(",", ":"))


def from_message(message: str) -> JobOwner:
    """
    Raises:
        OwnerError: what is wrong with it.
    """
    if len(message) > 3 * MAX_MESSAGE:  # before it is parsed
        raise OwnerError("it is too long")
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        raise OwnerError("it is no JSON") from None
    if not isinstance(found, dict) or found.get("v") != 1:
        raise OwnerError("it is no owner of version 1")
    job, by, uid = found.get("job"), found.get("by"), found.get("uid")
    if not isinstance(job, str) or not _JOB.fullmatch(job):
        raise OwnerError("its job has no usable name")
    if by not in (ENVIRONMENT, KUBERNETES):
        raise OwnerError("it does not say who says so")
    if uid is not None and (not isinstance(uid, int) or isinstance(uid, bool) or not 0 <= uid <= MAX_UID):
        raise OwnerError("its uid is none")
    texts = {name: found.get(name, "") for name in _TEXTS}
    if not all(isinstance(value, str) for value in texts.values()):
        raise OwnerError("a value is no text")
    return JobOwner(job, by, uid=uid, **{name: clean(value) for name, value in texts.items()})


def sentence(owner: JobOwner) -> str:
    return f"owner of job {owner.job}: {', '.join(parts(owner)) or 'not known'}"


def parts(owner: JobOwner) -> list[str]:
    """Return what is known of an owner, a few words each."""
    user = owner.user or ("" if owner.uid is None else str(owner.uid))
    named = [
        ("user", user), ("account", owner.account), ("project", owner.project), ("array task", owner.array),
        ("heterogeneous job", owner.het), ("controller", owner.controller), ("Ray job", owner.ray_job),
        ("Ray runs", owner.ray_work),
    ]  # fmt: skip
    return [f"{word} {value}" for word, value in named if value]


def merged(owners: Iterable[JobOwner]) -> dict[str, JobOwner]:
    """Return one owner of each job, out of reports in order of time.

    Of each field the newest report that knows it counts, and Kubernetes before the environment.
    """
    found: dict[str, JobOwner] = {}
    for owner in sorted(owners, key=lambda each: each.by == KUBERNETES):  # stable
        before = found.get(owner.job)
        known = {name: value for name in (*_TEXTS, "uid") if (value := getattr(owner, name)) not in ("", None)}
        found[owner.job] = owner if before is None else replace(before, by=owner.by, **known)
    return found
