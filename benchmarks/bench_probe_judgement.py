"""Judgement of probe results on simulated fleets: recall and false fails, ours and five simpler rules side by side.

Fleets of 8 to 4,096 GPUs of one model: 70 % as sold, 15 % with a power cap (GEMM 8 % lower by design), 15 % on PCIe x8
boards. Each of three figures has its own bad GPUs. `mixed`: each bad GPU with its own defect; `batch`: all of a fleet
with the same one; `heavy`: as mixed, but healthy GPUs lie apart with heavy tails (Student's t, 5 degrees). Recall is
the mean over fleets, so that a few large ones do not decide it; false fails count GPUs. Scoring seeds 0-99; thresholds
were tuned on 1000-1999 (`--tune N`). One JSON line; a table on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from drover_collector.probes.judging.judgement import BUDGET, judge
from drover_collector.probes.judging.measurements import Measurement
from drover_collector.probes.judging.references import reference
from drover_collector.store.repositories.probes import Key

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SHARES = (0.0, 0.01, 0.05, 0.10, 0.20, 0.30)
DEFECTS = (0.02, 0.03, 0.05, 0.10, 0.20)
# figure -> natural spread between units, from and to (GEMM: SC'22; links and memory run at fixed clocks)
SPREADS = {"gemm_bf16": (0.01, 0.03), "hbm_copy": (0.003, 0.01), "pcie_h2d": (0.003, 0.01)}
LEVEL = 0.03  # between fleets: cooling, libraries, hosts
REPEAT = 0.004  # spread of the repeats of one measurement
REPEATS = 20
SOLD, CAPPED, NARROW = (700.0, 16), (500.0, 16), (700.0, 8)  # limit of power in W, width of PCIe
KINDS = ("mixed", "batch", "heavy")
CAP = 0.92  # of the GEMM rate, at the cap
SUPERBENCH = 0.05  # variance rule of microsoft/superbench-results: -5 % of the baseline for bandwidths and FLOPS


class Fleet:
    """One figure of one fleet: `values`, the `group` of each, its `defect` (0: healthy)."""

    def __init__(self, rng: np.random.Generator, probe: str, design: NDArray[np.int64], share: float, kind: str):
        size = len(design)
        low, high = SPREADS[probe]
        keys = [
            Key("NVIDIA H200", "570", power_limit_w, ecc=True, pcie_gen=5, pcie_width=width, mig=False)
            for power_limit_w, width in (SOLD, CAPPED, NARROW)
        ]
        published = reference(probe, keys[0])
        assert published is not None
        self.probe, self.keys, self.design, self.expected = probe, keys, design, published.expected
        factor = {"gemm_bf16": (1.0, CAP, 1.0), "pcie_h2d": (1.0, 1.0, 0.5)}.get(probe, (1.0, 1.0, 1.0))
        bad = rng.permutation(size) < round(share * size)
        sizes = np.full(size, rng.choice(DEFECTS)) if kind == "batch" else rng.choice(DEFECTS, size)
        self.defect = np.where(bad, sizes, 0.0)
        units = rng.standard_t(5, size) / (5 / 3) ** 0.5 if kind == "heavy" else rng.normal(0, 1, size)
        natural = np.exp(rng.uniform(low, high) * units + rng.normal(0, REPEAT / REPEATS**0.5, size))
        level = self.expected * np.exp(rng.normal(0, LEVEL))
        self.values: Floats = level * np.array(factor)[design] * natural * (1 - self.defect)

    def groups(self) -> Iterable[Bools]:
        """GPUs alike by what this figure depends on."""
        apart = {"gemm_bf16": self.design == 1, "pcie_h2d": self.design == 2}.get(self.probe)
        yield from [np.ones(len(self.design), bool)] if apart is None else [apart, ~apart]


def iterated_mean(values: Floats, threshold: float) -> Bools:
    """SuperBench's `fix_threshold` baseline: the mean of what is not `threshold` below it, until nothing changes."""
    kept = np.ones(len(values), bool)
    while True:
        low: Bools = values < (1 - threshold) * values[kept].mean()
        if not (low & kept).any():
            return low
        kept &= ~low


