"""Answers to one row of a sheet: what each part of it is answered, and what the row as a whole. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from google.protobuf.message import Message

from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_methods import FleetMethod

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


class Answer(StrEnum):
    YES = "yes"
    PARTLY = "partly"
    NO = "no"
    UNKNOWN = "unknown"  # the proof could not be read


class UnreadError(Exception):
    """A part's proof could not be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a collector answered.

    Attributes:
        replies: by name of the method. unread: name of the method -> why there is no reply.
        details: of nodes that report, some of each model. previews: (node of these, act) -> what an act would meet.
    """

    replies: Mapping[str, Message] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    details: Sequence[pb.NodeDetail] = ()
    previews: Mapping[tuple[str, str], pb.ActPreview] = field(default_factory=dict)

    def of(self, method: FleetMethod[Q, R]) -> R:
        """
        Raises:
            UnreadError: the collector did not answer it.
        """
        reply = self.replies.get(method.name)
        if not isinstance(reply, method.reply):
            raise UnreadError(f"{method.name} was not answered: {self.unread.get(method.name, 'not asked')}")
        return reply

    def nodes(self) -> Sequence[pb.NodeDetail]:
        """
        Raises:
            UnreadError: no node was read.
        """
        if not self.details:
            raise UnreadError(self.unread.get("GetNode", "no node reports, so none could be looked at"))
        return self.details


Found = tuple[Answer, str]


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that a row asks for. `check` reads the proof; it may raise UnreadError."""

    what: str
    check: Callable[[Evidence], Found]

    def answered(self, evidence: Evidence) -> PartAnswer:
        try:
            answer, proof = self.check(evidence)
        except UnreadError as error:
            answer, proof = Answer.UNKNOWN, str(error)
        return PartAnswer(self.what, answer, proof)


@dataclass(frozen=True, slots=True)
class PartAnswer:
    what: str
    answer: Answer
    proof: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a sheet. `asks`: what it asks for, in our words; `source`: the page that has it."""

    id: str
    area: str
    asks: str
    source: str
    parts: tuple[Part, ...]

    def answered(self, evidence: Evidence) -> RowAnswer:
        parts = tuple(part.answered(evidence) for part in self.parts)
        return RowAnswer(self, joined([part.answer for part in parts]), parts)


@dataclass(frozen=True, slots=True)
class RowAnswer:
    row: Row
    answer: Answer
    parts: tuple[PartAnswer, ...]


def joined(parts: Sequence[Answer]) -> Answer:
    """Return the answer of a row: yes only where each part is; unknown where a part that is unknown decides."""
    found = set(parts)
    if len(found) == 1:
        return found.pop()
    if Answer.PARTLY in found or {Answer.YES, Answer.NO} <= found:
        return Answer.PARTLY
    return Answer.UNKNOWN


def share(have: int, of: int, text: str) -> Found:
    """Return yes where all have it, no where none has.

    Raises:
        UnreadError: there is nothing to look at.
    """
    if not of:
        raise UnreadError(f"nothing to look at: {text}")
    answer = Answer.YES if have >= of else Answer.PARTLY if have else Answer.NO
    return answer, f"{have} of {of} {text}"


def never(why: str) -> Callable[[Evidence], Found]:
    """Return the check of what Drover has nothing for."""
    return lambda _: (Answer.NO, why)
