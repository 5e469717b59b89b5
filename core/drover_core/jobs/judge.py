"""The verdict: what came first, what followed from it, on which rank.

1. Lines are matched against the table of rules. What a rank survived (it reported steps afterwards) is left out.
2. The scheduler's own reason stands, unless a rank had failed before.
3. Hardware, memory and storage explain more than an exception, an exception more than a timeout, a timeout more than a
   closed connection. Within one class the first line counts.
4. The ranks' dumps say which rank did not come, or came with something else; the nodes' errors say why.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from drover_core.jobs import collectives, texts
from drover_core.jobs.exits import CRASHES, Ends, Exit, find_ends
from drover_core.jobs.flight import Dump
from drover_core.jobs.lines import Form, Line, Log, exception_name, in_order, is_progress, last_time_ms
from drover_core.jobs.model import Failure, Fault, HardwareEvent, Place, Proof, Verdict
from drover_core.jobs.rules import MEANS, Role, Rule, matches
from drover_core.jobs.weight import AFTER_MS, BEFORE_MS, Match, weigh
from drover_core.jobs.wording import sentence_of
from drover_core.times import iso
from drover_core.xid.codes import lookup

STRONG = frozenset({Failure.GPU_HARDWARE, Failure.GPU_OOM, Failure.HOST_OOM, Failure.STORAGE})
BY_SCHEDULER = frozenset({Failure.TIME_LIMIT, Failure.NODE_LOST, Failure.CANCELLED})
DECISIVE = 0.9  # confidence of a scheduler's line that gives a reason
STEPS_SURVIVED = 3  # a rank that reports so many steps after a line went on
MAX_PROOFS = 12
MAX_MATCHES = 20_000
_XID = re.compile(r"Xid \(.{1,60}\): (\d{1,4})")
_FINISHED = re.compile(
    r"\b(?<!evaluation )(?<!eval )(?:training|train|run|job)\b(?: \S{1,20}){0,2}?:? (?:finished|completed?|done)\b"
    r"|\bFinished training",
    re.I,
)
_NOT_FINISHED = re.compile(
    r"\b(?:error|fail|nan\b|not\b|never|until|when|once|if\b|will\b|would|pace|ETA\b|remaining|left\b|done in \d|%)",
    re.I,
)
_GOES_ON = re.compile(r"\b(?:ERROR|Error|error|[Ff]ailed|FATAL|loss nan)\b|\bstep \d")
_OF_PEERS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"})
_OF_VICTIMS = frozenset({"gloo-size", "kernel-oom", "slurm-oom"})  # the line's rank saw it, and need not have caused it
_NO_FAILURES = frozenset({"StopIteration", "SystemExit"})


@dataclass(slots=True)
class Evidence:
    """All that is known of a job."""

    logs: Sequence[Log] = ()
    dumps: Mapping[int, Dump] = field(default_factory=dict)
    faults: Sequence[Fault] = ()  # of NCCL RAS and NCCL Inspector
    places: Mapping[int, Place] = field(default_factory=dict)
    events: Sequence[HardwareEvent] = ()
    exit_code: int | None = None  # of the job; below 0 or above 128: a signal
    ended_ms: int | None = None  # None: the last time that the logs name
    notes: Sequence[str] = ()
    skipped: frozenset[int] = frozenset()  # ranks that left a dump which was not read


@dataclass(slots=True)
class Choice:
    """A class with its reason, before the dumps and the hardware are asked."""

    failure: Failure
    confidence: float
    rank: int | None = None
    proofs: list[Proof] = field(default_factory=list)
    sure: bool = True  # False: a hang or a peer's end, which dumps and hardware may explain


def judge(evidence: Evidence) -> Verdict:
    """Return why a job ended."""
    lines = in_order(evidence.logs)
    ends = find_ends(lines)
    ends.places.update(evidence.places)
    found = _survivors_removed(_match_all(lines), lines, ends)
    found, aside = weigh(found, evidence.logs, evidence.ended_ms)
    faults = _faults(evidence, lines, ends)
    choice = _choose(found, ends, evidence.exit_code, lines)
    _ask_faults(choice, faults, ends)
    events, notes = _events_before(evidence)
    _ask_hardware(choice, events, ends)
    if choice.rank is None and choice.failure not in BY_SCHEDULER | {Failure.ENDED_NORMALLY}:
        choice.rank = _blame(choice, found, ends, faults)
    place = ends.places.get(choice.rank, Place()) if choice.rank is not None else Place()
    shown = [fault for fault in faults if choice.failure is not Failure.ENDED_NORMALLY or fault.what == "last"]
    return Verdict(
        choice.failure, round(min(choice.confidence, 0.99), 2),
        sentence_of(choice.failure, choice.rank, place, choice.proofs, shown, ends),
        choice.rank, place, tuple(choice.proofs[:MAX_PROOFS]),
        tuple(_consequences(choice, found, ends)), tuple(shown), (*evidence.notes, *aside, *notes, *_left_out(ends)),
        tuple(sorted(ends.ranks)),
    )  # fmt: skip


def _left_out(ends: Ends) -> list[str]:
    return [f"{ends.left_out:,} more reports of ended tasks were left out"] if ends.left_out else []


def _match_all(lines: Sequence[Line]) -> list[Match]:
    found: list[Match] = []
    for line in lines:
        rules = matches(line.text, line.form)
        if rules:
            found.append(_of_rule(line, rules[0]))
        elif line.form is Form.EXCEPTION and (match := _of_exception(line)):
            found.append(match)
        if len(found) >= MAX_MATCHES:
            del found[MAX_MATCHES // 2 : -MAX_MATCHES // 4]
    return found


def _of_rule(line: Line, rule: Rule) -> Match:
    failure, confidence = rule.failure, rule.confidence
    if rule.id == "xid" and (code := _XID.search(line.text)):
        known = lookup(int(code[1]))
        hardware = known.hardware if known else None
        if hardware is False:
            failure, confidence = Failure.PROGRAM, 0.6
        elif hardware is None:
            confidence = 0.6
    return Match(line, failure, rule.role, confidence, rule.id)


def _of_exception(line: Line) -> Match | None:
    """An exception that no rule knows is the program's own, unless it is one of collectives."""
    name = exception_name(line)
    if not name or name in _NO_FAILURES or name.endswith("Warning"):
        return None
    if name in _OF_PEERS:
        return Match(line, Failure.PEER_DIED, Role.CONSEQUENCE, 0.4, "exception-of-peers")
    return Match(line, Failure.PROGRAM, Role.CAUSE, 0.85, "exception")