def similar(values: Floats) -> Bools:
    """SuperBench's paper, single values: the medoid; what is less than 0.95 similar is out; again. Slower ones fail."""
    kept = np.ones(len(values), bool)
    while True:
        medoid = np.sort(values[kept])[kept.sum() // 2]
        out: Bools = np.minimum(values, medoid) / np.maximum(values, medoid) < 0.95
        if not (out & kept).any():
            return out & (values < medoid)
        kept &= ~out


def per_group(rule: Callable[[Floats], Bools]) -> Callable[[Fleet], Bools]:
    def judged(fleet: Fleet) -> Bools:
        failed = np.zeros(len(fleet.values), bool)
        for group in fleet.groups():
            if group.any():
                failed[group] = rule(fleet.values[group])
        return failed

    return judged


RULES: dict[str, Callable[[Fleet], Bools]] = {
    "mean-5% per model": lambda fleet: iterated_mean(fleet.values, SUPERBENCH),
    "mean-5% per config": per_group(lambda values: iterated_mean(values, SUPERBENCH)),
    "mean-10% per config": per_group(lambda values: iterated_mean(values, 0.10)),
    "similarity 0.95": per_group(similar),
    "reference-5%": lambda fleet: fleet.values < (1 - SUPERBENCH) * fleet.expected,
}


def ours(fleets: list[Fleet]) -> list[tuple[Bools, Bools]]:
    """(failed, not judged) of each figure."""
    found = judge(
        Measurement(f"n{i // 8}", i % 8, fleet.probe, value, fleet.keys[design], spread=REPEAT, repeats=REPEATS)
        for fleet in fleets
        for i, (value, design) in enumerate(zip(fleet.values.tolist(), fleet.design.tolist(), strict=True))
    )
    index = {fleet.probe: k for k, fleet in enumerate(fleets)}
    failed = [np.zeros(len(fleet.values), bool) for fleet in fleets]
    unknown = [np.zeros(len(fleet.values), bool) for fleet in fleets]
    for verdict in found.verdicts:
        m = verdict.measurement
        at = int(m.node[1:]) * 8 + (m.gpu or 0)
        failed[index[m.probe]][at] = verdict.ok is False
        unknown[index[m.probe]][at] = verdict.ok is None
    return list(zip(failed, unknown, strict=True))


class Tally:
    """By (rule, figure, share, defect): of each fleet, how many GPUs, how many failed, how many were not judged."""

    def __init__(self) -> None:
        self.fleets: dict[tuple[str, str, float, float], list[tuple[int, int, int]]] = defaultdict(list)

    def add(self, rule: str, fleet: Fleet, share: float, failed: Bools, unknown: Bools | None = None) -> None:
        for defect in (0.0, *DEFECTS):
            those = fleet.defect == defect
            if those.any():
                row = (
                    int(those.sum()),
                    int((failed & those).sum()),
                    int((unknown & those).sum()) if unknown is not None else 0,
                )
                self.fleets[rule, fleet.probe, share, defect].append(row)

    def rows(self, rule: str, defect: float, probe: str, share: float | None) -> list[tuple[int, int, int]]:
        shares = SHARES if share is None else (share,)
        return [row for s in shares for row in self.fleets.get((rule, probe, s, defect), [])]

    def recall(self, rule: str, defect: float, probe: str, share: float | None = None) -> float | None:
        rows = self.rows(rule, defect, probe, share)
        return sum(failed / size for size, failed, _ in rows) / len(rows) if rows else None

    def healthy(self, rule: str, probe: str, share: float | None = None, column: int = 1) -> float:
        """Per 1,000 GPUs: failed (column 1), not judged (2)."""
        rows = self.rows(rule, 0.0, probe, share)
        return 1000 * sum(row[column] for row in rows) / sum(row[0] for row in rows)


def run(seeds: Iterable[int]) -> dict[str, Tally]:
    tallies = {kind: Tally() for kind in KINDS}
    for seed in seeds:
        kind = KINDS[seed % len(KINDS)]
        for share in SHARES:
            rng = np.random.default_rng([seed, round(share * 100)])
            design = rng.choice(3, rng.choice(SIZES), p=(0.7, 0.15, 0.15))
            fleets = [Fleet(rng, probe, design, share, kind) for probe in SPREADS]
            for fleet, (failed, unknown) in zip(fleets, ours(fleets), strict=True):
                tallies[kind].add("drover", fleet, share, failed, unknown)
                for name, rule in RULES.items():
                    tallies[kind].add(name, fleet, share, rule(fleet))
    return tallies


def table(tallies: dict[str, Tally], shares: tuple[float | None, ...]) -> str:
    """Markdown: recall by defect, false fails and what was not judged per 1,000 healthy GPUs of a figure."""
    heads = [
        "fleets",
        "figure",
        "bad",
        "rule",
        *(f"{d:.0%}" for d in DEFECTS),
        "false per 1,000",
        "not judged per 1,000",
    ]
    lines = [_line(heads), "|" + " --- |" * len(heads)]
    for kind, tally in tallies.items():
        for probe in SPREADS:
            for share in shares:
                for rule in ("drover", *RULES):
                    recalls = [tally.recall(rule, d, probe, share) for d in DEFECTS]
                    cells = ["" if r is None else f"{r:.2f}" for r in recalls]
                    false, unknown = (tally.healthy(rule, probe, share, column) for column in (1, 2))
                    bad = "all" if share is None else f"{share:.0%}"
                    lines.append(_line([kind, probe, bad, rule, *cells, f"{false:.2f}", f"{unknown:.2f}"]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def summary(tallies: dict[str, Tally]) -> dict[str, object]:
    out: dict[str, object] = {}
    for kind, tally in tallies.items():
        for rule in ("drover", *RULES):
            out[f"{kind}: {rule}"] = {
                probe: {
                    "recall": {f"{d:.2f}": round(tally.recall(rule, d, probe) or 0.0, 3) for d in DEFECTS},
                    "false_per_1000": round(tally.healthy(rule, probe), 3),
                }
                for probe in SPREADS
            }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tune", type=int, default=0, metavar="N", help="N tuning seeds from 1000 on, not the scoring ones"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    seeds = range(1000, 1000 + min(arguments.tune, 1000)) if arguments.tune else range(100)
    tallies = run(seeds)
    print(table(tallies, SHARES), "", table(tallies, (None,)), sep="\n", file=sys.stderr)
    print(json.dumps({
        "benchmark": "probe_judgement", "seeds": [seeds.start, seeds.stop - 1], "budget_per_1000": BUDGET,
        "seconds": round(time.monotonic() - began, 1), **summary(tallies),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
