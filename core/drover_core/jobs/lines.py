"""Lines of a job's logs: cleaned, cut, with the rank, node and time that their prefixes name.

Logs are hostile until shown otherwise: binary, megabytes in a line, escapes that steer a terminal. `clean` makes a
line of printable characters of at most MAX_LINE; no pattern here or in `rules.py` backtracks over more.

Prefixes: torch.distributed's exception hook ([rank3]:), torchrun --tee ([default0]:,
torch/distributed/elastic/multiprocessing/tail_log.py), srun --label (3:), mpirun --tag-output ([1,3]<stderr>:), Ray
((RayWorker pid=1, ip=10.0.0.1)), the CRI and Docker forms of Kubernetes, a node's name as pdsh writes it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

MAX_LINE = 1200
SHOWN = 300
RANK_LIMIT = 1_000_000

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]{0,32}[ -/]{0,8}[@-~]?|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)?|[@-Z\\-_])")
_TORCH = re.compile(r"\[rank(\d{1,6})\]: ?")
_TEE = re.compile(r"\[[a-zA-Z_]\w{0,30}?(\d{1,5})\]: ?")
_MPI = re.compile(r"\[\d{1,6},(\d{1,6})\]<std(?:out|err)>: ?")
_RAY = re.compile(r"\(([\w.:<>-]{1,80}) pid=\d{1,10}(?:, ip=([\w.:-]{1,60}))?\) ?")
_CRI = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]{8,18}(?:Z|[+-]\d\d:\d\d) std(?:out|err) [FP] ")
_POD = re.compile(r"\[pod/([\w.-]{1,80})/[\w.-]{1,60}\] ")
_LEVEL = re.compile(r"(?:ERROR|CRITICAL|FATAL) [\d:., T/-]{5,30} ?\[[\w./-]{1,60}:\d{1,6}\] ")
_LABEL = re.compile(r" {0,5}(\d{1,6}): ?")
_NODE = re.compile(r"([A-Za-z][\w.-]{0,60}\d[\w.-]{0,20}): ")
_STARTS = frozenset("[( 0123456789ECF")  # of all prefixes but a node's name
_ISO = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_OFFSET = re.compile(r" ?(?:Z\b|([+-])(0\d|1[0-4]):?([0-5]\d)\b)")
_DMESG = re.compile(
    r"\[?(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d)(?: (\d{4})\])?"
)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DOCKER_TIME = re.compile(r'"time": ?"([^"]{19,40})"')
_GLOG = re.compile(r"\b[IWEFV]?(\d{2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")
_QUIET = re.compile(r"\b(?:DEBUG|INFO|WARNING|WARN|NOTICE)\b")
_GLOG_QUIET = re.compile(r"\[?[IWV]\d{3,4} \d\d:\d\d:\d\d")
_HANDLED = re.compile(
    r"\b(?:retry(?:ing)?|retried|[Cc]aught|trying again|skipp(?:ed|ing)|ignor(?:ed|ing)|recover(?:ed|ing))\b"
)
_NCCL = re.compile(
    r"(?:\[[\d :./T-]{8,40}\] )?([\w.-]{1,80}):\d{1,9}:\d{1,9} \[(\d{1,3})\] (?:[\w./:-]{1,60} )?"
    r"NCCL (?:WARN|INFO|ERROR)"
)
_KERNEL = re.compile(
    r"(?:<\d{1,3}>)?\[ *\d{1,10}\.\d{3,9}\] |.{0,80}\bkernel: |\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \w{3} "
)
_SCHEDULER = re.compile(r"(?:srun|slurmstepd(?:-\S{1,60})?|slurmd(?:\[\S{1,60}\])?|salloc|sbatch): ")
_EXCEPTION = re.compile(
    r"(?:\[\w+\] ?)?(?:[A-Za-z_]\w*\.){0,8}"
    r"([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Timeout|NotMet|Died|Killed|Failure|Lost|ProcessRaised"
    r"|OutOfMemory|NotFound|StopIteration)\w{0,20})(?:: |:$|$|\()"
)
_UNLISTED = re.compile(r"(?:[A-Za-z_]\w*\.){0,8}([A-Z]\w*[a-z]\w*)(?:: |:?$)")  # after a traceback's frames only
_PROGRESS = re.compile(
    r"\b(?:step|iter(?:ation)?|epoch|global_step|batch)[ =:/#\[]{0,4}\d+.{0,200}?"
    r"(?:loss|lr|it/s|tokens|grad|ms|%|elapsed|acc)|\d+/\d+ \[\d\d:\d\d.{0,40}(?:it/s|s/it)",
    re.I,
)


class Form(StrEnum):
    """The structure of a line: which program wrote it, and how loudly."""

    EXCEPTION = "exception"  # the last line of a traceback
    QUIET = "quiet"  # logged as INFO or WARNING: the program went on
    NCCL = "nccl"
    KERNEL = "kernel"
    SCHEDULER = "scheduler"
    OTHER = "other"


@dataclass(slots=True)
class Line:
    text: str  # without prefixes
    number: int  # in its file, from 1; of a tail, from its begin
    log: str  # name of the file
    rank: int | None = None
    node: str = ""
    gpu: int | None = None
    form: Form = Form.OTHER
    at: float | None = None  # seconds in a year without its leap day: to order lines, not to date them
    ms: int | None = None  # the same since the epoch, where the line has a year; without an offset taken as UTC
    order: int = 0  # over all files that were joined

    @property
    def shown(self) -> str:
        """Return at most SHOWN characters, all printable."""
        return self.text if len(self.text) <= SHOWN else self.text[: SHOWN - 1].rstrip() + "…"


@dataclass(slots=True)
class Log:
    """One file of a job."""

    name: str
    lines: list[Line] = field(default_factory=list)
    cut: bool = False  # it begins before the tail that was read
    binary: bool = False


def clean(raw: bytes) -> str:
    """Return printable text without escapes, at most MAX_LINE characters."""
    if len(raw) > 8 * MAX_LINE:
        raw = raw[: 6 * MAX_LINE] + b" ... " + raw[-2 * MAX_LINE :]
    text = _ESCAPES.sub("", raw.decode("utf-8", "replace")).rstrip("\r\n")
    if "\r" in text:
        text = next((part for part in reversed(text.split("\r")) if part.strip()), "")  # what a terminal shows last
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " for c in text)
    if len(text) > MAX_LINE:
        text = text[: MAX_LINE - 400] + " ... " + text[-395:]
    return text


def read_log(name: str, data: bytes, cut: bool = False, rank: int | None = None, most: int = 1 << 30) -> Log:
    """Return the lines of a file's tail, the last `most`. `rank`: the rank whose file it is."""
    log = Log(name, cut=cut)
    raw = data.rsplit(b"\n", most)
    if len(raw) > most or (cut and len(raw) > 1):
        raw = raw[1:]  # not read; or the first line of a tail, which is not whole
    first = data.count(b"\n") + (1 if cut else 2) - len(raw)
    log.binary = data[:8192].count(0) > 64
    texts = [(number, text) for number, part in enumerate(raw, max(first, 1)) if (text := clean(part)).strip()]
    labelled = _majority(texts, _LABEL)
    noded = not labelled and _majority(texts, _NODE)
    state = _Tracebacks()
    for number, text in texts:
        line = Line(text, number, name, rank)
        _strip(line, labelled, noded)
        if line.at is None:
            set_time(line, line.text)
        line.form = state.form(line)
        log.lines.append(line)
    return log


