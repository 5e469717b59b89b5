"""Columns of buckets that are made when they are asked for."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from drover_collector.detectors._lib.window import Buckets
from drover_collector.fleet.buckets import (
    BUCKET_MS,
    Bucket,
    Floats,
    LazyColumns,
)


def test_columns_are_made_once_while_their_bucket_is_the_newest() -> None:
    made: list[str] = []

    def column(name: str) -> Floats:
        made.append(name)
        return np.array([1.0, np.nan])

    def bucket(start_ms: int) -> Bucket:
        none = np.zeros(2, np.int32)
        lazy = LazyColumns({name: partial(column, name) for name in ("power_w", "gpu_temp_c")})
        return Bucket(start_ms, BUCKET_MS, lazy, {}, none, none, none)

    held = Buckets(2)
    held.append(bucket(0))
    (first,) = held.all()
    assert "power_w" in first.gpu and "energy_j" not in first.gpu
    assert (list(first.gpu), len(first.gpu), made) == (["power_w", "gpu_temp_c"], 2, [])
    assert first.gpu["power_w"] is first.gpu["power_w"]
    assert made == ["power_w"]
    assert first.gpu.get("energy_j") is None
    with pytest.raises(KeyError):
        first.gpu["energy_j"]
    held.append(bucket(BUCKET_MS))
    assert first.gpu["power_w"] is not first.gpu["power_w"]
    assert made == ["power_w"] * 3