def _survivors_removed(found: list[Match], lines: Sequence[Line], ends: Ends) -> list[Match]:
    """Leave out what a rank wrote before it, or a rank that waits for it, went on for some steps."""
    steps: dict[tuple[str, int | None], list[int]] = defaultdict(list)
    of_log: dict[str, list[int]] = defaultdict(list)
    for line in lines:
        if is_progress(line):
            steps[line.log, line.rank].append(line.order)
            of_log[line.log].append(line.order)
    unnamed = max(2 * STEPS_SURVIVED, 2 * len(ends.ranks))  # lines of any ranks
    until: dict[str, int] = {}  # log -> lines before this one were survived
    for (log, rank), orders in steps.items():
        count = unnamed if rank is None else STEPS_SURVIVED
        if len(orders) >= count:
            until[log] = max(until.get(log, -1), orders[-count])

    raised: dict[tuple[str, int | None], int] = {}  # the last exception of each rank, and of all (None)
    for m in found:
        if m.line.form is Form.EXCEPTION and m.role is Role.CAUSE:
            raised[m.line.log, m.line.rank] = raised[m.line.log, None] = m.line.order

    def is_over(match: Match) -> bool:
        line = match.line
        if line.form is Form.OTHER:  # some steps later its rank failed of something else
            end, orders = raised.get((line.log, line.rank), -1), of_log[line.log]
            if bisect_right(orders, line.order) < bisect_right(orders, end):
                return True
        return line.form not in (Form.KERNEL, Form.SCHEDULER) and line.order < until.get(line.log, -1)

    return [match for match in found if not is_over(match)]


def _faults(evidence: Evidence, lines: Sequence[Line], ends: Ends) -> list[Fault]:
    found = list(evidence.faults)
    world = set(ends.ranks)
    if evidence.dumps:
        found += collectives.find_faults(evidence.dumps, world, evidence.skipped)
        ends.ranks |= set(evidence.dumps)
        for dump in evidence.dumps.values():
            for members in dump.groups.values():
                ends.ranks |= set(members)
        if last := collectives.find_last(evidence.dumps):
            found.append(last)
    found += texts.read_named(lines)
    if watched := texts.read_watchdog(lines):
        found += collectives.find_faults(watched, world)
    if not found:
        found += texts.odd_function(texts.functions_of(lines), ends.ranks)
    return sorted(found, key=lambda fault: -fault.confidence)


