"""Which rank did not come to which collective, or came with another one, another size or type, or last.

The order of the checks is that of torch/distributed/flight_recorder/components (builder.py, types.py `Op.match`):
kind, then sizes, then types. Two things are added. A rank that has gone on has finished what came before, so a dump
that is older than the others accuses nobody. A rank without a dump is named when all others wait at one collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median

from drover_core.jobs.flight import Dump, Operation
from drover_core.jobs.model import Fault

UNEVEN_SENT = ("all_to_all", "scatter", "gather", "all_gather_v", "reduce_scatter_v")  # ranks may differ in these
UNEVEN_RECEIVED = ("all_to_all", "gather", "scatter", "all_gather_v", "reduce_scatter_v")
LEAST_COLLECTIVES = 8  # before a rank is called the last one
LAST_SHARE = 0.8  # of the collectives
LAST_MS = 10.0  # in the median, after the rank before it
MAX_FAULTS = 16


def find_faults(
    dumps: Mapping[int, Dump], world: Iterable[int] = (), skipped: frozenset[int] = frozenset()
) -> list[Fault]:
    """Return the first fault of each group, the earliest first.

    `world`: ranks that are known otherwise; `skipped`: those of them whose dumps were not read.
    """
    groups: dict[str, dict[int, dict[int, Operation]]] = {}
    for rank, dump in dumps.items():
        for each in dump.operations:
            if not each.point:
                groups.setdefault(each.group, {}).setdefault(rank, {}).setdefault(each.sequence, each)
    found: list[tuple[int, Fault]] = []
    for name, of_ranks in groups.items():
        members = _members(name, dumps, of_ranks, world) - skipped
        if fault := _first_fault(name, members, of_ranks, dumps):
            when = min((ops[max(ops)].created_ns for ops in of_ranks.values()), default=0)
            found.append((when, fault))
    return [fault for _, fault in sorted(found, key=lambda each: each[0])][:MAX_FAULTS]


def _members(name: str, dumps: Mapping[int, Dump], of_ranks: Mapping[int, object], world: Iterable[int]) -> set[int]:
    """Return the ranks that belong to a group, as far as that is known."""
    for dump in dumps.values():
        if name in dump.groups:
            return set(dump.groups[name])
        if len(dump.groups) == 1 and "" in dump.groups and name in ("", "0"):
            return set(dump.groups[""])
    return set(of_ranks) | (set(world) if name in ("", "0") else set())


def _first_fault(
    name: str, members: set[int], of_ranks: dict[int, dict[int, Operation]], dumps: Mapping[int, Dump]
) -> Fault | None:
    dumped = {rank for rank in members if rank in dumps}
    with_ops = {rank: of_ranks[rank] for rank in dumped if rank in of_ranks}
    if not with_ops:
        return None
    begin = max(min(ops) for ops in with_ops.values())
    end = max(max(ops) for ops in with_ops.values())
    seen = {n for ops in with_ops.values() for n in ops if begin <= n <= end}
    for sequence in sorted(seen):  # a hostile dump has 0 and 2**62
        at = {rank: ops[sequence] for rank, ops in with_ops.items() if sequence in ops}
        if fault := _mismatch(name, sequence, at, with_ops):
            return fault
        absent = sorted(rank for rank in dumped if rank not in at)
        if absent and at and not any(is_done(at[rank], with_ops[rank]) for rank in at):
            return _missing(name, sequence, absent, at)
    silent = sorted(members - dumped)
    last = {rank: ops[max(ops)] for rank, ops in with_ops.items()}
    if silent and len({each.sequence for each in last.values()}) == 1 and not any(x.completed for x in last.values()):
        sequence = next(iter(last.values())).sequence
        kind = Counter(each.kind for each in last.values()).most_common(1)[0][0]
        words = f"rank {_names(silent)} left no dump; {_others(len(last))} in {kind} {sequence}"
        sure = 0.75 if len(silent) == 1 else 0.4 if len(silent) < len(members) / 2 else 0.15
        return Fault("silent", tuple(silent), kind, sequence, name, words, sure, tuple(sorted(last)))
    return None


def is_done(operation: Operation, of_rank: Mapping[int, Operation]) -> bool:
    """Whether a rank finished it. Gloo knows no states: its waits end, also with an error, before the next begins."""
    return operation.completed or (operation.retired and max(of_rank) > operation.sequence)


def _mismatch(
    name: str, sequence: int, at: Mapping[int, Operation], of_ranks: Mapping[int, Mapping[int, Operation]]
) -> Fault | None:
    if len(at) < 2:
        return None
    kinds = {rank: each.kind for rank, each in at.items()}
    if odd := _minority(kinds):
        return _odd(name, sequence, "type", kinds, odd, at)
    kind = next(iter(kinds.values()))
    if not kind.startswith(UNEVEN_SENT):
        sent = {rank: str(_shape(each.sent)) for rank, each in at.items()}
        if odd := _minority(sent):
            return _odd(name, sequence, "size", sent, _changed(odd, at, of_ranks), at)
    if not kind.startswith(UNEVEN_RECEIVED):
        received = {rank: str(_shape(each.received)) for rank, each in at.items()}
        if odd := _minority(received):
            return _odd(name, sequence, "size", received, _changed(odd, at, of_ranks), at)
    types = {rank: ", ".join(sorted(set(each.types))) for rank, each in at.items()}
    if odd := _minority(types):
        return _odd(name, sequence, "dtype", types, odd, at)
    return None


def _changed(odd: list[int], at: Mapping[int, Operation], of_ranks: Mapping[int, Mapping[int, Operation]]) -> list[int]:
    """Where there is no majority, return the ranks that came with another size than they themselves did before."""
    if len(odd) < len(at):
        return odd
    changed = []
    for rank in odd:
        now = at[rank]
        before = [o for n, o in of_ranks[rank].items() if n < now.sequence and o.kind == now.kind]
        if before and now.sent not in [o.sent for o in before]:
            changed.append(rank)
    return changed or odd


def _shape(sizes: tuple[tuple[int, ...], ...]) -> object:
    shapes = [list(each) for each in sizes[:8]]
    return shapes[0] if len(shapes) == 1 else shapes


def _minority(values: Mapping[int, str]) -> list[int]:
    """Return the ranks whose value differs from that of most; where there is no most, all."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return []
    (common, most), (_, second) = counts.most_common(2)
    if most == second:
        return sorted(values)
    return sorted(rank for rank, value in values.items() if value != common)


