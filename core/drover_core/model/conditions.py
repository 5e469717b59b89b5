"""A condition of a Kubernetes node that others write, as the message of an event: the kubelet, node-problem-detector.

One JSON object: `v` 1, `type`, `status` ("True", "False", "Unknown"; "" where it is no longer reported), `reason`,
`message` and `text`, a sentence for people, and the fields of `NodeCondition` that differ from the usual.
What `status`, `reason` and `message` may be: NodeCondition of k8s.io/api/core/v1/types.go.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum

from drover_core.times import iso

CAUSE = "condition_"  # begins the cause of each finding about a condition, and no other
MAX_TYPE, MAX_REASON, MAX_MESSAGE = 120, 120, 300
MAX_CHARS = 4_000  # of the event's message


class ConditionError(ValueError):
    """A message that is no condition."""


class Standing(StrEnum):
    """What a condition means."""

    FAULT = "fault"
    WELL = "well"
    UNKNOWN = "unknown"  # its writer does not know: neither a fault nor well
    SHOWN = "shown"  # a type that nobody said how to read: shown and not judged
    GONE = "gone"  # no longer reported


class Place(StrEnum):
    """What else is known of the node."""

    SERVICE = ""
    CLOSED = "closed"  # cordoned: somebody works on it, or has taken it out
    NEW = "new"  # created a few minutes ago, or being deleted


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """
    Attributes:
        since_ms: when it took its status, by its writer's clock and never after it was read; 0: not known.
        place: of its node.
        old: it has been a fault for long when it was first seen.
        every_s: how often conditions are read.
    """

    type: str
    status: str
    reason: str = ""
    message: str = ""
    since_ms: int = 0
    standing: Standing = Standing.SHOWN
    place: Place = Place.SERVICE
    old: bool = False
    every_s: int = 60


def cause_of(condition: str) -> str:
    """Return the cause of findings about a type: `condition_kernel_deadlock` of KernelDeadlock."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", condition)
    return CAUSE + re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def is_foreign(cause: str) -> bool:
    """Whether an incident of this cause rests on what others have written on a Kubernetes node, and on nothing else."""
    return cause.startswith(CAUSE)


def cut(value: object, most: int) -> str:
    """Return a text that others wrote without what does not print, and cut."""
    text = value if isinstance(value, str) else ""
    return "".join(c if c.isprintable() else " " for c in text[: 2 * most]).strip()[:most]


def sentence(condition: NodeCondition) -> str:
    if condition.standing is Standing.GONE:
        return f"{condition.type} is no longer reported"
    why = ": ".join(part for part in (condition.reason, condition.message) if part)
    since = f", since {iso(condition.since_ms)[:19]}Z" if condition.since_ms else ""
    return f"{condition.type} is {condition.status}{since}{f' ({why})' if why else ''}"


def to_message(condition: NodeCondition) -> str:
    found: dict[str, object] = {"v": 1, "type": condition.type, "status": condition.status}
    found |= {"reason": condition.reason, "message": condition.message, "since_ms": condition.since_ms}
    found |= {"standing": condition.standing, "every_s": condition.every_s}
    if condition.place is not Place.SERVICE:
        found["place"] = condition.place
    if condition.old:
        found["old"] = True
    return json.dumps({**found, "text": sentence(condition)}, separators=(",", ":"))


def from_message(message: str) -> NodeCondition:
    """
    Raises:
        ConditionError: what is wrong with it.
    """
    if len(message) > MAX_CHARS:  # before it is parsed
        raise ConditionError("it is too long")
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        raise ConditionError("it is no JSON") from None
    if not isinstance(found, dict) or found.get("v") != 1:
        raise ConditionError("it is no condition of version 1")
    type_, since, every = found.get("type"), found.get("since_ms", 0), found.get("every_s", 60)
    if not isinstance(type_, str) or not type_ or len(type_) > MAX_TYPE:
        raise ConditionError("its type has no usable name")
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in (since, every)):
        raise ConditionError("a time is no number")
    try:
        standing, place = Standing(found.get("standing", "")), Place(found.get("place", ""))
    except ValueError:
        raise ConditionError("it is of a kind that this version does not know") from None
    return NodeCondition(
        cut(type_, MAX_TYPE), cut(found.get("status"), 16), cut(found.get("reason"), MAX_REASON),
        cut(found.get("message"), MAX_MESSAGE), since, standing, place, found.get("old") is True, every,
    )  # fmt: skip
