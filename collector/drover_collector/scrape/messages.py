"""One node's values as the messages that its agent would send: a Hello, batches, and records of XIDs."""

from __future__ import annotations

from drover_collector.scrape.blind import XID_EVENTS, blindness, inventory
from drover_collector.scrape.gpu_ids import GpuId
from drover_collector.scrape.mapping import Found
from drover_collector.scrape.tables import ALL_NAMES, Table, table
from drover_core import VERSION
from drover_core.metrics.catalog import BY_NAME, Metric, Scope
from drover_core.model.kinds import EventKind
from drover_core.model.scraped import SPOOL
from drover_core.xid.codes import lookup
from drover_proto import telemetry_pb2 as pb
from drover_proto.blocks import BlockBuilder, schema_message

PROTOCOL = 1
MAX_ENTITIES = 512  # a node whose GPUs have new names at each read is cut off here
_SCOPES = {Scope.GPU: pb.GPU, Scope.NODE: pb.NODE, Scope.LINK: pb.LINK}
STATES = ("exporters_up", "exporters_down")


def _columns(scope: Scope) -> tuple[Metric, ...]:
    """Return all metrics of a scope that some table gives: equal schemas of nodes are decoded together."""
    found = {m.id: m for name in ALL_NAMES for m in table(name).metrics() if m.scope is scope}
    if scope is Scope.NODE:
        found |= {BY_NAME[name].id: BY_NAME[name] for name in STATES}
    return tuple(found[number] for number in sorted(found))


class NodeMessages:
    """Makes the messages of one node. `hello` is new after each `add` that returns True."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._builders = {scope: BlockBuilder(number, _columns(scope)) for number, scope in enumerate(_SCOPES, 1)}
        self._entities: dict[object, pb.Entity] = {"": pb.Entity(index=0, scope=pb.NODE, key=node)}
        self._titles: set[str] = set()
        self._tables: set[str] = set()
        self._vendors: set[str] = set()
        self._seen: set[str] = set()
        self._seq = 0
        self.hello = pb.AgentMessage()

    def blind(self) -> dict[str, str]:
        """Return detector -> what it cannot judge on this node; empty before a page was read."""
        return blindness(self._seen, self._vendors, self._tables) if self._titles else {}

    def add(self, ts_ms: int, found: Found, tables: list[Table], up: int, down: int) -> tuple[bool, bytes, list[bytes]]:
        """Return whether the Hello is new, the batch of one round of the node's pages, and records of its XIDs.

        Args:
            tables: of the pages that answered. up, down: how many did, and did not.
        """
        known = len(self._entities), len(self._seen), len(self._titles)
        self._titles |= {t.title for t in tables}
        self._tables |= {t.name for t in tables}
        self._vendors |= {t.vendor for t in tables if t.vendor} | found.vendors
        if any(row.event for t in tables for row in t.rows):
            self._seen.add(XID_EVENTS)
        self._row(ts_ms, Scope.NODE, "", found.node | {"exporters_up": float(up), "exporters_down": float(down)})
        for gpu, values in found.gpus.items():
            self._row(ts_ms, Scope.GPU, gpu, values)
        for link, values in found.links.items():
            self._row(ts_ms, Scope.LINK, link, values)
        blocks = [block for builder in self._builders.values() if (block := builder.take()) is not None]
        # Sequences go on after a restart. They grow where the collector's clock is set back too: what is not above the
        # last one is taken for stored.
        self._seq = max(ts_ms, self._seq + 1)
        batch = pb.AgentMessage(batch=pb.Batch(lane=pb.LIVE, seq=self._seq, blocks=blocks))
        records = [self._xid(ts_ms, number, *xid) for number, xid in enumerate(found.xids[:64])]
        fresh = known != (len(self._entities), len(self._seen), len(self._titles)) or not self.hello.HasField("hello")
        if fresh:
            self.hello = self._hello(ts_ms)
        return fresh, batch.SerializeToString(), records

    def follow(self, other: NodeMessages) -> None:
        """Go on in the node's stream behind `other`: numbers grow, and the Hello is said again, for indexes differ."""
        self._seq = max(self._seq, other._seq)
        self.hello = pb.AgentMessage()

    def stopped(self, ts_ms: int) -> bytes:
        """Return the record that the node's pages are not read any more, as an agent says it that is stopped."""
        self._seq = max(ts_ms, self._seq + 1)
        event = pb.Event(
            ts_ms=ts_ms, kind=EventKind.LIFECYCLE, code="agent_stopped", source="scrape", count=1,
            message="taken off the list of targets: its pages are not read any more",
        )  # fmt: skip
        return pb.AgentMessage(record=pb.Record(seq=self._seq * 64, event=event)).SerializeToString()

    def _row(self, ts_ms: int, scope: Scope, entity: object, values: dict[str, float]) -> None:
        known = self._entities.get(entity)
        if known is None:
            if len(self._entities) >= MAX_ENTITIES:
                return
            known = self._entities[entity] = self._entity(scope, entity)
        self._seen |= values.keys()
        if values:
            self._builders[scope].add(ts_ms, known.index, values)

    def _entity(self, scope: Scope, entity: object) -> pb.Entity:
        index = len(self._entities)
        if isinstance(entity, GpuId):
            return pb.Entity(
                index=index, scope=pb.GPU, key=entity.key, gpu=entity.slot, uuid=entity.uuid, serial=entity.serial,
                pci=entity.pci, model=entity.model,
            )  # fmt: skip
        return pb.Entity(index=index, scope=_SCOPES[scope], key=f"{self._node}/{entity}", link=str(entity))

    def _hello(self, ts_ms: int) -> pb.AgentMessage:
        schemas = [
            schema_message(builder.schema_id, _SCOPES[scope], builder.metrics)
            for scope, builder in self._builders.items()
        ]
        hello = pb.Hello(
            node=self._node, boot_id="", spool_id=SPOOL, agent_version=f"{VERSION} (scraped)", protocol=PROTOCOL,
            ts_ms=ts_ms, entities=list(self._entities.values()), schemas=schemas,
            inventory=inventory(self._titles, self.blind()),
        )  # fmt: skip
        return pb.AgentMessage(hello=hello)

    def _xid(self, ts_ms: int, number: int, slot: int, code: int) -> bytes:
        row = lookup(code)
        text = f"XID {code}: {row.meaning}" if row else f"XID {code}"
        event = pb.Event(
            ts_ms=ts_ms, gpu=slot, kind="xid", code=str(code), message=f"{text} (by dcgm-exporter)",
            source="dcgm-exporter", count=1,
        )  # fmt: skip
        return pb.AgentMessage(record=pb.Record(seq=self._seq * 64 + number, event=event)).SerializeToString()