def _first(found: Sequence[Match], failures: frozenset[Failure], least: float = 0.0) -> Match | None:
    """Return the first cause of these classes; where several lines share a moment, the surest."""
    causes = [m for m in found if m.role is Role.CAUSE and m.failure in failures and m.confidence >= least]
    return min(causes, key=lambda m: m.line.order, default=None)


def _choose(found: list[Match], ends: Ends, exit_code: int | None, lines: Sequence[Line]) -> Choice:
    if exit_code == 0:
        return _choose_zero(found, ends, lines)
    return _choose_failed(found, ends, exit_code, lines)


def _choose_zero(found: list[Match], ends: Ends, lines: Sequence[Line]) -> Choice:
    """Exit status 0 proves no normal end where the log ends with an error: `train | tee log` has the status of tee."""
    causes = [m for m in found if m.role is Role.CAUSE and m.failure is not Failure.NOT_STARTED]
    if not causes:
        return Choice(Failure.ENDED_NORMALLY, 0.97)
    last = max(causes, key=lambda m: m.line.order)
    went_on = any(
        line.log == last.line.log and line.order > last.line.order and (is_progress(line) or _says_finished(line))
        for line in lines
    )
    if went_on:
        words = f"the exit status is 0 and the log has an error: {last.line.shown}"
        return Choice(Failure.ENDED_NORMALLY, 0.7, None, [replace(last.proof, text=words[:300])])
    made = _choose_failed(found, ends, None, lines)
    made.confidence *= 0.6
    made.proofs.append(Proof("the exit status is 0, which contradicts the error in the log", "exit"))
    return made


def _choose_failed(found: list[Match], ends: Ends, exit_code: int | None, lines: Sequence[Line]) -> Choice:
    decided = _first(found, BY_SCHEDULER, DECISIVE)
    cause = _first(found, STRONG) or _first(found, frozenset({Failure.COLLECTIVE_MISMATCH}))
    raised = _first(found, frozenset({Failure.PROGRAM}))
    if decided:
        before = min((m for m in (cause, raised) if m), key=lambda m: m.line.order, default=None)
        if before is None or before.line.order > decided.line.order or _unordered(before, decided):
            return _of(decided, found)
    if cause and raised and _long_before(raised, cause):
        return _of(raised, found)
    first = cause or raised
    if first:
        return _of(first, found)
    return _choose_hang(found, ends) or _choose_end(ends, exit_code, lines)


def _says_finished(line: Line) -> bool:
    return bool(_FINISHED.search(line.text)) and not _NOT_FINISHED.search(line.text)


def _unordered(one: Match, other: Match) -> bool:
    """Whether nothing says which of two lines came first: they are of two files, and one has no times."""
    return one.line.log != other.line.log and (one.line.at is None or other.line.at is None)


def _long_before(one: Match, other: Match) -> bool:
    if one.line.at is None or other.line.at is None:
        return False
    return one.line.at < other.line.at - 30 and one.line.rank != other.line.rank


def _of(match: Match, found: Sequence[Match]) -> Choice:
    """A choice with the line that decided it, and the others of its class."""
    same = [m for m in found if m.failure is match.failure and m.role is Role.CAUSE and m is not match]
    best = max((m.confidence for m in same), default=0.0)
    rank = match.line.rank if match.failure not in BY_SCHEDULER and match.rule not in _OF_VICTIMS else None
    proofs = [match.proof, *(m.proof for m in same)]
    if match.rule in MEANS:
        proofs.insert(1, Proof(MEANS[match.rule], "meaning", None, match.rule))
    return Choice(match.failure, max(match.confidence, best), rank, proofs)


def _choose_hang(found: Sequence[Match], ends: Ends) -> Choice | None:
    network = _first(found, frozenset({Failure.NETWORK_HARDWARE}))
    timeout = _first(found, frozenset({Failure.COLLECTIVE_TIMEOUT}))
    if network and (network.confidence >= 0.7 or not timeout):
        made = _of(network, found)
        made.sure, made.rank = False, network.line.rank
        return made
    if ends.crash:
        return _of_exit(ends.crash)
    if timeout:
        return Choice(timeout.failure, timeout.confidence, None, [timeout.proof], sure=False)
    if ends.first and ends.first.code < 0 and ends.first.code != -15:
        return _of_exit(ends.first)
    gone = [m for m in found if m.role is Role.CONSEQUENCE and m.confidence >= 0.5]
    stopped = _first(found, frozenset({Failure.CANCELLED}))
    if stopped and not any(m.line.order < stopped.line.order for m in gone) and not _failed_before(ends, stopped):
        return _of(stopped, found)
    if unstarted := _first(found, frozenset({Failure.NOT_STARTED})):
        return _of(unstarted, found)
    if gone:
        return Choice(Failure.PEER_DIED, 0.5, None, [m.proof for m in gone[:3]], sure=False)
    return None


