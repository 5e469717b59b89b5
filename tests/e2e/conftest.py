"""Chromium for the tests of one file: to start it takes 3 s of CPU, to open a profile in it almost none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testbed.browsing import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Of a file and not of a worker: while playwright runs, nothing else in its thread can have an event loop."""
    with chromium() as started:
        yield started
