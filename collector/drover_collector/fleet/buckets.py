"""Buckets: one value per entity, metric and 10 s, which detectors judge. Store and replay make the same from raw rows.

The value of a gauge is the lower median, of a counter or state the last value, NaN if there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drover_core.metrics.catalog import BY_NAME, Kind

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

BUCKET_MS = 10_000


class LazyColumns(Mapping[str, Floats]):
    """Columns that are decoded when they are read: encoded they take a third of the memory.

    Decoded columns are kept while the bucket is the newest, which detectors read GPU by GPU. After `age` each read
    decodes again.
    """

    def __init__(self, columns: Mapping[str, Callable[[], Floats]]) -> None:
        self._columns = columns
        self._made: dict[str, Floats] | None = {}

    def age(self) -> None:
        """Keep no decoded columns from now on."""
        self._made = None

    def __getitem__(self, metric: str) -> Floats:
        made = self._made  # another thread may read the newest bucket while it ages
        if made is None:
            return self._columns[metric]()
        if metric not in made:
            made[metric] = self._columns[metric]()
        return made[metric]

    def __contains__(self, metric: object) -> bool:
        return metric in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


MAX_WORKLOADS_OF_NODE = 16  # a user may report many names: more are stored and not judged


@dataclass(frozen=True, slots=True)
class Workloads:
    """The training loops and inference servers that reported in a bucket, W of them, by node and name.

    Attributes:
        node: int32 [W], number of the node; name: W names, which a node has once each.
        values: metric -> float64 [W], NaN where absent; no key if none reported it.
    """

    node: Ints
    name: tuple[str, ...]
    values: Mapping[str, Floats]

    def __len__(self) -> int:
        return len(self.name)

    @classmethod
    def of(cls, node: Ints, names: Sequence[str], values: Mapping[str, Floats]) -> Workloads:
        """Return rows of known nodes in their order, the first MAX_WORKLOADS_OF_NODE of each; node -1: not known."""
        order = sorted(np.flatnonzero(node >= 0).tolist(), key=lambda at: (int(node[at]), names[at]))
        if not order:
            return NO_WORKLOADS
        chosen = np.array(order, np.intp)
        numbers = node[chosen]
        first = np.searchsorted(numbers, numbers)  # of each row's node
        chosen = chosen[np.arange(len(chosen)) - first < MAX_WORKLOADS_OF_NODE]
        columns = {name: column[chosen] for name, column in values.items()}
        there = {name: column for name, column in columns.items() if not np.isnan(column).all()}
        return cls(node[chosen].astype(np.int32), tuple(names[at] for at in chosen.tolist()), there)


NO_WORKLOADS = Workloads(np.zeros(0, np.int32), (), {})

GUESSED = "guessed job "  # so begin the names of jobs that nobody names


@dataclass(frozen=True, slots=True)
class Bucket:
    """Values of one closed bucket, laid out by a FleetIndex with N nodes and G GPUs.

    Attributes:
        gpu, node: metric name -> float64 [G] or [N] in catalog units, NaN where absent; no key if nothing reported it.
        link: metric name -> float64 over the ports of `FleetIndex.ports` (may be empty).
        gpu_rows, node_rows: int32 [G], [N]: how many samples fell into the bucket; 0 = silent.
        jobs: int32 [G]: index into `job_names` of the job that held the GPU at the bucket's end, -1 for none.
        late: nodes without a row whose agents sent data after its end: they are late, not silent. Empty in a replay,
            as the store has late data.
        work: what reports of its own work: training loops and inference servers.
    """

    start_ms: int
    length_ms: int
    gpu: Mapping[str, Floats]
    node: Mapping[str, Floats]
    gpu_rows: Ints
    node_rows: Ints
    jobs: Ints
    job_names: tuple[str, ...] = ()
    link: Mapping[str, Floats] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    work: Workloads = NO_WORKLOADS

    @property
    def end_ms(self) -> int:
        return self.start_ms + self.length_ms


def aggregate(metric: str, entity: Ints, ts_ms: npt.NDArray[np.int64], values: Floats, count: int) -> Floats:
    """Return one bucket's value of `metric` per entity.

    Args:
        entity: int32 [R], 0 .. count - 1; ts_ms: int64 [R]; values: float64 [R] with NaN where absent. In any order;
            of rows with the same entity and ts the last counts.
    Returns:
        float64 [count], NaN for entities without a value.
    """
    result = np.full(count, np.nan)
    keep = ~np.isnan(values)
    entity, ts_ms, values = entity[keep], ts_ms[keep], values[keep]
    if not len(entity):
        return result
    order = np.lexsort((ts_ms, entity))
    entity, ts_ms, values = entity[order], ts_ms[order], values[order]
    last_of_pair = np.append((entity[1:] != entity[:-1]) | (ts_ms[1:] != ts_ms[:-1]), True)
    entity, values = entity[last_of_pair], values[last_of_pair]
    if BY_NAME[metric].kind is Kind.GAUGE:
        order = np.lexsort((values, entity))
        entity, values = entity[order], values[order]
    starts = np.flatnonzero(np.append(True, entity[1:] != entity[:-1]))
    lengths = np.diff(np.append(starts, len(entity)))
    picked = starts + ((lengths - 1) // 2 if BY_NAME[metric].kind is Kind.GAUGE else lengths - 1)
    result[entity[starts]] = values[picked]
    return result
