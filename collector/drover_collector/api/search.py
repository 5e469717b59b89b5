"""Search: what a text names in the fleet. At most MOST hits, found without a question to the store.

GPUs are looked for in one long text of all UUIDs and serial numbers, so that 100,000 of them take milliseconds.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from drover_collector.api import jobs as api_jobs
from drover_collector.api.snapshot import HEALTH_ORDER, RECENT_MS, ApiSnapshot, bad_argument, worst_first
from drover_collector.incidents.health import HEALTHS
from drover_collector.store import EntityRow
from drover_core.model.events import Health, Incident
from drover_core.times import iso
from drover_core.xid.codes import ADVICE, XIDS
from drover_proto import fleet_pb2 as pb

LIMIT, MOST = 20, 100
TEXT_CHARS = 200
OF_KIND = 6  # hits of one kind, while others have some
GPU_CHARS = 4  # a shorter text is part of too many UUIDs to say anything
WORD_CHARS = 4  # of the name of an XID
GPUS_S = 60.0  # a GPU that came since is found after this time
EXACT, PREFIX, PART = range(3)
XID_CODE = re.compile(r"xid[ _:-]*(\d{1,4})")
GPU_OF_NODE = re.compile(r"(\S+?)(?:[ /:]|\s+gpu\s*|/gpu)(\d{1,3})")  # r03n06 gpu 3, r03n06:3, r03n06/3

Found = tuple[int, pb.SearchHit]  # how it matches, and what


def search(facts: ApiSnapshot, request: pb.SearchRequest) -> pb.SearchReply:
    text = " ".join(request.text.casefold().split())
    if len(text) > TEXT_CHARS:
        raise bad_argument(f"text has {len(text)} characters: give at most {TEXT_CHARS}")
    if not text:
        return pb.SearchReply()
    limit = min(request.limit or LIMIT, MOST)
    incidents = sorted(facts.incidents(facts.now_ms() - RECENT_MS), key=worst_first)
    finders: tuple[Callable[[], Iterator[Found]], ...] = (
        lambda: _nodes(facts, text, limit),
        lambda: _gpus(facts, text),
        lambda: _jobs(facts, text, limit),
        lambda: _incidents(incidents, text),
        lambda: _xids(incidents, text),
        lambda: _places(facts, "rack", facts.index.racks, text),
        lambda: _places(facts, "leaf", facts.index.leafs, text),
    )
    kinds = [list(islice(finder(), limit + 1)) for finder in finders]
    hits, more = chosen(kinds, limit)
    return pb.SearchReply(hits=hits, more=more)


def chosen(kinds: Sequence[Sequence[Found]], limit: int) -> tuple[list[pb.SearchHit], bool]:
    """Return at most `limit` hits of all kinds, the kind with the best match first, and whether some are left out.

    Args:
        kinds: hits of each kind, best first.
    """
    given = sorted((found for found in kinds if found), key=lambda found: found[0][0])
    taken = [min(len(found), OF_KIND) for found in given]
    while sum(taken) > limit:
        taken[taken.index(max(taken))] -= 1
    for number, found in enumerate(given):
        taken[number] += min(len(found) - taken[number], limit - sum(taken))
    hits = [hit for found, count in zip(given, taken, strict=True) for _, hit in found[:count]]
    return hits, sum(map(len, given)) > len(hits)


def match(name: str, text: str) -> int | None:
    """Return how `name` matches `text`, which has no capitals; None: it does not."""
    name = name.casefold()
    if text not in name:
        return None
    return EXACT if name == text else PREFIX if name.startswith(text) else PART


def _ranked(names: Iterable[str], text: str) -> list[tuple[int, str, int]]:
    """(match, name, its place among `names`), the best first."""
    found = [(how, name, at) for at, name in enumerate(names) if (how := match(name, text)) is not None]
    return sorted(found, key=lambda one: (one[0], one[1]))


def _nodes(facts: ApiSnapshot, text: str, limit: int) -> Iterator[Found]:
    """Of those that match alike the worst first."""
    nodes, codes = facts.index.nodes, facts.pipeline.engine.health_codes[0]
    ranked = _ranked((node.name for node in nodes), text)
    ranked.sort(key=lambda one: (one[0], HEALTH_ORDER.index(HEALTHS[codes[one[2]]])))
    for how, name, n in ranked[: limit + 1]:
        health, reason = facts.pipeline.engine.health_of(name)
        place = ", ".join(filter(None, [f"rack {nodes[n].rack}" if nodes[n].rack else "", nodes[n].pool, nodes[n].sku]))
        detail = "; ".join(filter(None, [f"{health}: {reason.rstrip('.')}" if reason else str(health), place]))
        yield how, pb.SearchHit(kind="node", name=name, detail=detail, node=name, state=health)


@dataclass(frozen=True, slots=True)
class GpuTexts:
    """What GPUs are known by, in lower case: a line for each UUID and each serial number, and its GPU."""

    lines: str
    starts: Sequence[int]  # of each line in `lines`
    gpus: Sequence[EntityRow]  # of each line


def gpu_texts(rows: Iterable[EntityRow]) -> GpuTexts:
    parts, starts, gpus, at = ["\n"], [], [], 1
    for row in rows:
        for word in dict.fromkeys(filter(None, (row.uuid.casefold(), row.serial.casefold()))):
            parts.append(f"{word}\n")
            starts.append(at)
            gpus.append(row)
            at += len(word) + 1
    return GpuTexts("".join(parts), starts, gpus)


def _gpus(facts: ApiSnapshot, text: str) -> Iterator[Found]:
    index = facts.index
    if asked := GPU_OF_NODE.fullmatch(text):
        n = next((n for name, n in index.node_number.items() if name.casefold() == asked[1]), None)
        if n is not None and int(asked[2]) < index.nodes[n].gpus:
            yield EXACT, _gpu_hit(facts, index.nodes[n].name, int(asked[2]), "")
    if len(text) < GPU_CHARS:
        return
    known = facts.once("gpu texts", GPUS_S, lambda: gpu_texts(facts.store.entities.registry.gpus()))
    for how, row in find_gpus(known, text):
        name = row.uuid if text in row.uuid.casefold() else row.serial
        yield how, _gpu_hit(facts, row.node, row.gpu, name, row)


def find_gpus(known: GpuTexts, text: str) -> Iterator[tuple[int, EntityRow]]:
    """Exact matches, then prefixes, then any part; a GPU comes once."""
    seen: set[int] = set()
    for how, wanted in ((EXACT, f"\n{text}\n"), (PREFIX, f"\n{text}"), (PART, text)):
        at = known.lines.find(wanted)
        while at >= 0:
            line = bisect_right(known.starts, at + (how != PART)) - 1
            row = known.gpus[line]
            if id(row) not in seen:
                seen.add(id(row))
                yield how, row
            at = known.lines.find(wanted, known.lines.find("\n", at + 1))


def _gpu_hit(facts: ApiSnapshot, node: str, gpu: int | None, name: str, row: EntityRow | None = None) -> pb.SearchHit:
    number = None if gpu is None else facts.index.gpu(node, gpu)
    where = node if gpu is None else f"{node} GPU {gpu}"
    parts = [where if name else "", row.model if row else "", f"MIG {row.mig}" if row and row.mig else ""]
    if number is None:
        last = f"last seen {iso(row.last_ms)}" if row and row.last_ms else ""
        parts += ["not in the fleet file", last]
        health = Health.UNKNOWN
    else:
        health, reason = facts.pipeline.engine.health_of(node, gpu)
        codes, names = facts.jobs()
        job = names[codes[number]] if codes[number] >= 0 else ""
        since = "" if health is Health.HEALTHY else _since(facts, node, gpu)
        parts += [f"{health}: {reason.rstrip('.')}" if reason else str(health), since, f"held by {job}" if job else ""]
    return pb.SearchHit(
        kind="gpu", name=name or where, detail=", ".join(filter(None, parts)), node=node, gpu=gpu, state=health
    )


def _since(facts: ApiSnapshot, node: str, gpu: int | None) -> str:
    """Since when the worst open incident of a GPU or its node is; "": none is open."""
    worst = next((i for i in facts.open_by_node().get(node, ()) if {(node, gpu), (node, None)} & set(i.members)), None)
    return f"since {iso(worst.since_ms)}" if worst is not None else ""


def _jobs(facts: ApiSnapshot, text: str, limit: int) -> Iterator[Found]:
    """Those that run, then those that ended within a day; of each those that match best."""
    now, over = api_jobs.running(facts), api_jobs.ended(facts)
    found = [(how, False, name) for how, name, _ in _ranked(now, text)]
    found += [(how, True, name) for how, name, _ in _ranked((name for name in over if name not in now), text)]
    for how, is_over, name in sorted(found)[: limit + 1]:
        if is_over:
            span = over[name]
            detail = f"ended {iso(span.ended_ms)}, {span.gpus} GPUs on {span.nodes} nodes"
        else:
            detail = f"runs since {iso(now[name].since_ms)}, {len(now[name].gpus)} GPUs"
        yield how, pb.SearchHit(kind="job", name=name, detail=detail)


def _incidents(incidents: Sequence[Incident], text: str) -> Iterator[Found]:
    """By id, and by words of them: open before closed, worst first."""
    found = [(how, i) for i in incidents if (how := match(i.id, text)) in (EXACT, PREFIX)]
    known = {i.id for _, i in found}
    found += [(PART, i) for i in incidents if i.id not in known and text in _words(i).casefold()]
    for how, incident in sorted(found, key=lambda one: one[0]):
        state = f"{incident.severity}, since {iso(incident.since_ms)}"
        if incident.closed_ms is not None:
            state = f"closed {iso(incident.closed_ms)}"
        yield how, pb.SearchHit(
            kind="incident", name=incident.summary, detail=f"{state}; {incident.id}", node=incident.node or "",
            gpu=incident.gpu, incident=incident.id, state="" if incident.closed_ms is not None else incident.severity,
        )  # fmt: skip


def _words(incident: Incident) -> str:
    cause = incident.cause.replace("_", " ")
    return f"{incident.summary} {incident.kind} {cause} {incident.node or ''} {incident.job or ''}"


def _xids(incidents: Sequence[Incident], text: str) -> Iterator[Found]:
    asked = XID_CODE.fullmatch(text)
    for code, row in XIDS.items():
        if asked or text.isdecimal():
            how = EXACT if int(asked[1] if asked else text) == code else None
        else:
            named = row.in_use and len(text) >= WORD_CHARS
            how = match(row.mnemonic.replace("_", " "), text.replace("_", " ")) if named else None
        if how is None:
            continue
        of = [incident for incident in incidents if incident.cause == f"xid_{code}"]
        count = sum(incident.closed_ms is None for incident in of)
        seen = f"{count} open, {len(of)} in 7 days" if of else "no incident in 7 days"
        yield how, pb.SearchHit(
            kind="xid", name=f"XID {code}", incident=of[0].id if of else "",
            detail=f"{seen}. {row.meaning} {ADVICE[row.action]}", state=of[0].severity if count else "",
        )  # fmt: skip


def _places(facts: ApiSnapshot, kind: str, names: Sequence[str], text: str) -> Iterator[Found]:
    """Racks or leaf switches."""
    codes = facts.index.rack if kind == "rack" else facts.index.leaf
    for how, name, at in _ranked(names, text):
        if name:
            count = int((codes == at).sum())
            yield how, pb.SearchHit(kind=kind, name=name, detail=f"{count} node{'' if count == 1 else 's'}")