def _odd(
    name: str, sequence: int, what: str, values: Mapping[int, str], odd: list[int], at: Mapping[int, Operation]
) -> Fault:  # fmt: skip
    rest = [rank for rank in values if rank not in odd]
    kind = at[(rest or odd)[0]].kind
    noun = {"type": "called", "size": "came with size", "dtype": "came with type"}[what]
    theirs = ", ".join(sorted({values[rank] for rank in odd}))[:120]
    if rest:
        words = f"rank {_names(odd)} {noun} {theirs} where the others {noun} {values[rest[0]][:120]}"
        words += f" in {kind} {sequence}" if what != "type" else f" at collective {sequence}"
    else:
        words = f"the ranks disagree at collective {sequence}: {theirs}"
    if where := at[odd[0]].where:
        words += f" ({where})"
    return Fault(what, tuple(odd), kind, sequence, name, words, 0.95 if rest else 0.5, tuple(rest))


def _missing(name: str, sequence: int, absent: list[int], at: Mapping[int, Operation]) -> Fault:
    first = next(iter(at.values()))
    words = f"rank {_names(absent)} never came to {first.kind} {sequence}; {_others(len(at))} there"
    if first.where:
        words += f" ({first.where})"
    sure = 0.9 if len(absent) <= max(1, (len(at) + len(absent)) // 2) else 0.5
    return Fault("missing", tuple(absent), first.kind, sequence, name, words, sure, tuple(sorted(at)))


def find_last(dumps: Mapping[int, Dump]) -> Fault | None:
    """Return the rank that came last to nearly all collectives, by the clocks of the ranks' hosts."""
    by_sequence: dict[tuple[str, int], dict[int, int]] = {}
    for rank, dump in dumps.items():
        for each in dump.operations:
            if not each.point and each.created_ns:
                by_sequence.setdefault((each.group, each.sequence), {})[rank] = each.created_ns
    whole = [times for times in by_sequence.values() if len(times) == len(dumps) and len(times) > 2]
    behind: dict[int, list[float]] = {}
    for times in whole:
        (last, latest), (_, before) = sorted(times.items(), key=lambda each: -each[1])[:2]
        if (latest - before) / 1e6 >= LAST_MS:
            behind.setdefault(last, []).append((latest - before) / 1e6)
    if not behind:
        return None
    rank, late = max(behind.items(), key=lambda each: len(each[1]))
    others = sum(len(each) for each in behind.values())
    if len(late) < LEAST_COLLECTIVES or len(late) < LAST_SHARE * others or len(late) < 0.25 * len(whole):
        return None
    words = f"rank {rank} came last to {len(late)} of {len(whole)} collectives, {median(late):.0f} ms after the others"
    return Fault("last", (rank,), "", None, "", words, 0.6)


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:6]))
    return f"{shown} and {len(ranks) - 6} more" if len(ranks) > 6 else shown


def _others(count: int) -> str:
    return "1 other waits" if count == 1 else f"{count} others wait"
