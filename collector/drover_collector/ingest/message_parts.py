"""Count the parts of an agent's message before it is parsed.

protobuf turns a part of two bytes into an object of 30 to 75 times that size, so 5 kB of gzip could take hundreds of
MiB. Counting reads only tags, and stops at the first part beyond a limit.
"""

from __future__ import annotations

from collections.abc import Mapping

from drover_collector.ingest.decode import MAX_BLOCKS
from drover_collector.ingest.schema_registry import Refusal

# Shorter messages are parsed without counting: any content takes some 6 MiB at most. 30 s of 8 GPUs are shorter.
# Counting a longer one takes 7 us, and parsing it 100 us or more.
UNCOUNTED_BYTES = 65_536
RECORDS = 256  # of one message; agents send 64 together
SCHEMAS, COLUMNS = 1024, 16_384  # of one Hello; agents send a dozen schemas of up to 51 columns
TEXTS = 4096  # entries of a Hello's inventory, and its capabilities; agents send a few dozen
FIELDS = 128  # not counted by themselves: single values, and fields of newer agents
MAX_SHIFT = 63  # a varint has at most ten bytes of seven bits

_Most = Mapping[int, tuple[str, int]]  # number of a field -> its name, and its limit
_Bodies = dict[int, list[tuple[int, int]]]  # number of a field -> begin and end of each

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_HELLO, _BATCH, _RECORD, _RECORDS = 1, 2, 3, 5  # fields of AgentMessage
_ENTITIES, _SCHEMAS, _INVENTORY, _CAPABILITIES = 8, 9, 10, 11  # of Hello
_LANE, _SEQ, _BLOCKS = 1, 2, 3  # of Batch
_COLUMNS = 3  # of Schema
_OF_RECORDS = 1

HELLO_TAG = _HELLO << 3 | _BYTES
INVALID = Refusal("junk", "not a valid AgentMessage")


class PartsError(Exception):
    """A message must not be parsed.

    Attributes:
        lane, seq: of a batch; 0 if they are unknown.
    """

    def __init__(self, refusal: Refusal, lane: int = 0, seq: int = 0) -> None:
        super().__init__(refusal.text)
        self.refusal, self.lane, self.seq = refusal, lane, seq


def check_parts(raw: bytes, entities: int) -> None:
    """Check that a message may be parsed.

    Args:
        entities: limit of one Hello.
    Raises:
        PartsError: it has too many parts, or is invalid.
    """
    if len(raw) > UNCOUNTED_BYTES:
        try:
            _PartCounter(raw).check(entities)
        except IndexError:  # it ends within a tag or a length
            raise PartsError(INVALID) from None


class _PartCounter:
    """Counts the parts of one message."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._columns = 0
        self._values: dict[int, int] = {}

    def check(self, entities: int) -> None:
        bodies: _Bodies = {_HELLO: [], _BATCH: [], _RECORD: [], _RECORDS: []}
        self._walk(0, len(self._raw), dict.fromkeys(bodies, ("parts", 1)), bodies)
        if sum(map(len, bodies.values())) > 1:  # protobuf parses all of them
            raise PartsError(INVALID)
        for at, end in bodies[_HELLO]:
            schemas: _Bodies = {_SCHEMAS: []}
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
        records = {_OF_RECORDS: bodies[_RECORD]}
        for at, end in bodies[_RECORDS]:
            self._walk(at, end, {_OF_RECORDS: ("records", RECORDS)}, records)
        for at, end in records[_OF_RECORDS]:
            self._walk(at, end, {})

    def _walk(self, at: int, end: int, most: _Most, bodies: _Bodies | None = None, seen: tuple[int, ...] = ()) -> int:
        """Count the fields between two offsets.

        Args:
            bodies: receives the begin and end of these fields. seen: varints whose values are kept.
        Returns:
            How many fields of `most` there are.
        Raises:
            PartsError: too many, or invalid. IndexError: it ends within a field.
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
                    self._refuse("unknown fields", FIELDS)
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
                raise PartsError(INVALID)  # groups, which no agent sends
        if at != end:
            raise PartsError(INVALID)
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
            if shift > MAX_SHIFT:
                raise PartsError(INVALID)

    def _refuse(self, name: str, most: int) -> None:
        text = f"a message with too many {name}; at most {most} are allowed"
        raise PartsError(Refusal("too many parts", text), self._values.get(_LANE, 0), self._values.get(_SEQ, 0))
