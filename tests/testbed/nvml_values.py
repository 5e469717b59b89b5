"""A value of its own for every metric of every GPU, fed to the C stand-in: each must arrive in its own column."""

from __future__ import annotations

from drover_core.metrics.catalog import (
    BY_NAME,
    Metric,
    Scope,
    Source,
    of_scope,
)
from testbed.nvml import FakeNvml

GPUS = 8
READ_BY_NVML = [m for m in of_scope(Scope.GPU) if "nvml" in m.sources or "gpm" in m.sources]


def _source_of(metric: Metric) -> Source:
    """GPM, where it has the metric. But NVML itself reports a GPU's utilisation."""
    reader = "gpm" if "gpm" in metric.sources and metric.name != "gpu_util_ratio" else "nvml"
    return metric.sources[reader]


def key_of(metric: Metric) -> str:
    return _source_of(metric).key


def scale_of(metric: Metric) -> float:
    return _source_of(metric).scale


BOOLS = [m for m in READ_BY_NVML if m.unit == "bool"]
LINK_COUNTS = [m for m in READ_BY_NVML if key_of(m).startswith("FI_DEV_NVLINK_ERROR")]
LINK_OTHERS = [BY_NAME["nvlink_active_links"], BY_NAME["nvlink_effective_ber"]]
SINGLE = [m for m in READ_BY_NVML if m not in BOOLS + LINK_COUNTS + LINK_OTHERS]


def feed_distinct(fake_nvml: FakeNvml) -> list[dict[str, float]]:
    """Sets a value of its own for every metric of every GPU; returns what must arrive, in catalog units, per GPU."""
    expected: list[dict[str, float]] = [{} for _ in range(GPUS)]
    narrow_first = sorted(SINGLE, key=lambda m: m.high / scale_of(m))
    with fake_nvml.batch():
        for gpu, want in enumerate(expected):
            fake_nvml.set(gpu, "links", "36")
            for place, metric in enumerate(narrow_first):
                raw: float = 1 + GPUS * place + gpu
                if key_of(metric).startswith("GPM") and metric.unit == "ratio":
                    raw = 1 + (GPUS * place + gpu) / 8  # a percentage with a fraction
                fake_nvml.set(gpu, key_of(metric), raw)
                want[metric.name] = raw * scale_of(metric)
                if key_of(metric).startswith("GPM") and metric.unit == "B/s":
                    want[metric.name] = round(want[metric.name] / 1e6) * 1e6  # what the agent sends of a rate
            for place, metric in enumerate(BOOLS):
                on = place == gpu % len(BOOLS)
                fake_nvml.set(gpu, key_of(metric), int(on))
                want[metric.name] = float(on)
            for place, metric in enumerate(LINK_COUNTS):
                counts = [100_000 * (place + 1) + 100 * gpu + link for link in range(36)]
                for link, count in enumerate(counts):
                    fake_nvml.set(gpu, f"{key_of(metric)}.{link}", count)
                want[metric.name] = sum(counts)
            for link in range(36):
                fake_nvml.set(gpu, f"nvmlDeviceGetNvLinkState.{link}", int(link < 20 + gpu))
                # Mantissa in the second byte, negated exponent in the first: link 5 has the worst rate, 7e-(8+gpu).
                word = 7 << 8 | 8 + gpu if link == 5 else 9 << 8 | 30
                fake_nvml.set(gpu, f"FI_DEV_NVLINK_COUNT_EFFECTIVE_BER.{link}", word)
            want["nvlink_active_links"] = 20.0 + gpu
            want["nvlink_effective_ber"] = 7 * 10.0 ** -(8 + gpu)
    return expected
