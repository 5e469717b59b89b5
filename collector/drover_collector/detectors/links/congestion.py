"""Find the network port, or the leaf switch, that congestion comes from. A job that congests its own ports is no fault.

Counters of waiting and retrying (METRICS) depend on the job, its phase and the counter's own tick. So beyond a floor
each port's rate, as a logarithm, is compared with its own past in this job and, in the same minute, with the other
ports of the job; where nobody names the job, with all ports.

- Most ports of a leaf have risen RISE times over their past, and few elsewhere: the leaf switch is hot. A job's ports
  on other leafs must not have risen; a job that is on this leaf only proves it together with another one, or when it
  lasts.
- Where most ports of a leaf rise together, each needs only a fiftieth of the floor (LEAF_FLOOR): what one port shows by
  chance, twelve do not. Then what a port sends or receives more of is taken off its rise (`excess`), as a job that
  talks more waits more.
- One port of a job has risen, RISE times as much as the job's others: that port, its cable or its switch port.
- One port of a node waits or retries SIBLINGS times as much as its others, which carry as much or more: that port
  too, without any past. The rails of a node carry the same.
- Ports on three nodes have risen so in the same minutes, where nobody says which leaf they are at: a switch that they
  probably share.
- Most ports of a job have risen: the job itself (all to one, a checkpoint). That is not reported.

What a single port sends or receives more of than its job is taken off its rise twice, as queues grow at least with the
square of the traffic: a hot expert, a storage gateway and the rank that writes a checkpoint wait more because they
carry more. A port that nothing can be compared with, the only one of its node in a job of few ports, must stand out for
LONE_PERSIST minutes. Where short rises came and went on several nodes within a day, they are how this fleet works: one
must last twice as long as the longest of these on other nodes. A port that stands out in far most minutes of an hour is
bad though it pauses: each other minute takes PAUSE off its minutes, and FLAPS_PERSIST must be left.

InfiniBand's port_xmit_wait counts ticks with data to send and no credit. RoCE's out_of_sequence
and packet_seq_err grow where packets are lost, rp_cnp_handled where switches mark congestion (NVIDIA, "Understanding
mlx5 ethtool counters"). The judgement is made once a minute.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.metrics import Ints, jobs_of_nodes
from drover_collector.detectors._lib.robust import Bools, group_medians
from drover_collector.detectors._lib.texts import listing
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.links.ports import PortLayout
from drover_collector.fleet.buckets import Floats
from drover_collector.fleet.ports import fitted
from drover_core.metrics.catalog import BY_NAME
from drover_core.model.events import (
    Evidence,
    Finding,
    IncidentKind,
    RecommendedAction,
    Severity,
)

NAME = "links"

METRICS = (
    "tx_wait", "tx_discards", "out_of_sequence", "packet_sequence_errors", "rnr_nak_retries", "cnp_handled", "cnp_sent",
)  # fmt: skip
BYTES = ("tx_bytes", "rx_bytes")
MINUTE_MS = 60_000
RISE = 4.0  # times its own past, and times the other ports of its job
SIGMAS = 4.0  # and so far outside its own past
LEAST_SIGMA = 0.25  # of the logarithm: what a healthy port's minute differs by
# Fewer delay nobody: our own floors. With a tick of port_xmit_wait of 4 ns it is 0.3 % of the time; adapters differ.
# Notices are how RoCE shares a link, in bursts: healthy ports of strangers' fleets had 5,000 a minute, congested ones
# 50,000 and more.
LEAST = {"tx_wait": 5e7, "cnp_handled": 10_000.0, "cnp_sent": 10_000.0}
LEAST_PER_MINUTE = np.array([LEAST.get(metric, 60.0) for metric in METRICS])[:, None]
LEAF_FLOOR = 0.02  # of LEAST_PER_MINUTE, and at least LEAF_EVENTS: ports that rise together
LEAF_EVENTS = 3.0
LEAF_SIGMAS = 2.0  # of each such port's usual deviation, which a slow rise must not widen: at most CLIP of it is learnt
CLIP = 2.5
MEAN_TO_SIGMA = 1.2533  # sigma over the mean absolute deviation of normal values
SIBLINGS, SIBLING_LEAST = 20.0, 10.0  # times the node's other ports, and times LEAST_PER_MINUTE
SIBLING_PORTS = 4  # of a node, all of one speed
CARRIES = 0.5, 1.2  # times what the node's other ports carry: another share of the work has other events
LEARN = 10  # minutes before a port's own past counts
FORGET = 240.0  # minutes over which it is forgotten
PERSIST = 3  # minutes in a row
PORT_PERSIST = 5  # of a single port: rises of three minutes come and go in healthy fleets of hundreds of nodes
# Of the traffic, with which waiting may grow. So many wait for a link that is used to the share r: r^2 / (1 - r) (the
# M/M/1 queue); near its capacity it is more.
TRAFFIC_POWER = 2.0
# Rises of a single port that came and went: on so many nodes, and this share of all, within a day. Ones that lasted for
# more than SPELL_MOST minutes are faults that somebody repaired. Another one must last SPELL_SLACK times as long as
# these, which is ONE_JOB_PERSIST at most. Our own limits.
SPELL_NODES, SPELL_SHARE, SPELL_MOST, SPELL_SLACK = 3, 0.005, 10, 2.0
SPELLS_MS, SPELLS_KEPT = 24 * 3_600_000, 1024
ONE_JOB_PERSIST = 20  # where a leaf has one job only: no step of a program is all to one for so long
LEAF_SHARE = 0.5  # of a leaf's ports
LEAF_NODES = 3  # that it must be on
LONE_PERSIST = 20  # minutes, of a port without mates: the same reason
FLAPS_PERSIST, PAUSE = 20, 2  # minutes; our own limits: no step of a program that lasts so long pauses so seldom
ELSEWHERE_SHARE = 0.2  # of the ports outside the leaf: more is no matter of the leaf
JOB_SHARE = 0.3  # of the job's ports: more is the job itself
NODE_SHARE = 0.5  # of a node's ports, at least two: more is the node's own traffic
LEAST_PORTS = 4  # of a job, to compare one with
FEW_SHARE, FEW, MOST = 0.1, 3, 200  # of all ports that may be bad at once; more is the fleet's own traffic
FLEET_SHARE = 0.5  # of all ports: no leaf is looked for
WORKS = 0.2  # utilisation of a node's median GPU, below which its ports are not judged
RESTS = 5  # minutes without work after which a port's past is forgotten, as the next job is another
LASTS = 120  # minutes after which what stands out becomes the past


@dataclass(frozen=True, slots=True)
class Congested:
    """What a minute showed.

    Attributes:
        rate: events a minute, float64 [M, L]. usual: those of its own past, or of the node's other ports where only
            these show that it stands out (`by_others`, bool), float64 [M, L].
    """

    rate: Floats
    usual: Floats
    by_others: Bools


class FaintRise:
    """By how much each port's events rise beyond its traffic, for ports that rise together; [M, L] or [L].

    Attributes:
        minutes: in a row in which it rose, by less than alone counts too.
        held: in a row in which its past was not learnt.
    """

    def __init__(self, ports: int) -> None:
        shape = len(METRICS), ports
        self.minutes, self.held = np.zeros(shape), np.zeros(shape)
        self._spread = np.zeros(shape)  # mean absolute deviation of the logarithm of the events, clipped
        self._carried = np.zeros(ports)  # mean logarithm of the bytes that it carried a minute

    def more_traffic(self, carried: Floats) -> Floats:
        """Return by how much more each port carries than before, as a logarithm, [L]; 0 where that is not known."""
        level = np.log1p(np.fmax(carried[0], carried[1]))
        return np.where(np.isnan(level), 0.0, np.maximum(level - self._carried, 0.0))

    def add_minute(self, rate: Floats, carried: Floats, away: Floats, count: Floats) -> Bools:
        """Return where a port has more events than its traffic explains, bool [M, L].

        Args:
            rate, carried: events and bytes of the minute. away, count: of the past's mean, and its minutes.
        """
        excess = away - self.more_traffic(carried)
        sigma = np.maximum(MEAN_TO_SIGMA * self._spread, LEAST_SIGMA)
        risen = ~np.isnan(excess) & (count >= LEARN) & (excess >= np.maximum(math.log(RISE), LEAF_SIGMAS * sigma))
        risen &= rate >= np.maximum(LEAF_FLOOR * LEAST_PER_MINUTE, LEAF_EVENTS)
        rest = np.where(np.isnan(away) | risen, self._spread, np.minimum(np.abs(away), CLIP * sigma))
        self._spread += np.maximum(1 / (count + 1), 1 / FORGET) * (rest - self._spread)
        self.minutes = np.where(risen, self.minutes + 1, 0)
        return np.asarray(risen)

    def hold(self, stands_out: Bools, carried: Floats, count: Floats) -> Bools:
        """Return of what the past is not to be learnt, bool [M, L]; and learn the traffic of the other ports.

        Both stop and go on together: else what a port carries becomes usual, and what that makes it wait does not.
        """
        self.held = np.where(stands_out, self.held + 1, 0)
        held = stands_out & (self.held < LASTS)  # what lasts for hours is how it is now
        level = np.log1p(np.fmax(carried[0], carried[1]))
        share = np.maximum(1 / (count.max(axis=0) + 1), 1 / FORGET)
        known = ~np.isnan(level) & ~held.any(axis=0)
        self._carried += np.where(known, share * (np.nan_to_num(level) - self._carried), 0.0)
        return np.asarray(held)

    def forget(self, ports: Bools) -> None:
        self.minutes[:, ports] = self.held[:, ports] = self._spread[:, ports] = 0.0
        self._carried[ports] = 0.0

    def grow(self, more: int) -> None:
        """Add ports that follow the known ones."""
        nothing = np.zeros((len(METRICS), more))
        self.minutes, self.held, self._spread = (
            np.append(of, nothing, axis=1) for of in (self.minutes, self.held, self._spread)
        )
        self._carried = np.append(self._carried, np.zeros(more))


class Spells:
    """For how many minutes each port has stood out alone, and for how long others did before it ended by itself.

    Attributes:
        minutes: in a row, float64 [M, L]. with_pauses: not in a row, less PAUSE for each other minute, float64 [L].
    """

    def __init__(self, ports: int) -> None:
        self.minutes, self.with_pauses = np.zeros((len(METRICS), ports)), np.zeros(ports)
        self._ended: deque[tuple[int, float, int]] = deque(maxlen=SPELLS_KEPT)  # when, minutes, node

    def add_minute(self, over: Bools, known: Bools, node: Ints, end_ms: int) -> None:
        """Add a minute. `over`: which stand out, bool [M, L]. `known`, `node`: of each port, [L]."""
        before = self.minutes.max(axis=0)
        self.minutes = np.where(over, self.minutes + 1, 0)
        step = np.where(over.any(axis=0), 1.0, np.where(known, -PAUSE, 0.0))
        self.with_pauses = np.clip(self.with_pauses + step, 0.0, FLAPS_PERSIST)
        ended = np.flatnonzero(known & (before >= PERSIST) & (before <= SPELL_MOST) & ~over.any(axis=0))
        if len(np.unique(node[ended])) < LEAF_NODES:  # more at once had one reason: a switch, or a job
            self._ended.extend((end_ms, float(before[k]), int(node[k])) for k in ended.tolist())

    def needed(self, end_ms: int, nodes: int, node: int) -> float:
        """Return for how many minutes a port of `node` must stand out to be more than what comes and goes elsewhere."""
        while self._ended and end_ms - self._ended[0][0] > SPELLS_MS:
            self._ended.popleft()
        usual = len({node for _, _, node in self._ended}) >= max(SPELL_NODES, SPELL_SHARE * nodes)
        longest = max((lasted for _, lasted, own in self._ended if own != node), default=0.0)
        return max(PORT_PERSIST, SPELL_SLACK * longest if usual else 0.0)

    def forget(self, ports: Bools) -> None:
        self.minutes[:, ports] = self.with_pauses[ports] = 0.0

    def grow(self, more: int) -> None:
        """Add ports that follow the known ones."""
        self.minutes = np.append(self.minutes, np.zeros((len(METRICS), more)), axis=1)
        self.with_pauses = np.append(self.with_pauses, np.zeros(more))


class Congestion:
    """Each port's past of every counter in its node's job, and for how many minutes it has stood out; [M, L] or [L]."""

    def __init__(self, ports: int) -> None:
        shape = len(METRICS), ports
        # Newest known values, of METRICS and then BYTES, and the end of the bucket in which each port was read.
        self._newest: Floats = np.full((len(METRICS) + len(BYTES), ports), np.nan)
        self._at_ms: Ints = np.zeros(ports, np.int64)
        self._last, self._last_at_ms = self._newest.copy(), self._at_ms.copy()  # the same a minute ago
        self._mean, self._var, self._count = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._risen = np.zeros(shape)  # minutes in a row in which it was over its own past
        self._alone = Spells(ports)  # and over its job's other ports
        self._faint = FaintRise(ports)
        self._rests: Ints = np.zeros(ports, np.int64)  # minutes in a row in which its node did not work
        self._job: npt.NDArray[np.object_] = np.full(ports, None, object)
        self._judged_ms = 0
        self._since_ms: dict[tuple[str, str], int] = {}
        self._found: list[Finding] = []

    def findings(self, window: Window, layout: PortLayout, now_ms: int) -> Iterator[Finding]:
        """Return what the last whole minute showed; the same until the next one has ended."""
        ports, end_ms = len(layout.ports), window.newest.end_ms
        if len(self._at_ms) < ports:
            self._grow(ports - len(self._at_ms))
        values = np.array([fitted(window.newest.link.get(metric), ports) for metric in (*METRICS, *BYTES)], np.float64)
        known = ~np.isnan(values)
        self._newest = np.where(known, values, self._newest)
        self._at_ms = np.where(known.any(axis=0), end_ms, self._at_ms)
        if end_ms - self._judged_ms >= MINUTE_MS:
            now = self._minute(window, layout)
            self._judged_ms = end_ms
            self._found = list(self._judge(window, layout, now, now_ms))
        yield from self._found

    def _minute(self, window: Window, layout: PortLayout) -> Congested:
        """Compare the minute that has ended with each port's past and with its job; then learn it."""
        minutes = (self._at_ms - self._last_at_ms) / MINUTE_MS
        grown = self._newest - self._last
        fresh = (self._last_at_ms > 0) & (minutes > 0) & (minutes <= LEARN) & self._works(window, layout)
        with np.errstate(invalid="ignore", divide="ignore"):
            rate = np.where(fresh & (grown >= 0), grown / minutes, np.nan)
        self._last, self._last_at_ms = self._newest.copy(), self._at_ms.copy()
        rate, carried = rate[: len(METRICS)], rate[len(METRICS) :]
        level = np.log1p(rate)
        known = ~np.isnan(level)
        sigma = np.maximum(np.sqrt(self._var), LEAST_SIGMA)
        away = level - self._mean
        judged = known & (self._count >= LEARN) & (rate >= LEAST_PER_MINUTE)
        least, more = np.maximum(math.log(RISE), SIGMAS * sigma), self._faint.more_traffic(carried)
        risen = judged & (away - TRAFFIC_POWER * more >= least)
        stands = judged & (away >= least)
        over = stands.copy()
        if stands.any():
            # Where the whole job carries more, its other ports show what that makes: a bad port is not usual then.
            excess = away - TRAFFIC_POWER * np.maximum(more - self._with_its_job(window, layout, more[None])[0], 0.0)
            beyond = excess - self._with_its_job(window, layout, excess)
            over = stands & (excess >= least) & (beyond >= math.log(RISE))
        over_siblings, others = _over_siblings(window, layout, rate, carried)
        over_siblings &= (self._count < LEARN) | (away >= math.log(RISE))  # else it has always been so
        over |= over_siblings
        faint = self._faint.add_minute(rate, carried, away, self._count)
        stands_out = stands | over_siblings | faint
        learns = known & ~self._faint.hold(stands_out, carried, self._count)
        share = np.where(learns, np.maximum(1 / (self._count + 1), 1 / FORGET), 0.0)
        rest = np.where(known, away, 0.0)
        by_others = over_siblings & ~risen
        usual = np.where(by_others, others, np.expm1(self._mean))
        self._var += share * ((1 - share) * rest * rest - self._var)
        self._mean += share * rest
        self._count += learns
        self._risen = np.where(risen, self._risen + 1, 0)
        self._alone.add_minute(over, np.asarray(known.any(axis=0)), layout.of_node, window.newest.end_ms)
        return Congested(rate, usual, by_others)

    def _works(self, window: Window, layout: PortLayout) -> Bools:
        """Return the ports whose nodes work, bool [L], and forget the past of those with another job, or after a rest.

        A port that carries nothing has no past to be compared with.
        """
        index, util = window.index, window.newest.gpu.get("gpu_util_ratio")
        busy = np.ones(index.node_count, bool)
        if util is not None:
            of_node, count = group_medians(util, index.gpu_node.astype(np.int64), index.node_count)
            busy = ~(of_node < WORKS) & ~((count == 0) & (np.diff(index.first_gpu) > 0))
        works = busy[layout.of_node]
        self._rests = np.where(works, 0, self._rests + 1)
        job, _ = _jobs(window, layout)
        names = np.array([*window.newest.job_names, None], object)[job]
        forgets = (works & (names != self._job)) | (self._rests >= RESTS)
        self._job = np.where(works, names, self._job)
        for array in (self._mean, self._var, self._count, self._risen):
            array[:, forgets] = 0.0
        self._alone.forget(forgets)
        self._faint.forget(forgets)
        return np.asarray(works)

    def _grow(self, more: int) -> None:
        """Add ports that follow the known ones."""

        def wider(values: Floats, fill: float) -> Floats:
            return np.concatenate([values, np.full((len(values), more), fill)], axis=1)

        nothing = np.zeros(more, np.int64)
        self._newest, self._last = wider(self._newest, np.nan), wider(self._last, np.nan)
        self._at_ms, self._last_at_ms = np.append(self._at_ms, nothing), np.append(self._last_at_ms, nothing)
        self._mean, self._var, self._count = (wider(of, 0.0) for of in (self._mean, self._var, self._count))
        self._risen = wider(self._risen, 0.0)
        self._alone.grow(more)
        self._faint.grow(more)
        self._rests, self._job = np.append(self._rests, nothing), np.append(self._job, np.full(more, None, object))

    def _with_its_job(self, window: Window, layout: PortLayout, away: Floats) -> Floats:
        """Return by how much the median port of each port's job has risen above its own past, float64 [M, L].

        A port without a job, or in a job on one node, is compared with all ports of the fleet.
        """
        job, jobs = _jobs(window, layout)
        nobody = np.zeros(len(job), np.int64)
        result = np.zeros_like(away)
        for row, values in enumerate(away):
            of_job, count = group_medians(values, job, jobs)
            of_all, _ = group_medians(values, nobody, 1)
            of_job = np.append(np.where(count >= LEAST_PORTS, of_job, of_all[0]), of_all[0])  # the last: without a job
            result[row] = np.maximum(np.nan_to_num(of_job[job]), 0.0)
        return result

    def _judge(self, window: Window, layout: PortLayout, now: Congested, now_ms: int) -> Iterator[Finding]:
        lasting = self._alone.minutes >= PERSIST
        risen, alone = (np.asarray((of >= PERSIST).any(axis=0)) for of in (self._risen, self._alone.minutes))
        held: set[tuple[str, str]] = set()
        hot: set[int] = set()
        job, _ = _jobs(window, layout)
        leafs = list(self._hot_leafs(window, layout, self._risen, job)) if risen.any() else []
        if not leafs and (self._faint.minutes >= PERSIST).any():
            in_use = self._rests < ONE_JOB_PERSIST  # an evaluation is no end: its ports could have risen
            leafs = list(self._hot_leafs(window, layout, self._faint.minutes, job, in_use))
        for leaf, mine in leafs:
            hot |= set(mine.tolist())  # several leafs at once are what they carry, or what connects them
            if len(leafs) > 1:
                continue
            held.add(("leaf", leaf))
            yield _leaf_finding(window, layout, leaf, mine, self._since("leaf", leaf, window), now_ms)
        bad = self._lasting(_bad_ports(layout, alone, job, hot), layout, job, window) if alone.any() else []
        together = set(self._together(layout, bad))
        if together:
            held.add(("leaf", ""))
            mine = np.array(sorted(together), np.int64)
            yield _leaf_finding(window, layout, "", mine, self._since("leaf", "", window), now_ms)
        for k in [k for k in bad if k not in together]:
            name = _name(layout, k)
            held.add(("port", name))
            by = np.where(lasting[:, k], now.rate[:, k] / (now.usual[:, k] + 1), -1.0)
            row = int(np.argmax(np.nan_to_num(by, nan=-1.0)))
            where = "on the node's other ports" if now.by_others[row, k] else "before"
            fact = METRICS[row], float(now.rate[row, k]), float(now.usual[row, k]), where
            minutes = int(self._alone.minutes[:, k].max())
            yield _port_finding(window, layout, k, fact, self._since("port", name, window, minutes), now_ms)
        self._since_ms = {key: ms for key, ms in self._since_ms.items() if key in held}

    def _since(self, what: str, name: str, window: Window, minutes: int = PERSIST) -> int:
        return self._since_ms.setdefault((what, name), window.newest.end_ms - minutes * MINUTE_MS)

    def _lasting(self, bad: list[int], layout: PortLayout, job: Ints, window: Window) -> list[int]:
        """Return those of the bad ports that have stood out for long enough; reported ones stay."""
        end_ms, nodes = window.newest.end_ms, window.index.node_count
        of_node, of_job = np.bincount(layout.of_node), np.bincount(job + 1)
        result = []
        for k in bad:
            lone = of_node[layout.of_node[k]] == 1 and (job[k] < 0 or of_job[job[k] + 1] < LEAST_PORTS)
            least = max(self._alone.needed(end_ms, nodes, int(layout.of_node[k])), LONE_PERSIST if lone else 0.0)
            lasts = self._alone.minutes[:, k].max() >= least or self._alone.with_pauses[k] >= FLAPS_PERSIST
            if lasts or ("port", _name(layout, k)) in self._since_ms:
                result.append(k)
        return result

    def _together(self, layout: PortLayout, bad: list[int]) -> list[int]:
        """Return those of the bad ports that rose in the same minutes, if they are on several nodes."""
        since = self._alone.minutes[:, bad].max(axis=0) if bad else np.zeros(0)
        for minutes in np.unique(since).tolist():
            same = [k for k, own in zip(bad, since.tolist(), strict=True) if abs(own - minutes) <= 1]
            if len({layout.ports[k].node for k in same}) >= LEAF_NODES:
                return same
        return []

    def _hot_leafs(
        self, window: Window, layout: PortLayout, minutes: Floats, job: Ints, in_use: Bools | None = None
    ) -> Iterator[tuple[str, Ints]]:
        """Yield leafs that are congested whatever their jobs do, with their ports that have risen.

        Args:
            minutes: for which each port has risen, float64 [M, L]. in_use: only these ports of a leaf count, bool [L].
        """
        risen = np.asarray((minutes >= PERSIST).any(axis=0))
        if risen.sum() > FLEET_SHARE * len(risen):
            return
        leafs = np.array([port.leaf or window.index.nodes[port.node].leaf for port in layout.ports])
        for leaf in sorted(set(leafs[risen].tolist()) - {""}):
            mine = np.flatnonzero(leafs == leaf)
            rest = len(risen) - len(mine)
            mine = mine if in_use is None else mine[in_use[mine]]
            over = mine[risen[mine]]
            outside = int(risen.sum()) - len(over)
            nodes = len(np.unique(layout.of_node[over]))
            most = nodes >= LEAF_NODES and len(over) >= LEAF_SHARE * len(mine)
            if not most and (nodes < 2 or len(over) < max(len(mine), LEAST_PORTS)):  # a small leaf: all of its ports
                continue
            if not rest or outside > ELSEWHERE_SHARE * rest:
                continue
            if _job_rose_elsewhere(layout, mine, risen, job):
                continue
            least = np.median if in_use is not None else np.min  # few events are not in every minute
            if _not_of_one_job(mine, risen, job) or least(minutes[:, over].max(axis=0)) >= ONE_JOB_PERSIST:
                yield leaf, over


