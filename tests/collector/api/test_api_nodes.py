"""A GPU next to its peers: both of the same time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from drover_collector.api.nodes import SILENT_MS, GpuMedians
from drover_collector.api.snapshot import ApiSnapshot

NOW = 1_800_000_000_000


def medians(age_ms: int) -> GpuMedians:
    """Of four GPUs in one job, the last without a value, `age_ms` after their bucket's end."""
    bucket = SimpleNamespace(end_ms=NOW - age_ms, gpu={"power_w": np.array([400.0, 500.0, 600.0, np.nan])})
    facts: Any = SimpleNamespace(
        pipeline=SimpleNamespace(buckets=SimpleNamespace(newest=bucket)), now_ms=lambda: NOW,
        jobs=lambda: (np.zeros(4, np.int32), ("j",)),
        index=SimpleNamespace(sku=np.zeros(1, np.int32), gpu_node=np.zeros(4, np.int32)),
    )  # fmt: skip
    return GpuMedians(cast(ApiSnapshot, facts))


@pytest.mark.parametrize(
    ("age_ms", "gpu", "own", "of"),
    [(10_000, 0, 400.0, (550.0, 2)), (10_000, 3, None, (500.0, 3)), (SILENT_MS + 1, 0, None, (0.0, 0))],
)
def test_what_a_gpu_had_in_the_bucket_of_its_peers(
    age_ms: int, gpu: int, own: float | None, of: tuple[float, int]
) -> None:
    found = medians(age_ms)
    assert found.own("power_w", gpu) == own
    assert found.of("power_w", gpu) == of
    assert found.own("gpu_temp_c", gpu) is None, "nobody reported it"