def _failed_before(ends: Ends, match: Match) -> bool:
    return any(each.first and each.code and each.line.order < match.line.order for each in ends.exits)


def _of_exit(end: Exit) -> Choice:
    proof = Proof(end.line.shown, f"{end.line.log}:{end.line.number}", end.rank, "exit")
    if -end.code in CRASHES:
        return Choice(Failure.PROGRAM, 0.75, end.rank, [proof])
    alone = end.rank is None
    failure = Failure.HOST_OOM if alone and end.code == -9 else Failure.PEER_DIED
    return Choice(failure, 0.5 if alone else 0.75, end.rank, [proof], sure=False)


def _choose_end(ends: Ends, exit_code: int | None, lines: Sequence[Line]) -> Choice:
    code = 0 if exit_code is None else 128 - exit_code if exit_code > 128 else exit_code
    if not code and ends.first:
        code = ends.first.code
    if code < 0:
        proof = Proof(f"the job's exit says signal {-code}", "exit")
        if -code in CRASHES:
            return Choice(Failure.PROGRAM, 0.7, None, [proof])
        if code == -9:
            return Choice(
                Failure.HOST_OOM if len(ends.ranks) < 2 else Failure.PEER_DIED, 0.45, None, [proof], sure=False
            )
        if code in (-15, -2, -10, -12):
            return Choice(Failure.CANCELLED, 0.5, None, [proof])
    if not code and not ends.exits:
        ended = [line for line in lines[-40:] if _says_finished(line)]
        if ended and any(_GOES_ON.search(line.text) for line in lines[-40:] if line.order > ended[-1].order):
            ended = []  # an error, or the next of several jobs
        if ended:
            return Choice(
                Failure.ENDED_NORMALLY, 0.7, None, [Proof(ended[-1].shown, f"{ended[-1].log}:{ended[-1].number}")]
            )
    first = ends.first
    proofs = [Proof(first.line.shown, f"{first.line.log}:{first.line.number}", first.rank, "exit")] if first else []
    return Choice(Failure.UNKNOWN, 0.3, first.rank if first else None, proofs, sure=False)


def _ask_faults(choice: Choice, faults: Sequence[Fault], ends: Ends) -> None:
    """Let the ranks' own evidence explain a hang."""
    if choice.failure in (Failure.ENDED_NORMALLY, Failure.TIME_LIMIT, Failure.NODE_LOST):
        return
    best = next((fault for fault in faults if fault.what != "last" and fault.ranks), None)
    if best is None or (choice.sure and choice.failure is not Failure.COLLECTIVE_MISMATCH):
        return
    proof = Proof(best.detail, "ranks' evidence", best.ranks[0] if len(best.ranks) == 1 else None, best.what)
    if best.what in ("type", "size", "dtype"):
        choice.failure, choice.confidence = Failure.COLLECTIVE_MISMATCH, best.confidence
    elif choice.failure is Failure.COLLECTIVE_MISMATCH or best.confidence < 0.3:
        return
    elif choice.failure in (Failure.COLLECTIVE_TIMEOUT, Failure.UNKNOWN):
        choice.failure, choice.confidence = Failure.COLLECTIVE_TIMEOUT, max(choice.confidence, best.confidence)
    elif choice.failure is Failure.PEER_DIED and len(best.ranks) == 1 and _ended_quietly(best.ranks[0], ends):
        choice.failure, choice.confidence = Failure.COLLECTIVE_MISMATCH, 0.65  # it had called one collective less
    elif choice.rank is not None and choice.rank not in best.ranks:
        return
    choice.rank = best.ranks[0]
    choice.proofs[:] = [proof, *choice.proofs[:2]]


def _events_before(evidence: Evidence) -> tuple[list[HardwareEvent], list[str]]:
    """Return the events around the job's end, and a note where others were left out or no end is known."""
    if not evidence.events:
        return [], []
    ended = evidence.ended_ms if evidence.ended_ms is not None else last_time_ms(evidence.logs)
    if ended is None:
        return list(evidence.events), [
            "the logs have no times: errors of nodes were taken at any time; --at limits them"
        ]
    near = [e for e in evidence.events if e.ts_ms is None or ended - BEFORE_MS <= e.ts_ms <= ended + AFTER_MS]
    if near:
        return near, []
    return [], [
        f"all {len(evidence.events)} errors of nodes lie outside the hour before {iso(ended)} (--at changes it)"
    ]