def _name(layout: PortLayout, k: int) -> str:
    return f"{layout.ports[k].node} {layout.ports[k].name}"


def _not_of_one_job(mine: Ints, risen: Bools, job: Ints) -> bool:
    """Return True if what has risen on a leaf's ports `mine` is no single job's own traffic."""
    inside = np.zeros(len(risen), bool)
    inside[mine] = True
    jobs = np.unique(job[mine[risen[mine]]]).tolist()
    if jobs == [-1]:  # nobody names them: they may be one
        return False
    if len(jobs) > 1:
        return True
    elsewhere = (job == jobs[0]) & ~inside
    return elsewhere.any() and bool(risen[elsewhere].mean() <= ELSEWHERE_SHARE)


def _job_rose_elsewhere(layout: PortLayout, mine: Ints, risen: Bools, job: Ints) -> bool:
    """Return True if the only job of what has risen on a leaf's ports has risen on other leafs too: it is the job.

    Where nobody names jobs, a node elsewhere with half of its ports risen may be of the same one.
    """
    outside = np.ones(len(risen), bool)
    outside[mine] = False
    jobs = np.unique(job[mine[risen[mine]]]).tolist()
    if len(jobs) != 1:
        return False
    if jobs[0] >= 0:
        elsewhere = outside & (job == jobs[0])
        return elsewhere.any() and bool(risen[elsewhere].mean() > ELSEWHERE_SHARE)
    ports = np.bincount(layout.of_node[outside])
    return bool((np.bincount(layout.of_node[outside & risen], minlength=len(ports)) > NODE_SHARE * ports).any())


