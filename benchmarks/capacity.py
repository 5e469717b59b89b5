"""What machine a fleet needs: docs/evidence/capacity.md, computed out of figures that other scripts measured.

Each figure stands here with the words of the document that has it and the script that measured it; a test finds these
words there, so that a figure measured again is carried over. Nothing is measured here.

    python benchmarks/capacity.py --write docs/evidence/capacity.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

DAYS = 30  # store.retention_days as shipped
GPUS_A_NODE = 8


@dataclass(frozen=True)
class Figure:
    """
    Attributes:
        value: in `unit`.
        words: of the document, which hold the value.
    """

    value: float
    unit: str
    script: str
    document: str
    words: str


MEASURED = {
    "cores at 1,000 GPUs": Figure(0.06, "cores", "bench_ingest.py", "scale.md", "| 1,000 | 52,000 | 0.06 cores |"),
    "cores at 10,000 GPUs": Figure(0.49, "cores", "bench_ingest.py", "scale.md", "| 10,000 | 501,000 | 0.49 cores |"),
    "cores at 100,000 GPUs": Figure(
        1.19, "cores", "bench_ingest.py", "scale.md", "| 100,000 | 5,021,000 | 1.19 cores |"
    ),
    "CPU of a message": Figure(
        0.24, "ms", "bench_ingest.py", "scale.md", "0.24 ms with 12,500 streams and 1,250 messages a second"
    ),
    "memory at 20,000 GPUs": Figure(
        880, "MiB", "bench_soak.py", "scale.md", "600 MiB in the median, 880 MiB at most for a moment"
    ),
    "memory at 100,000 GPUs": Figure(1.3, "GiB", "bench_ingest.py", "scale.md", "1.3 GiB at most and 1.2 GiB"),
    "memory of a stream": Figure(
        84, "KiB", "bench_ingest.py", "scale.md", "84 KiB a stream against 154, detection's windows included"
    ),
    "disk of a GPU": Figure(1.2, "MB a day", "bench_bytes.py", "storage.md", "about 1.2 MB per GPU and day"),
    "disk of rollups": Figure(0.1, "of the samples", "bench_bytes.py", "storage.md", "Rollups add a tenth"),
    "wire of a node": Figure(0.68, "kB/s", "bench_agent.py", "agent.md", "0.68 kB a second"),
    "CPU of an agent": Figure(11.4, "ms a second", "bench_agent.py", "agent.md", "11.4 ms a second"),
    "memory of an agent": Figure(53.0, "MiB", "bench_agent.py", "agent.md", "53.0 MiB, 27.8 of it anonymous"),
}
SIZES = (64, 1_000, 10_000, 100_000)
BATCH_S = 5.0  # as shipped


def value(name: str) -> float:
    return MEASURED[name].value


def cores(gpus: int) -> float:
    """Of samples, on the line between the measured sizes, and of a message for each node each BATCH_S."""
    known = [(size, value(f"cores at {size:,} GPUs")) for size in (1_000, 10_000, 100_000)]
    if gpus <= known[0][0]:
        samples = known[0][1]
    else:
        (low, a), (high, b) = next(pair for pair in pairwise(known) if gpus <= pair[1][0])
        samples = a + (b - a) * (gpus - low) / (high - low)
    return samples + gpus / GPUS_A_NODE / BATCH_S * value("CPU of a message") / 1000


def memory_gib(gpus: int) -> float:
    """That at 20,000 GPUs for all below, that at 100,000 above; and of each node's stream."""
    base = value("memory at 20,000 GPUs") / 1024 if gpus <= 20_000 else value("memory at 100,000 GPUs")
    return base + gpus / GPUS_A_NODE * value("memory of a stream") / 2**20


def disk_gb(gpus: int) -> float:
    return gpus * value("disk of a GPU") * DAYS / 1000 * (1 + value("disk of rollups"))


def page() -> str:
    lines = [
        "# Capacity: what machine a fleet needs",
        "",
        "Written by `benchmarks/capacity.py --write docs/evidence/capacity.md`: computed from the figures",
        f"below. All rows of the catalog each second, {GPUS_A_NODE} GPUs a node, batches of {BATCH_S:g} s,",
        f"detectors on, samples kept {DAYS} days.",
        "",
        "| GPUs | nodes | cores of the collector | its memory | its disk | network in |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for gpus in SIZES:
        nodes = gpus / GPUS_A_NODE
        lines.append(
            f"| {gpus:,} | {nodes:,.0f} | {cores(gpus):.2f} | {memory_gib(gpus):.1f} GiB | {disk_gb(gpus):,.0f} GB |"
            f" {nodes * value('wire of a node') * 8 / 1000:,.2f} Mbit/s |"
        )
    lines += [
        "",
        "Give twice the cores and the memory: a restart, an outage that is caught up and a store that merges",
        "need more for a while. Above some 50,000 GPUs set `batch_s = 10`, or spread ingest over",
        "[several collectors](../how-to/cluster.md).",
        "",
        f"An agent uses {value('CPU of an agent'):g} ms of CPU a second and {value('memory of an agent'):g} MiB",
        "on its node, and up to `spool.max_bytes` of its disk. Between measured sizes the table is a line;",
        "CPU of samples and messages is added up, not run as one ([scale](scale.md)).",
        "",
        "| figure | value | measured by | stands in |",
        "| --- | ---: | --- | --- |",
    ]
    for name, figure in MEASURED.items():
        stands = f"[{figure.document}]({figure.document})"
        lines.append(f"| {name} | {figure.value:g} {figure.unit} | `benchmarks/{figure.script}` | {stands} |")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="put the page there")
    args = parser.parse_args(argv)
    if args.write:
        args.write.write_text(page(), "utf-8")
    else:
        print(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
