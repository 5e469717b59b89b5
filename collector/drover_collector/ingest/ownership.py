"""Node and GPU ownership: which agent stream may report for a node, and which node for a GPU.

An agent is identified by its spool and boot ids. When the same agent opens a second stream, the first has lost its
connection and is closed. A different agent is refused while the current owner is alive: two agents that keep replacing
each other would each store half of the node's data.
"""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import islice

import grpc
import numpy as np

from drover_collector.ingest.agents_elsewhere import AgentsElsewhere
from drover_collector.ingest.context import IngestContext
from drover_collector.ingest.limits import RecentlyUsed
from drover_collector.ingest.schema_registry import Refusal, SchemaRegistry
from drover_collector.ingest.session import Session, StreamClosed
from drover_collector.store.records import EntityRow
from drover_core.metrics.catalog import Scope

MAX_RECONNECTS = 6  # within RECONNECT_WINDOW_S: two agents probably share one spool
RECONNECT_WINDOW_S = 60.0
FREE_S = 60.0  # a GPU whose agent has gone is its pages' after so long: an agent that restarts is back by then
LOOKED_AT = 16  # streams of pages that were refused a GPU, at one look: a writer may name many


class NodeOwnership:
    """The stream that owns each node. Event loop only, but for reading `by_agents`.

    Attributes:
        by_agents: nodes whose newest stream was an agent's, not of pages.
    """

    def __init__(self, context: IngestContext, elsewhere: AgentsElsewhere) -> None:
        self._context, self._elsewhere = context, elsewhere
        self.by_agents: set[str] = set()
        self._owners: dict[str, Session] = {}
        self._reconnects: RecentlyUsed[str, tuple[float, int]] = RecentlyUsed(1_000)

    def claim(self, session: Session, node: str, spool: str, boot: str) -> None:
        """Make `session` the owner of `node` and close the previous owner's stream.

        Raises:
            StreamClosed: a different agent owns the node and is alive.
        """
        if session.scraped:
            self._check_elsewhere(node)
        owner = self._owners.get(node)
        if owner is not None and owner is not session:
            if owner.scraped != session.scraped and self._is_alive(owner):
                self._prefer_agent(owner, session, node)
            else:
                self._replace(owner, node, spool, boot)
        session.node, session.spool, session.boot = node, spool, boot
        self._owners[node] = session
        (self.by_agents.discard if session.scraped else self.by_agents.add)(node)

    def release(self, session: Session) -> bool:
        """Remove the session. Return True if its node has no owner now."""
        if self._owners.get(session.node) is not session:
            return False
        del self._owners[session.node]
        return True

    def owner_of(self, node: str) -> Session | None:
        return self._owners.get(node)

    def owners(self) -> list[Session]:
        return list(self._owners.values())

    def close_scraped(self, nodes: Set[str]) -> None:
        """Close the streams of pages of these nodes: their agents report to another collector."""
        for node in nodes & self._owners.keys():
            if self._owners[node].scraped:
                self._owners[node].close(grpc.StatusCode.ALREADY_EXISTS, self._warn_elsewhere(node))

    def _check_elsewhere(self, node: str) -> None:
        """
        Raises:
            StreamClosed: the node's agent reports to another collector, or nobody knows yet whether it does.
        """
        if not self._elsewhere.is_known:
            raise StreamClosed(grpc.StatusCode.UNAVAILABLE, "which agents report to other collectors is not read yet")
        if node in self._elsewhere:
            raise StreamClosed(grpc.StatusCode.ALREADY_EXISTS, self._warn_elsewhere(node))

    def _warn_elsewhere(self, node: str) -> str:
        text = "the agent of node %r reports to another collector: what is scraped or sent of the node here is not used"
        self._context.logger.warning((node, "elsewhere"), text, node)
        return text % node

    def _is_alive(self, owner: Session) -> bool:
        return owner.closed is None and time.monotonic() - owner.last_message_s < self._context.limits.alive_s

    def _prefer_agent(self, owner: Session, session: Session, node: str) -> None:
        """Close the scrape's stream when the node's agent comes.

        Raises:
            StreamClosed: the scrape comes while the agent is there.
        """
        text = "%s has an agent, and its exporters are scraped too: the agent's values are used. Take it off the list."
        self._context.logger.warning((node, "scraped"), text, node)
        if session.scraped:
            raise StreamClosed(grpc.StatusCode.ALREADY_EXISTS, f"node {node!r} has an agent")
        owner.close(grpc.StatusCode.ALREADY_EXISTS, f"the agent of node {node!r} has come")

    def _replace(self, owner: Session, node: str, spool: str, boot: str) -> None:
        same_agent = owner.identity == (spool, boot)
        idle_s = time.monotonic() - owner.last_message_s
        if not same_agent and idle_s < self._context.limits.alive_s and owner.closed is None:
            self._refuse(owner, node, spool, boot)
        self._context.stats.replaced += 1
        if same_agent:
            self._count_reconnect(node)
            reason = f"the same agent opened a newer stream for node {node!r}"
        else:
            reason = f"another agent took over node {node!r}; this one had sent nothing for {idle_s:.0f} s"
            self._context.logger.warning((node, "replaced"), "%s: %s", node, reason)
        owner.close(grpc.StatusCode.ABORTED, reason)

    def _refuse(self, owner: Session, node: str, spool: str, boot: str) -> None:
        reason = (
            f"node {node!r} is already reported by another agent (spool {owner.spool!r}, boot {owner.boot!r}; yours:"
            f" {spool!r}, {boot!r}). Stop one of the two agents, or set a different node name."
        )
        stats = self._context.stats
        stats.rejected["second agent"] += 1
        stats.conflicts[node] = (time.monotonic(), f"Two agents report as node {node}. The newer one is refused.")
        self._context.logger.warning((node, "second agent"), "%s: stream refused: %s", node, reason[:500])
        raise StreamClosed(grpc.StatusCode.ALREADY_EXISTS, reason)

    def _count_reconnect(self, node: str) -> None:
        now = time.monotonic()
        since, count = self._reconnects.get(node) or (now, 0)
        since, count = (now, 1) if now - since > RECONNECT_WINDOW_S else (since, count + 1)
        self._reconnects[node] = (since, count)
        if count >= MAX_RECONNECTS:
            text = f"Node {node} reconnects every few seconds. Check whether two agents share one spool folder."
            self._context.stats.conflicts[node] = (now, text)
            self._context.logger.warning((node, "reconnects"), "%s", text)