def _bad_ports(layout: PortLayout, over: Bools, job: Ints, hot: set[int]) -> list[int]:
    """Return ports that stand out alone. `hot`: ports of leafs that are reported."""
    alone = [k for k in np.flatnonzero(over).tolist() if k not in hot]
    if not alone or len(alone) > min(MOST, max(FEW, FEW_SHARE * len(over))):
        return []

    def is_alone(k: int) -> bool:
        mine, its_job = over[layout.of_node == layout.of_node[k]], over[(job == job[k]) & (job[k] >= 0)]
        own_traffic = mine.sum() > 1 and mine.mean() > NODE_SHARE
        return not own_traffic and not (its_job.sum() > 1 and its_job.mean() > JOB_SHARE)

    return [k for k in alone if is_alone(k)]


def _over_siblings(window: Window, layout: PortLayout, rate: Floats, carried: Floats) -> tuple[Bools, Floats]:
    """Return which ports stand out among those of their node, bool [M, L], and the median of those ports.

    Args:
        rate: events a minute, float64 [M, L]. carried: bytes a minute, sent and received, float64 [2, L].
    """
    node, nodes = layout.of_node.astype(np.int64), window.index.node_count
    speed = fitted(window.newest.link.get("rate_gbps"), len(node))
    of_speed = np.nan_to_num(speed).astype(np.int64)
    groups, of_port, sizes = np.unique(node * 10_000 + of_speed, return_inverse=True, return_counts=True)
    group = np.where((sizes[of_port] >= SIBLING_PORTS) & ~np.isnan(speed), of_port, -1).astype(np.int64)
    if not nodes or not (group >= 0).any():
        return np.zeros(rate.shape, bool), np.full(rate.shape, np.nan)

    def of_others(values: Floats) -> Floats:
        return np.append(group_medians(values, group, len(groups))[0], np.nan)[group]

    usual = np.array([of_others(values) for values in rate])
    as_much = np.ones(len(node), bool)
    for values in carried:
        usual_bytes = of_others(values)
        as_much &= (values >= CARRIES[0] * usual_bytes) & (values <= CARRIES[1] * usual_bytes)
    return (rate >= SIBLING_LEAST * LEAST_PER_MINUTE) & (rate >= SIBLINGS * (usual + 1)) & as_much, usual


