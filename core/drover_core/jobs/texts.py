"""Ranks' evidence that is text: NCCL RAS, NCCL Inspector, watchdog messages, the functions in tracebacks.

Forms: NCCL RAS, src/ras/client_support.cc (rasClientRunComms); NCCL Inspector, ext-profiler/inspector/README.md (output
v4.0); watchdog, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; monitoredBarrier and DETAIL mode,
ProcessGroupGloo.cpp and ProcessGroupWrapper.cpp.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from statistics import median

from drover_core.jobs.flight import Dump, Operation
from drover_core.jobs.lines import RANK_LIMIT, Line, clean
from drover_core.jobs.model import Fault, Place

_RAS_RANK = re.compile(
    r" *Rank (\d{1,6})(?: has status (\w+)| has launched up to operation (\d+)| (has not launched any operations)"
    r"| reported (.{1,80}?))? -- (?:GPU (\d{1,3})\b.{0,40}? managed by process (\d+) on node (\S{1,80})|\[process)"
)
_RAS_PROCESS = re.compile(r" *Process (\d+) on node (\S{1,80}) managing GPUs? (\d{1,3})")
_RAS_COUNT = re.compile(r" *(\d+) ranks have (?:launched up to operation (\d+)|(not) launched any operations)")
_RAS_OF = re.compile(r" *Communicator ranks have different (\w{1,40}) operation counts")
_RAS_HEAD = re.compile(r"#\d+-\d+ \(([0-9a-f]{1,16})\) (INCOMPLETE|ERROR|MISMATCH)")
_WORK = re.compile(
    r"WorkNCCL\(SeqNum=(\d{1,12}), OpType=(\w{1,40}), NumelIn=(\d{1,18}), NumelOut=(\d{1,18}), Timeout\(ms\)=\d+\)"
)
_WHO = re.compile(r"\[(?:PG (?:ID )?(\d{1,6})(?: PG GUID [^\]]{1,60}?)?(?:\([^)\]]{0,60}\))? )?Rank (\d{1,6})\]", re.I)
_IDLE = re.compile(r"[Ll]ast enqueued \w{2,8} work: (\d{1,12}), last completed \w{2,8} work: (\d{1,12})\b")
_BARRIER = re.compile(r"Ranks? ([\d, ]{1,200}) failed to pass monitoredBarrier")
_DETAIL = re.compile(r"Rank (\d{1,6}) is running (?:inconsistent )?collective: CollectiveFingerPrint\(([^)]{0,200})")
_FRAME = re.compile(r'distributed_c10d\.py", line \d+, in (\w{1,40})')
_OP = re.compile(r"OpType=(\w{1,40})")
NAMES = {
    "ALLREDUCE": "all_reduce", "BROADCAST": "broadcast", "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "_all_gather_base",
    "REDUCE_SCATTER": "reduce_scatter", "_REDUCE_SCATTER_BASE": "_reduce_scatter_base", "REDUCE": "reduce",
    "ALLTOALL_BASE": "all_to_all", "ALLTOALL": "all_to_all", "BARRIER": "barrier", "GATHER": "gather",
    "SCATTER": "scatter", "SEND": "send", "RECV": "recv", "COALESCED": "coalesced",
}  # fmt: skip


def looks_like_ras(head: str) -> bool:
    return "Job summary" in head and "NCCL version" in head


class _Ras:
    """What the lines of a RAS report mean depends on the headings above them."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.places: dict[int, Place] = {}
        self.counts: dict[str, dict[int, int]] = {}
        self.usual: dict[str, tuple[int, int]] = {}  # operation -> how many ranks, up to which number
        self.gone: list[int] = []
        self._section, self._operation, self._within = "", "", -1

    def read(self, text: str) -> None:
        if match := _RAS_HEAD.match(text):
            self._section, self._operation, self._within = match[2], "", -1
        elif match := _RAS_OF.match(text):
            self._operation, self._within = match[1], -1
        elif match := _RAS_COUNT.match(text):
            self._within = int(match[2] or 0)
            if self._operation and int(match[1]) > self.usual.get(self._operation, (0, 0))[0]:
                self.usual[self._operation] = int(match[1]), self._within
        elif (match := _RAS_PROCESS.match(text)) and len(self.faults) < 10_000:
            words = f"NCCL RAS: process {match[1]} on node {match[2]}, GPU {match[3]}, does not answer"
            self.faults.append(Fault("missing", (), "", None, "", words, 0.7))
        elif match := _RAS_RANK.match(text):
            self._rank(match)

    def _rank(self, match: re.Match[str]) -> None:
        rank = int(match[1])
        if match[8]:
            self.places[rank] = Place(match[8], int(match[6]))
        if match[3] or match[4] or self._within >= 0:
            count = int(match[3]) if match[3] else 0 if match[4] else self._within
            self.counts.setdefault(self._operation, {})[rank] = count
        elif self._section == "INCOMPLETE":
            self.gone.append(rank)