@dataclass(slots=True)
class TurnedAway:
    """GPUs that were refused on a stream of pages, because another node has them.

    Attributes:
        gpus: entity id -> id in the store. free_s: since when one of them is free; None: none is.
    """

    gpus: dict[int, int] = field(default_factory=dict)
    free_s: float | None = None


class GpuOwnership:
    """The node that reports each GPU.

    A second node that claims a GPU while the first still sends its samples is refused, so that the GPU keeps its
    history. A board that was moved is silent in between, so its new node gets it. An agent gets a GPU from pages that
    claim it: their writer may have named it wrongly, or on purpose, before the agent came. The pages get it when the
    agent has gone.
    """

    def __init__(self, context: IngestContext, elsewhere: AgentsElsewhere) -> None:
        self._owners: dict[int, Session] = {}  # entity id -> stream
        self._entities, self._elsewhere = context.store.entities.registry, elsewhere
        self._turned_away: dict[Session, TurnedAway] = {}  # streams of pages
        self._compared: tuple[int, Set[str]] = (-1, frozenset())  # version of entities, nodes: of the last `give_back`

    def __len__(self) -> int:
        return len(self._owners)

    def claim(self, session: Session, registry: SchemaRegistry) -> None:
        """Give the registry's GPUs to `session`; refuse in it those that another node is sending."""
        for index, row in list(registry.rows.items()):
            entity = int(registry.ids[index])
            owner = self._owners.get(entity)
            if owner is not None and owner.node != session.node and owner.scraped and not session.scraped:
                self._take_from(owner, entity, row, session.node)
                self._owners[entity] = session
                # Its place begins after that of the page, also where samples that waited are older.
                if (newest := self._entities.newest_row(row.entity_id)) is not None and newest.node != session.node:
                    registry.rows[index] = row.during(newest.first_ms + 1, 0)
            elif row.scope is Scope.GPU and (holder := self._holder(entity, row.entity_id, session)):
                text = f"{row.key!r} belongs to another node: {holder!r} reports it now"
                registry.refuse(index, Refusal("another node", text))
                if session.scraped:
                    self._turn_away(session, entity, row)
            else:
                self._owners[entity] = session

    def release(self, session: Session) -> None:
        self._turned_away.pop(session, None)
        if session.registry is None:
            return
        for entity in session.registry.known.tolist():
            if self._owners.get(entity) is session:
                del self._owners[entity]

    def reopen_freed(self) -> None:
        """Close streams of pages one of whose GPUs no other node has any longer: they begin again, and get it."""
        now_s = time.monotonic()
        for session in list(islice(self._turned_away, LOOKED_AT)):
            turned = self._turned_away.pop(session)
            if all(self._holder(entity, id_, session) for entity, id_ in turned.gpus.items()):
                turned.free_s = None
            elif turned.free_s is None:
                turned.free_s = now_s
            elif now_s - turned.free_s >= FREE_S:
                session.close(grpc.StatusCode.UNAVAILABLE, "a GPU that another node had is free; reconnect")
                continue
            self._turned_away[session] = turned  # behind the others

    def give_back(self, nodes: Set[str]) -> list[EntityRow]:
        """Take from pages here the GPUs that the agents of these nodes report to other collectors since.

        A writer may have named them while the agent was away.

        Returns:
            Places to store: else the page's would stay the newest, where an agent also sends what waited.
        """
        if self._compared == (self._entities.version, nodes):
            return []
        self._compared = self._entities.version, nodes
        places: list[EntityRow] = []
        for history in self._entities.moved():
            entity, newest = history[-1].name, history[-1]
            owner = self._owners.get(entity)
            if owner is None or not owner.scraped:
                continue
            since_ms = max((row.first_ms for row in history if row.node == owner.node), default=newest.first_ms)
            others = (row for row in history if row.node != owner.node and row.node in nodes)
            row = next((row for row in others if row.last_ms > since_ms), None)
            if row is None:
                continue
            self._take_from(owner, entity, row, row.node)
            del self._owners[entity]
            if newest.node == owner.node:
                places.append(row.during(newest.first_ms + 1, max(row.last_ms, newest.first_ms + 1)))
        return places

    def _holder(self, entity: int, id_: int, session: Session) -> str:
        """Return the other node that has a GPU; "": none."""
        owner = self._owners.get(entity)
        if owner is not None and owner.node != session.node and _keeps(owner, entity, session):
            return owner.node
        return self._elsewhere.holder(id_, session.node) if session.scraped else ""

    def _take_from(self, owner: Session, entity: int, row: EntityRow, node: str) -> None:
        """Refuse a GPU on an open stream of pages, for as long as the agent has it."""
        registry = owner.registry
        if registry is not None:
            why = Refusal("another node", f"{row.key!r} belongs to another node: the agent of {node!r} reports it now")
            for index in np.flatnonzero(registry.ids == np.uint64(entity)).tolist():
                registry.refuse(index, why)
            self._turn_away(owner, entity, row)

    def _turn_away(self, session: Session, entity: int, row: EntityRow) -> None:
        self._turned_away.setdefault(session, TurnedAway()).gpus[entity] = row.entity_id


def _keeps(owner: Session, entity: int, session: Session) -> bool:
    """Return whether a GPU stays its owner's: it sends samples of it, or is an agent that names it, and pages come."""
    is_agent_first = session.scraped and not owner.scraped and owner.closed is None
    return is_agent_first or _is_sending(owner, entity)


def _is_sending(session: Session, entity: int) -> bool:
    """Return True if samples of the entity arrived on an open stream."""
    registry = session.registry
    if registry is None or session.closed is not None:
        return False
    at = np.flatnonzero(registry.ids == np.uint64(entity))
    return bool(registry.has_samples[at].any())
