"""The ranking of nodes by their chance to fail within a week, on a public fault trace: AUC, and the share of the next
week's failures in the top 5 %, next to a recency rule and chance. Prints one JSON line.

    python benchmarks/bench_risk.py                     the table in benchmarks/data, of the public trace
    python benchmarks/bench_risk.py --trace FILE        fault_trace.json of InfiniteHBD, or another in its form
    python benchmarks/bench_risk.py --synthetic         a made trace with published rates (faults.synthetic below)
    python benchmarks/bench_risk.py --fit               fits the weights that stand in risk_model.py

The trace: stepfun-ai/InfiniteHBD-Trace (Apache-2.0; SIGCOMM 2025, arXiv 2502.03885), 400 servers with 8 GPUs, 348 days.
Time split: weights are fitted on days 40 to 209, figures are of each day from 209 on, for nodes in service that day.
A model sees only what had begun by then.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drover_collector.detectors.risk.model import (
    DAY_MS,
    HORIZON_DAYS,
    LONG_DAYS,
    SHORT_DAYS,
    Trouble,
    risk_ranking,
)

TABLE = Path(__file__).parent / "data" / "infinitehbd_faults.csv"
SERVERS = 400
DAYS = 348.0
SPLIT = 0.6
FIRST_DAY = 40  # of the fit: before it there is no history to speak of
TOP = 0.05
RIDGE = 5.0
SEED = 1000  # ties, and the synthetic trace

Floats = npt.NDArray[np.float64]
Scores = Callable[[float], Floats]


class Fault(NamedTuple):
    node: int
    start: float  # days
    end: float


def read_table(path: Path) -> list[Fault]:
    """benchmarks/data/infinitehbd_faults.csv: times to 0.01 days; counts per class checked against the trace's own."""
    with path.open() as file:
        rows = [(row["node"], float(row["start_days"]), float(row["end_days"])) for row in csv.DictReader(file)]
    return _numbered(rows)


def read_trace(path: Path) -> list[Fault]:
    """A fault_trace.json: {"node_id", "event_time" in days, "event_type": fault_start | fault_end, "fault_type"}.

    Raises:
        ValueError: an end without its start.
    """
    started: dict[tuple[str, str], float] = {}
    rows = []
    for event in json.loads(path.read_text("utf-8")):
        key = event["node_id"], json.dumps(event["fault_type"], sort_keys=True)
        if event["event_type"] == "fault_start":
            started[key] = event["event_time"]
        elif key in started:
            rows.append((key[0], started.pop(key), event["event_time"]))
        else:
            raise ValueError(f"{path}: {key[0]} at {event['event_time']}: the end of a fault that did not begin")
    return _numbered(rows + [(node, start, DAYS) for (node, _), start in started.items()])


def synthetic(seed: int = SEED) -> list[Fault]:
    """Not the field's: a trace of published rates. 4.18 faults per 1,000 node-days; of those that come back after a
    repair .22 do within a day, .31 within 7 and .43 within 30; repair median 0.85 days, mean 5.5 (log-normal)."""
    rng = np.random.default_rng(seed)
    faults = []
    # Each fault brings .55 more on average by what follows repairs, so that fewer come by themselves.
    for start in np.sort(rng.uniform(0, DAYS, rng.poisson(SERVERS * DAYS * 4.18e-3 * 0.55))):
        node, at = int(rng.integers(SERVERS)), float(start)
        while at < DAYS:
            end = at + float(rng.lognormal(np.log(0.85), 1.93))
            faults.append(Fault(node, at, min(end, DAYS)))
            draw = rng.random()
            if draw > 0.43:
                break
            low, high = (0.0, 1.0) if draw < 0.22 else (1.0, 7.0) if draw < 0.31 else (7.0, 30.0)
            at = end + float(rng.uniform(low, high))
    return sorted(faults, key=lambda fault: fault.start)


def _numbered(rows: Sequence[tuple[str, float, float]]) -> list[Fault]:
    numbers = {name: n for n, name in enumerate(sorted({row[0] for row in rows}))}
    return sorted((Fault(numbers[n], start, end) for n, start, end in rows), key=lambda fault: fault.start)


class Evaluation(NamedTuple):
    """`captured`: of the faults of the next week, on nodes of the top 5 %. `nodes`: of the nodes that fail in it."""

    captured: float
    nodes: float
    auc: float
    faults: int


def evaluate(faults: Sequence[Fault], scores: Scores, days: Sequence[float]) -> Evaluation:
    caught = total = caught_nodes = total_nodes = 0
    aucs: list[float] = []
    rng = np.random.default_rng(SEED)
    for day in days:
        serving, failing = _labels(faults, day)
        if not failing:
            continue
        score = scores(day)[serving]
        order = np.lexsort((rng.random(len(serving)), -score))
        top = {serving[k] for k in order[: max(1, round(TOP * len(serving)))].tolist()}
        caught += sum(node in top for node in failing)
        total += len(failing)
        caught_nodes += len(set(failing) & top)
        total_nodes += len(set(failing))
        aucs.append(_auc(score, np.isin(serving, failing)))
    return Evaluation(
        round(caught / total, 3), round(caught_nodes / total_nodes, 3), round(float(np.mean(aucs)), 3), total
    )