def _ended_quietly(rank: int, ends: Ends) -> bool:
    """Whether a launcher reports the ends of other ranks and no failure of this one."""
    return bool(ends.exits) and ends.of(rank) is None


def _ask_hardware(choice: Choice, events: Sequence[HardwareEvent], ends: Ends) -> None:
    """Let an error of a node explain what its ranks could not."""
    nodes = {place.node for place in ends.places.values() if place.node}
    blamed = ends.places.get(choice.rank, Place()).node if choice.rank is not None else ""
    weak = not choice.sure or any(proof.rule.startswith("cuda") for proof in choice.proofs[:1])
    for event in events:
        failure = _of_event(event)
        if failure is None or (nodes and event.node not in nodes):
            continue
        proof = Proof(f"{event.node}: {event.kind} {event.code}: {event.message}"[:300], "hardware", None, event.code)
        if failure is choice.failure:
            choice.proofs.append(proof)
        elif weak and (failure is not Failure.HOST_OOM or choice.failure in (Failure.PEER_DIED, Failure.UNKNOWN)):
            choice.failure, choice.confidence = failure, 0.9 if event.node == blamed else 0.75 if nodes else 0.6
            choice.proofs.insert(0, proof)
            weak = False
            if choice.rank is None:
                on = [rank for rank, p in ends.places.items() if p.node == event.node and p.gpu in (event.gpu, None)]
                choice.rank = on[0] if len(on) == 1 else None


def _of_event(event: HardwareEvent) -> Failure | None:
    """Return what an event of a node would explain."""
    if event.kind == "xid":
        known = lookup(int(event.code)) if event.code.isdigit() else None
        return Failure.GPU_HARDWARE if known and known.hardware else None
    if event.kind == "sxid" or event.code in ("nvrm", "nvlink", "gpu_lost", "driver_hung"):
        return Failure.GPU_HARDWARE
    return {
        "oom": Failure.HOST_OOM, "panic": Failure.NODE_LOST, "lockup": Failure.NODE_LOST, "disk": Failure.STORAGE,
        "filesystem": Failure.STORAGE, "nvme": Failure.STORAGE, "nic_link": Failure.NETWORK_HARDWARE,
        "nic_error": Failure.NETWORK_HARDWARE, "nic_module": Failure.NETWORK_HARDWARE,
    }.get(event.code)  # fmt: skip


def _blame(choice: Choice, found: Sequence[Match], ends: Ends, faults: Sequence[Fault]) -> int | None:
    """Return the rank to blame where the deciding line has none."""
    if choice.failure in (Failure.HOST_OOM, Failure.PEER_DIED):
        if ends.first and ends.first.rank is not None and ends.first.code < 0:
            return ends.first.rank
        named = next((f for f in faults if f.what in ("missing", "silent") and len(f.ranks) == 1), None)
        if named and named.confidence >= 0.5:
            return named.ranks[0]
    spoke = {m.line.rank for m in found if m.line.rank is not None}
    spoke |= {end.rank for end in ends.exits if end.rank is not None and end.code not in (0, -15, -9)}
    silent = sorted(set(range(max(ends.ranks, default=-1) + 1)) - spoke)
    if choice.failure in (Failure.COLLECTIVE_TIMEOUT, Failure.PEER_DIED, Failure.HOST_OOM) and len(ends.ranks) > 2:
        return silent[0] if len(silent) == 1 else None
    if choice.failure is Failure.PROGRAM and ends.first:
        return ends.first.rank
    return None


def _consequences(choice: Choice, found: Sequence[Match], ends: Ends) -> list[Proof]:
    """Return what other ranks wrote of the failure, one line a rank."""
    shown: dict[int | None, Proof] = {}
    for match in found:
        if (
            match.line.rank == choice.rank
            or match.line.rank in shown
            or match.failure is choice.failure is not Failure.COLLECTIVE_TIMEOUT
        ):
            continue
        if match.role is Role.CONSEQUENCE or match.failure in (Failure.COLLECTIVE_TIMEOUT, Failure.PROGRAM):
            shown[match.line.rank] = match.proof
    for end in ends.exits:
        if end.rank is not None and end.rank != choice.rank and end.rank not in shown and end.code:
            shown[end.rank] = Proof(
                f"rank {end.rank} {end.words}", f"{end.line.log}:{end.line.number}", end.rank, "exit"
            )
    return list(shown.values())[:MAX_PROOFS]