def read_ras(data: bytes) -> tuple[list[Fault], dict[int, Place]]:
    """Return the outliers that NCCL RAS names, and where their ranks run."""
    ras = _Ras()
    for raw in data.split(b"\n", 200_000)[:200_000]:
        ras.read(clean(raw))
    faults = ras.faults
    if ras.gone:
        words = f"NCCL RAS: rank {', '.join(map(str, ras.gone[:6]))} does not answer"
        faults.insert(0, Fault("missing", tuple(ras.gone), "", None, "", words, 0.85))
    for name, of_ranks in ras.counts.items():
        if fault := _behind(name, of_ranks, ras.usual.get(name)):
            faults.insert(0, fault)
    return faults, ras.places


def _behind(name: str, counts: dict[int, int], usual: tuple[int, int] | None) -> Fault | None:
    """Return the ranks that launched fewer operations of one kind than the others."""
    most = usual[1] if usual else max(counts.values())
    behind = sorted(rank for rank, count in counts.items() if count < most)
    if not behind:
        return None
    least = min(counts[rank] for rank in behind)
    words = f"NCCL RAS: rank {', '.join(map(str, behind[:6]))} launched {least} {name}, the others {most}"
    return Fault("missing", tuple(behind), name, least + 1, "", words, 0.9)


def looks_like_inspector(head: str) -> bool:
    return '"coll_perf"' in head and '"header"' in head


def read_inspector(datas: Iterable[bytes]) -> tuple[list[Fault], dict[int, Place]]:
    """Return what NCCL Inspector's lines show: another size or kind at one number, or one rank that others wait for.

    It writes finished collectives only. The rank that the others wait for is the one whose collectives are shortest.
    """
    places: dict[int, Place] = {}
    seen: dict[tuple[str, int], dict[int, tuple[str, int, float]]] = {}
    for data in datas:
        for raw in data.split(b"\n", 500_000)[:500_000]:
            try:
                found = json.loads(raw)
                header, metadata, perf = found["header"], found["metadata"], found["coll_perf"]
                rank, number = int(header["rank"]), int(perf["coll_sn"])
                value = str(perf["coll"])[:40], int(perf["coll_msg_size_bytes"]), float(perf["coll_exec_time_us"])
                host, comm = clean(str(metadata.get("hostname", "")).encode())[:80], str(header.get("id"))[:40]
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                continue  # a line that was cut while it was written
            if 0 <= rank < RANK_LIMIT:
                places[rank] = Place(host, None)
                seen.setdefault((comm, number), {})[rank] = value
    faults = []
    for (comm, number), of_ranks in sorted(seen.items()):
        common = Counter(value[:2] for value in of_ranks.values()).most_common(1)[0]
        odd = sorted(rank for rank, value in of_ranks.items() if value[:2] != common[0])
        if odd and common[1] > len(of_ranks) / 2:
            words = f"NCCL Inspector: rank {odd[0]} ran {of_ranks[odd[0]][0]} of {of_ranks[odd[0]][1]} bytes at number"
            words += f" {number}, the others {common[0][0]} of {common[0][1]}"
            what = "type" if of_ranks[odd[0]][0] != common[0][0] else "size"
            faults.append(Fault(what, tuple(odd), common[0][0], number, comm, words, 0.9))
            break
    return [*faults, *_waited_for(seen)], places