def _labels(faults: Sequence[Fault], day: float) -> tuple[list[int], list[int]]:
    """Nodes in service on a day; of them those whose faults begin within the next week, once for each fault."""
    out = {fault.node for fault in faults if fault.start <= day < fault.end}
    failing = [f.node for f in faults if day < f.start <= day + HORIZON_DAYS and f.node not in out]
    return [node for node in range(SERVERS) if node not in out], failing


def _auc(score: Floats, positive: npt.NDArray[np.bool_]) -> float:
    """That a node that fails stands above one that does not; ties count half."""
    values = np.unique(score, return_inverse=True)[1]
    low = np.bincount(values[~positive], minlength=values.max() + 1)
    below = np.concatenate([[0], np.cumsum(low)[:-1]]) + low / 2
    return float(below[values[positive]].sum() / (positive.sum() * (~positive).sum()))


def by_model(faults: Sequence[Fault]) -> Scores:
    """The product's own function, at its weights."""
    names = [f"{node:03d}" for node in range(SERVERS)]

    def scores(day: float) -> Floats:
        history: dict[str, list[Trouble]] = {}
        for k, fault in enumerate(faults):
            if fault.start <= day:
                trouble = Trouble(str(k), round(fault.start * DAY_MS), None, "fault")
                history.setdefault(names[fault.node], []).append(trouble)
        chances = {risk.node: risk.chance for risk in risk_ranking(history, names, round(day * DAY_MS))}
        return np.array([chances[name] for name in names])

    return scores


def by_recency(faults: Sequence[Fault]) -> Scores:
    """The rule to beat: who came back from repair last."""

    def scores(day: float) -> Floats:
        result = np.full(SERVERS, -np.inf)
        for fault in faults:
            if fault.end <= day:
                result[fault.node] = max(result[fault.node], fault.end)
        return result

    return scores


def features(faults: Sequence[Fault], day: float) -> Floats:
    """[SERVERS, 2]: the model's two memories."""
    result = np.zeros((SERVERS, 2))
    for fault in faults:
        if fault.start <= day:
            age = day - fault.start
            result[fault.node] += np.exp(-age / SHORT_DAYS), np.exp(-age / LONG_DAYS)
    return result


def fit(faults: Sequence[Fault], days: Sequence[float]) -> dict[str, float]:
    """Logistic regression by Newton's method, ridge on standardised features."""
    xs, ys = [], []
    for day in days:
        serving, failing = _labels(faults, day)
        xs.append(features(faults, day)[serving])
        ys.append(np.isin(serving, failing).astype(float))
    x, y = np.concatenate(xs), np.concatenate(ys)
    mean, spread = x.mean(axis=0), x.std(axis=0)
    z = np.column_stack([np.ones(len(x)), (x - mean) / spread])
    ridge = np.diag([0.0, RIDGE, RIDGE])
    weights = np.zeros(3)
    for _ in range(50):
        p = 1 / (1 + np.exp(-z @ weights))
        step = np.linalg.solve((z * (p * (1 - p))[:, None]).T @ z + ridge, z.T @ (p - y) + ridge @ weights)
        weights -= step
        if np.abs(step).max() < 1e-9:
            break
    slopes = weights[1:] / spread
    return {
        "BASE": round(float(weights[0] - slopes @ mean), 2), "SHORT": round(float(slopes[0]), 2),
        "LONG": round(float(slopes[1]), 2),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a fault_trace.json (default: the table in benchmarks/data)")
    parser.add_argument("--synthetic", action="store_true", help="a made trace with published rates")
    parser.add_argument("--fit", action="store_true", help="only fit the weights, on the first part")
    args = parser.parse_args(argv)
    name = "synthetic" if args.synthetic else args.trace.name if args.trace else "InfiniteHBD (public)"
    faults = synthetic() if args.synthetic else read_trace(args.trace) if args.trace else read_table(TABLE)
    split = round(SPLIT * DAYS)
    line: dict[str, object] = {"benchmark": "risk", "trace": name, "faults": len(faults)}
    if args.fit:
        line |= {"fitted_on_days": [FIRST_DAY, split], **fit(faults, range(FIRST_DAY, split - HORIZON_DAYS + 1))}
        print(json.dumps(line))
        return
    days = range(split, int(DAYS) - HORIZON_DAYS)
    ways = {"model": by_model(faults), "recency": by_recency(faults), "random": lambda _: np.zeros(SERVERS)}
    found = {way: evaluate(faults, scores, days) for way, scores in ways.items()}
    known = [f.node for day in days for f in faults if day < f.start <= day + HORIZON_DAYS]
    before = [
        any(g.node == f.node and g.start <= day for g in faults)
        for day in days
        for f in faults
        if day < f.start <= day + HORIZON_DAYS
    ]
    line |= {
        "servers": SERVERS, "days": [days[0], days[-1]], "faults_of_next_weeks": found["model"].faults,
        "on_nodes_that_had_failed_before": round(sum(before) / len(known), 3), "top_share": TOP,
    }  # fmt: skip
    for way, result in found.items():
        line[way] = {"captured": result.captured, "captured_nodes": result.nodes, "auc": result.auc}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