def _jobs(window: Window, layout: PortLayout) -> tuple[Ints, int]:
    """Return the job of each port's node, int64 [L], -1 for none, and the number of jobs."""
    of_node = jobs_of_nodes(window)
    return of_node[layout.of_node], int(of_node.max(initial=-1)) + 1


def _leaf_finding(window: Window, layout: PortLayout, leaf: str, mine: Ints, since_ms: int, now_ms: int) -> Finding:
    names, ports = [window.index.nodes[n].name for n in np.unique(layout.of_node[mine]).tolist()], len(mine)
    text = f"{ports} ports on {listing(names)} wait or retry over {RISE:g} times as much as before"
    where = f"Leaf {leaf} is congested" if leaf else "A switch is congested that these ports probably share"
    rest = "ports of other leafs do not" if leaf else "other ports do not"
    return Finding(
        NAME, IncidentKind.LINK, "hot_switch", "leaf", None, None, tuple((name, None) for name in names), now_ms,
        since_ms, Severity.WARNING, 0.7, RecommendedAction.ADVISE,
        f"{where}: {text}; {rest}.",
        "Check the switch (buffers, uplinks that are down, a routing change), not the nodes. Give new jobs to other"
        " leafs.",
        (Evidence(text, from_ms=since_ms, to_ms=window.newest.end_ms, peers=ports, key=f"congestion of leaf {leaf}"),),
        snapshot={"leafs": {leaf: True}} if leaf else {},
    )  # fmt: skip


def _port_finding(
    window: Window, layout: PortLayout, k: int, shown: tuple[str, float, float, str], since_ms: int, now_ms: int
) -> Finding:
    """Return the finding about a port. `shown`: a metric, its events a minute now, the usual ones, and of when."""
    metric, rate, usual, where = shown
    port, index = layout.ports[k], window.index
    node = index.nodes[port.node].name
    text = f"{rate:,.0f} {BY_NAME[metric].label} per minute, {usual:,.0f} {where}"
    fact = Evidence(
        f"port {port.name} has {text}", metric, rate, usual, None, None, since_ms, window.newest.end_ms, port.name
    )
    return Finding(
        NAME, IncidentKind.LINK, "congested_port", "node", node, None, ((node, None),), now_ms, since_ms,
        Severity.WARNING, 0.7, RecommendedAction.ADVISE, f"Port {port.name} of node {node} is congested: {text}.",
        "Check the cable, its transceivers and the switch port, then the node's PCIe link to this adapter.",
        (fact,), window.job_of(int(index.first_gpu[port.node])) if index.nodes[port.node].gpus else None,
    )  # fmt: skip