def _waited_for(seen: dict[tuple[str, int], dict[int, tuple[str, int, float]]]) -> list[Fault]:
    world = max((len(each) for each in seen.values()), default=0)
    whole = [each for each in seen.values() if len(each) == world and world > 2]
    shortest = Counter(min(each, key=lambda rank: each[rank][2]) for each in whole)
    if len(whole) < 8 or not shortest:
        return []
    rank, often = shortest.most_common(1)[0]
    ratios = [
        median(v[2] for r, v in each.items() if r != rank) / max(each[rank][2], 1e-9) for each in whole if rank in each
    ]
    if often < 0.8 * len(whole) or median(ratios) < 1.5:
        return []
    words = f"NCCL Inspector: the others wait for rank {rank} in {often} of {len(whole)} collectives"
    return [Fault("last", (rank,), "", None, "", words, 0.6)]


def read_watchdog(lines: Iterable[Line]) -> dict[int, Dump]:
    """Return, as dumps of one operation, where each rank's watchdog found it waiting, or with nothing to wait for."""
    dumps: dict[int, Dump] = {}
    idle: dict[int, Dump] = {}
    for line in lines:
        who = _WHO.search(line.text)
        rank, group = (int(who[2]), who[1] or "0") if who else (line.rank, "0")
        if rank is None:
            continue
        source = f"{line.log}:{line.number}"
        if match := _WORK.search(line.text):
            operation = Operation(
                group, int(match[1]), NAMES.get(match[2], match[2].lower()), ((int(match[3]),),), ((int(match[4]),),)
            )
            dumps.setdefault(rank, Dump(rank, [operation], source=source))
        elif (match := _IDLE.search(line.text)) and match[1] == match[2]:
            idle.setdefault(rank, Dump(rank, [Operation(group, int(match[1]), "", completed=True)], source=source))
    return {**idle, **dumps} if dumps else {}


def read_named(lines: Iterable[Line]) -> list[Fault]:
    """Return the ranks that PyTorch itself names: monitoredBarrier, and the mismatches of its DETAIL mode."""
    for line in lines:
        if match := _BARRIER.search(line.text):
            ranks = tuple(sorted({int(n) for n in re.findall(r"\d{1,6}", match[1])}))
            words = f"rank {', '.join(map(str, ranks[:6]))} did not come to monitoredBarrier"
            return [Fault("missing", ranks, "barrier", None, "", words, 0.95)]
        if "CollectiveFingerPrint(" in line.text and len(found := _DETAIL.findall(line.text)) >= 2:
            kinds = [_OP.search(words) for _, words in found]
            names = [NAMES.get(k[1], k[1].lower()) if k else "another" for k in kinds]
            what = "type" if len(set(names)) > 1 else "size"
            words = f"rank {found[1][0]} ran {names[1]} where rank {found[0][0]} ran {names[0]}"
            return [Fault(what, (int(found[0][0]), int(found[1][0])), names[0], None, "", words, 0.5)]
    return []


def functions_of(lines: Iterable[Line]) -> dict[int, str]:
    """Return the collective in which each rank's traceback ends: the last function of distributed_c10d.py."""
    found: dict[int, str] = {}
    for line in lines:
        if line.rank is not None and "distributed_c10d.py" in line.text and (match := _FRAME.search(line.text)):
            found[line.rank] = match[1]
    return found


def odd_function(functions: dict[int, str], world: set[int]) -> list[Fault]:
    """Return the one rank whose traceback ends in another collective, where each rank's is known."""
    if len(functions) < 3 or set(range(max(world, default=0) + 1)) - set(functions):
        return []
    counts = Counter(functions.values())
    (common, _), *rest = counts.most_common()
    if len(rest) != 1 or rest[0][1] != 1:
        return []
    rank = next(rank for rank, name in functions.items() if name != common)
    words = f"rank {rank} failed in {functions[rank]} where the others failed in {common}"
    return [Fault("type", (rank,), common, None, "", words, 0.55, tuple(sorted(set(functions) - {rank})))]
