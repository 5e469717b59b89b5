"""How many parts a message of an agent has, counted before it is parsed.

A part of two bytes becomes an object of 30 to 75 times that when protobuf parses it, so 5 kB of gzip could take
hundreds of MiB. Counting reads the tags only, and stops at the first part too many.
"""

from __future__ import annotations

from collections.abc import Mapping

from drover_collector.ingest.decode import MAX_BLOCKS
from drover_collector.ingest.schema_registry import Refusal

# A message of so few bytes is parsed without a count: whatever is in it takes some 6 MiB. Most are shorter: 30 s of 8
# GPUs. The count of a longer one takes 7 us, where its parsing takes 100 us or more.
UNCOUNTED_BYTES = 65_536
RECORDS = 256  # of one message; agents put 64 together
SCHEMAS, COLUMNS = 1024, 16_384  # of one Hello; agents have a dozen schemas of up to 51 columns
TEXTS = 4096  # entries of a Hello's inventory, and its capabilities; agents have a few dozen
FIELDS = 128  # beyond the counted ones: those of one value, and those of newer agents
SHIFTS = 63  # a varint has ten bytes of seven bits at most

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_HELLO, _BATCH, _RECORD, _RECORDS = 1, 2, 3, 5  # fields of AgentMessage
_ENTITIES, _SCHEMAS, _INVENTORY, _CAPABILITIES = 8, 9, 10, 11  # of Hello
_LANE, _SEQ, _BLOCKS = 1, 2, 3  # of Batch
_COLUMNS = 3  # of Schema
_OF_RECORDS = 1

HELLO_TAG = _HELLO << 3 | _BYTES
JUNK = Refusal("junk", "a message that is none of ours")


class PartsError(Exception):
    """A message that is not parsed.

    Attributes:
        lane, seq: of a batch; 0 where they are not known.
    """

    def __init__(self, refusal: Refusal, lane: int = 0, seq: int = 0) -> None:
        super().__init__(refusal.text)
        self.refusal, self.lane, self.seq = refusal, lane, seq


def check(raw: bytes, entities: int) -> None:
    """Find out whether a message may be parsed. Cheap for all that agents send.

    Args:
        entities: the most that one Hello may have.
    Raises:
        PartsError: it has too many parts, or is no message.
    """
    if len(raw) > UNCOUNTED_BYTES:
        try:
            _Count(raw).message(entities)
        except IndexError:  # it ends within a tag or a length
            raise PartsError(JUNK) from None


class _Count:
    """Counts the parts of one message."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._columns = 0
        self._values: dict[int, int] = {}

    def message(self, entities: int) -> None:
        bodies: dict[int, list[tuple[int, int]]] = {_HELLO: [], _BATCH: [], _RECORD: [], _RECORDS: []}
        self._walk(0, len(self._raw), dict.fromkeys(bodies, ("parts", 1)), bodies)
        if sum(map(len, bodies.values())) > 1:  # protobuf takes the last, or joins them, and parses all
            raise PartsError(JUNK)
        for at, end in bodies[_HELLO]:
            schemas: dict[int, list[tuple[int, int]]] = {_SCHEMAS: []}
            most = {
                _ENTITIES: ("entities", entities),
                _SCHEMAS: ("schemas", SCHEMAS),
                _INVENTORY: ("entries in its inventory", TEXTS),
                _CAPABILITIES: ("capabilities", TEXTS),
            }
            self._walk(at, end, most, schemas)
            left = COLUMNS
            for begin, until in schemas[_SCHEMAS]:
                left -= self._walk(begin, until, {_COLUMNS: ("columns", left)})
        for at, end in bodies[_BATCH]:
            self._walk(at, end, {_BLOCKS: ("blocks", MAX_BLOCKS)}, seen=(_LANE, _SEQ))
        records = {_OF_RECORDS: bodies[_RECORD]}  # each a record, which holds one thing: of several, all are parsed
        for at, end in bodies[_RECORDS]:
            self._walk(at, end, {_OF_RECORDS: ("records", RECORDS)}, records)
        for at, end in records[_OF_RECORDS]:
            self._walk(at, end, {})

    def _walk(
        self,
        at: int,
        end: int,
        most: Mapping[int, tuple[str, int]],
        bodies: dict[int, list[tuple[int, int]]] | None = None,
        seen: tuple[int, ...] = (),
    ) -> int:
        """Count the fields between two places.

        Args:
            most: number of a field -> its name, and how many of it there may be. bodies: is given where these begin
                and end. seen: varints that are noted.
        Returns:
            How many of the fields in `most` there are.
        Raises:
            PartsError: too many, or it is no message. IndexError: it ends too early.
        """
        raw, counts, others = self._raw, dict.fromkeys(most, 0), 0
        while at < end:
            key = raw[at]
            at += 1
            if key > 127:
                key, at = self._varint(at - 1)
            number, kind = key >> 3, key & 7
            if number in counts:
                counts[number] += 1
                if counts[number] > most[number][1]:
                    self._refuse(*most[number])
            else:
                others += 1
                if others > FIELDS:
                    self._refuse("fields that are not known here", FIELDS)
            if kind == _BYTES:
                size = raw[at]
                at += 1
                if size > 127:
                    size, at = self._varint(at - 1)
                if bodies is not None and number in bodies:
                    bodies[number].append((at, at + size))
                at += size
            elif kind == _VARINT:
                value, at = self._varint(at)
                if number in seen:
                    self._values[number] = value
            elif kind in (_FIXED32, _FIXED64):
                at += 4 if kind == _FIXED32 else 8
            else:
                raise PartsError(JUNK)  # groups, which nobody uses
        if at != end:
            raise PartsError(JUNK)
        return sum(counts.values())

    def _varint(self, at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = self._raw[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, at
            shift += 7
            if shift > SHIFTS:
                raise PartsError(JUNK)

    def _refuse(self, name: str, most: int) -> None:
        text = f"a message with too many {name}; up to {most} are right"
        raise PartsError(Refusal("too many parts", text), self._values.get(_LANE, 0), self._values.get(_SEQ, 0))
