"""Find GPUs that stopped together, where nobody says which job holds them: that they stop together shows the job.

When a rank of a synchronous job stops, all others spin from the same second on: utilisation at 100 %, no work, less
power than each had while it worked. GPUs of one kind of board that begin to do so together, with a few of their nodes
that go to rest in that second, are taken as one job, until they work again. All GPUs of a barrier spin alike: where
none rests, nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.metrics import Codes, Ints, boards, column
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import GUESSED, Floats

# Metrics that show work, and the level that GPUs must have reached to be judged by each.
CHANNELS = {
    "tensor_active_ratio": 0.02,
    "dram_active_ratio": 0.03,
    "nvlink_tx_bytes_per_s": 1e8,
    "nvlink_rx_bytes_per_s": 1e8,
    "pcie_tx_bytes_per_s": 1e7,
    "pcie_rx_bytes_per_s": 1e7,
}
LEVELS = (*CHANNELS, "power_w")
STILL = 0.05  # of its own level: a collective's polling kernel keeps one or two percent
# Hosts go on polling, on some sites with a third of the usual traffic, and a checkpoint moves more than training does.
# Where nothing else shows work, an evaluation may move less: then a tenth counts.
STILL_PCIE, STILL_PCIE_ALONE = 0.5, 0.1
WAITING_POWER = 0.75  # of its own power
WAITING_POWER_ALONE = 0.6  # where power is the only metric
RESTING = 0.02  # utilisation of a rank that has stopped; the only one at rest, it is as good as a metric of work
SPINS = 0.9  # utilisation of a GPU that waits in a kernel
FEW_SHARE = 0.1  # of a job's GPUs: with more, no single GPU is the culprit
RESTS = 0.5  # below it no kernel runs for most of the time
LEARN_BUCKETS = 3
LEARN_RATE = 0.05

TOGETHER_MS = 20_000  # within which the GPUs of a job stop
LEAST = 4  # GPUs
OVER_MS = 300_000  # at rest for so long a GPU has ended its work, and its levels are forgotten


def is_pcie(metric: str) -> bool:
    return metric.startswith("pcie")


def still_share(metric: str, alone: Bools) -> Floats:
    """Return the share of its own level at which a channel shows no work, of each GPU, float64 [G].

    Args:
        alone: where nothing but PCIe shows work, bool [G].
    """
    if is_pcie(metric):
        return np.where(alone, STILL_PCIE_ALONE, STILL_PCIE)
    return np.full(len(alone), STILL)


@dataclass(slots=True)
class Stops:
    """What each GPU without a known job does, and which of them stopped together.

    Attributes:
        level: own values while it works, float64 [LEVELS, G], NaN: not seen. worked: buckets of work, int64 [G].
        since_ms: when it stopped, int64 [G], 0: it works. group: number of the stop that it is part of, 0: none.
    """

    level: Floats = field(default_factory=lambda: np.zeros((len(LEVELS), 0)))
    worked: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    since_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    group: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    last: int = 0

    def jobs(self, window: Window) -> tuple[Codes, tuple[str, ...], dict[str, tuple[dict[str, float], int]]]:
        """Add the newest bucket. Return its jobs with the GPUs that stopped together as jobs of their own.

        Returns:
            each GPU's job, int32 [G]; the names; name of such a job -> its GPUs' median levels, and when they stopped.
        """
        bucket = window.newest
        guessed = np.array([*(name.startswith(GUESSED) for name in bucket.job_names), True])
        nameless = np.asarray(guessed[bucket.jobs], bool)  # -1 takes the True at the end
        if len(self.worked) != len(nameless):
            count = len(nameless)
            self.level, self.worked = np.full((len(LEVELS), count), np.nan), np.zeros(count, np.int64)
            self.since_ms, self.group = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._forget(~nameless)
        if not nameless.any():
            return bucket.jobs, bucket.job_names, {}
        self._advance(window, nameless)
        order = np.argsort(self.group, kind="stable")
        found, starts = np.unique(self.group[order], return_index=True)
        parts = [(n, part) for n, part in zip(found.tolist(), np.split(order, starts[1:]), strict=True) if n]
        if not parts:
            return bucket.jobs, bucket.job_names, {}
        jobs, names, stops = bucket.jobs.copy(), list(bucket.job_names), {}
        for number, gpus in parts:
            name = f"{GUESSED}that stopped, {number}"
            jobs[gpus] = len(names)
            names.append(name)
            levels = (self.level[number, gpus] for number in range(len(LEVELS)))
            known = {m: of[~np.isnan(of)] for m, of in zip(LEVELS, levels, strict=True)}
            level = {m: float(np.median(of)) for m, of in known.items() if len(of)}
            stops[name] = level, int(self.since_ms[gpus].max())
        return jobs, tuple(names), stops

    def _advance(self, window: Window, nameless: Bools) -> None:
        bucket = window.newest
        values = np.array([column(window, metric) for metric in LEVELS])
        util = column(window, "gpu_util_ratio")
        waits, rests = self._stopped(util, values)
        known = self.worked >= LEARN_BUCKETS
        stopped = nameless & known & (waits | rests)
        works = nameless & (util >= RESTS) & ~waits
        learns = works & ~stopped
        self.worked = np.where(learns, self.worked + 1, self.worked)
        rate = np.maximum(LEARN_RATE, 1 / np.maximum(self.worked, 1))
        before = np.where(np.isnan(self.level), values, self.level)
        new = np.where(np.isnan(values), before, before + rate * (values - before))
        self.level = np.where(learns, new, self.level)
        self.since_ms = np.where(stopped & (self.since_ms == 0), bucket.start_ms, self.since_ms)
        self.since_ms[works] = self.group[works] = 0
        over = rests & (self.since_ms > 0) & (bucket.end_ms - self.since_ms >= OVER_MS)
        over &= ~np.isin(self.group, np.unique(self.group[waits & (self.group > 0)]))  # others wait for it
        self._forget(over)
        self._gather(window, waits)

    def _forget(self, which: Bools) -> None:
        self.worked[which] = self.since_ms[which] = self.group[which] = 0
        self.level[:, which] = np.nan

    def _stopped(self, util: Floats, values: Floats) -> tuple[Bools, Bools]:
        """Return which GPUs spin without work, and which rest, bool [G] each."""
        active, judged = np.zeros(len(util), bool), np.zeros(len(util), bool)
        alone = np.ones(len(util), bool)
        for number, (metric, least) in enumerate(CHANNELS.items()):  # PCIe comes last
            shows = self.level[number] >= least
            active |= shows & (values[number] > still_share(metric, alone) * self.level[number])
            judged |= shows & ~np.isnan(values[number])
            alone &= ~judged | is_pcie(metric)
        with np.errstate(invalid="ignore", divide="ignore"):
            power = values[-1] / self.level[-1]
        fallen = power <= np.where(judged, WAITING_POWER, WAITING_POWER_ALONE)
        return (util >= SPINS) & ~active & (fallen | (judged & np.isnan(power))), util <= RESTING

    def _gather(self, window: Window, waits: Bools) -> None:
        """Group the GPUs that stopped together, a while ago, so that all of them have."""
        bucket, index = window.newest, window.index
        within_ms = max(TOGETHER_MS, 2 * bucket.length_ms)
        free = (self.since_ms > 0) & (self.group == 0)
        ripe = free & waits & (bucket.end_ms - self.since_ms >= within_ms)
        board = boards(window)[index.gpu_node]
        while ripe.any():
            first = int(self.since_ms[ripe].min())
            kind = int(board[ripe & (self.since_ms == first)][0])
            mine = ripe & (board == kind) & (self.since_ms - first <= within_ms)
            ripe &= ~mine
            of_nodes = np.zeros(index.node_count, bool)
            of_nodes[index.gpu_node[mine]] = True
            resting = free & ~waits & of_nodes[index.gpu_node] & (np.abs(self.since_ms - first) <= within_ms)
            count = int(mine.sum() + resting.sum())
            if count >= LEAST and 0 < resting.sum() <= max(1, FEW_SHARE * count):
                self.last += 1
                self.group[mine | resting] = self.last