def _majority(texts: list[tuple[int, str]], pattern: re.Pattern[str]) -> bool:
    """Whether most lines begin with a prefix that alone would prove nothing."""
    if len(texts) < 4:
        return False
    found = Counter(match[1] for _, text in texts if (match := pattern.match(text)))
    return sum(found.values()) >= 0.6 * len(texts) and len(found) <= max(4, len(texts) // 4) and len(found) <= 8192


def _strip(line: Line, labelled: bool, noded: bool) -> None:
    """Take the prefixes off a line, and keep what they say."""
    text = line.text
    if text.startswith('{"log":') and len(text) < MAX_LINE:
        text = _docker(line, text)
    local = None
    for _ in range(5):
        if text[:1] not in _STARTS and not noded:
            break
        if match := _TORCH.match(text):
            line.rank = int(match[1])
        elif match := _TEE.match(text):
            local = int(match[1])
        elif match := _MPI.match(text):
            line.rank = int(match[1])
        elif match := _RAY.match(text):
            line.node = match[2] or line.node
        elif match := _unranked(line, text):
            pass
        elif labelled and (match := _LABEL.match(text)):
            line.rank, labelled = int(match[1]), False
        elif noded and (match := _NODE.match(text)):
            line.node, noded = match[1], False
        else:
            break
        text = text[match.end() :]
    if local is not None and line.rank is None:
        line.rank = local  # right on one node; a rank that the line names itself is better
    line.text = text


def _unranked(line: Line, text: str) -> re.Match[str] | None:
    """Return the match of a prefix that names no rank; a container's has the time."""
    if match := _CRI.match(text):
        set_time(line, match[0])
    return match or _POD.match(text) or _LEVEL.match(text)


def _docker(line: Line, text: str) -> str:
    if match := _DOCKER_TIME.search(text):
        set_time(line, match[1])
    try:
        found = json.loads(text)
    except ValueError:
        return text
    inner = found.get("log") if isinstance(found, dict) else None
    return clean(inner.encode()) if isinstance(inner, str) else text


def set_time(line: Line, text: str) -> None:
    """Set the time that a text stands for: the seconds of the year, and the date where it has a year."""
    head = text[:120]
    offset = 0
    if match := _ISO.search(head):
        year, *rest, part = match.groups()
        if zone := _OFFSET.match(head, match.end()):
            offset = (int(zone[2]) * 3600 + int(zone[3]) * 60) * (-1 if zone[1] == "-" else 1) if zone[1] else 0
    elif match := _GLOG.search(head):
        year, (*rest, part) = None, match.groups()
    elif (match := _DMESG.match(head)) and match[1] in _MONTHS:
        year, part = match[6], "0"
        rest = [str(_MONTHS.index(match[1]) + 1), *match.groups()[1:5]]
    else:
        return
    month, day, hour, minute, second = map(int, rest)
    fraction = float(f"0.{part or 0}")
    if year is not None:
        try:
            time = datetime(int(year), month, day, hour, minute, second, tzinfo=UTC) - timedelta(seconds=offset)
            line.ms = round((time.timestamp() + fraction) * 1000)
            month, day, hour, minute, second = time.month, time.day, time.hour, time.minute, time.second
        except (ValueError, OverflowError):
            pass  # such as a 31st of February: it orders lines, and dates none
    line.at = ((month - 1) * 31 + day) * 86400.0 + hour * 3600 + minute * 60 + second + fraction


def last_time_ms(logs: Iterable[Log]) -> int | None:
    """Return the last time with a year that logs name, without an offset taken as UTC: ms since the epoch.

    Lines of the kernel do not count: its log goes on after a job.
    """
    of_jobs = (line for log in logs for line in log.lines[-200:] if line.form is not Form.KERNEL)
    return max((line.ms for line in of_jobs if line.ms is not None), default=None)


class _Tracebacks:
    """Which ranks are within a traceback, so that its last line is known as one."""

    def __init__(self) -> None:
        self._open: dict[int | None, int] = {}  # rank -> lines since it began
        self._frames: set[int | None] = set()  # ranks whose last line was one of a traceback's frames

    def form(self, line: Line) -> Form:
        framed = line.rank in self._frames
        self._frames.discard(line.rank)
        form = self._form(line, framed)
        if line.rank in self._open and line.text.startswith("  "):
            self._frames.add(line.rank)
        return form

    def _form(self, line: Line, framed: bool) -> Form:
        text = line.text
        if match := _NCCL.match(text):
            line.node, line.gpu = line.node or match[1], int(match[2])
            return Form.NCCL
        if _SCHEDULER.search(text[:120]):
            return Form.SCHEDULER
        if (text[:1] in "[<" or "kernel" in text[:100]) and _KERNEL.match(text):
            return Form.KERNEL
        quiet = bool(_QUIET.search(text[:120])) or bool(_GLOG_QUIET.match(text))
        if "Traceback (most recent call last)" in text or text.startswith("terminate called"):
            if not quiet:
                self._open[line.rank] = 0
            return Form.QUIET if quiet else Form.OTHER
        if line.rank in self._open:
            self._open[line.rank] += 1
            if self._open[line.rank] > 400:
                del self._open[line.rank]
            elif not text.startswith((" ", "\t")) and (_EXCEPTION.match(text) or (framed and _UNLISTED.match(text))):
                del self._open[line.rank]
                return Form.EXCEPTION
        if quiet or (_HANDLED.search(text[:200]) and "Watchdog caught" not in text and not text.startswith("Caught ")):
            return Form.QUIET
        return Form.EXCEPTION if text[:1].isalpha() and _EXCEPTION.match(text) else Form.OTHER


def is_progress(line: Line) -> bool:
    """Whether a training loop reports a step here."""
    return bool(_PROGRESS.search(line.text[:400]))


def exception_name(line: Line) -> str:
    """Return the exception's class that a line names, without its module."""
    match = _EXCEPTION.match(line.text) or (_UNLISTED.match(line.text) if line.form is Form.EXCEPTION else None)
    return match[1] if match else ""


def in_order(logs: Iterable[Log]) -> list[Line]:
    """Join the lines of all files by time, each file in its own order; files without times stand first."""
    keyed: list[tuple[float, int, int, Line]] = []
    for at, log in enumerate(logs):
        last = 0.0
        for line in log.lines:
            last = max(last, line.at or 0.0)  # a report at the end may name earlier times
            keyed.append((last, at, line.number, line))
    keyed.sort(key=lambda each: each[:3])
    for order, each in enumerate(keyed):
        each[3].order = order
    return [each[3] for each in keyed]


_NAMED = re.compile(r"(?:^|[^a-z])(?:rank|worker|proc|task)[_.-]?(\d{1,6})(?!\d)", re.I)
_LOCAL = re.compile(r"(?:^|/)(\d{1,5})/(?:stdout|stderr)(?:\.log)?$")


def ranks_of_names(names: list[str]) -> dict[str, int]:
    """Return the rank that a file's name gives: rank_3.log, attempt_0/3/stderr.log, or the one number that varies."""
    found: dict[str, int] = {}
    for name in names:
        if match := (_NAMED.search(name.rpartition("/")[2]) or _LOCAL.search(name)):
            found[name] = int(match[1])
    if found or len(names) < 3:
        return found
    parts = [re.split(r"(\d+)", name.rpartition("/")[2]) for name in names]
    if len({len(each) for each in parts}) != 1:
        return {}
    varied = [at for at in range(len(parts[0])) if len({each[at] for each in parts}) > 1]
    if len(varied) != 1 or not all(each[varied[0]].isdigit() for each in parts):
        return {}
    numbers = [int(each[varied[0]]) for each in parts]
    return dict(zip(names, numbers, strict=True)) if sorted(numbers) == list(range(len(numbers))) else {}
