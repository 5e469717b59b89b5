"""Fixtures for tests of several packages.

The embedded engine holds one path per process, and pytest runs all tests in one process: they share the path of
`store_root`, and each test has a database of its own in it. A test that needs a second engine starts a process.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from drover_collector.store import Store

pytest_plugins = ["testbed.system"]

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def store_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of this process' embedded engine, which one open store keeps running: each start of it costs more."""
    from drover_collector.store import Store

    root = tmp_path_factory.mktemp("store")
    kept = Store.open(f"chdb://{root}?database=kept")
    yield root
    kept.close()


@pytest.fixture
def store_url(store_root: Path) -> str:
    """The url of a database that no other test uses."""
    return f"chdb://{store_root}?database=t{next(_numbers)}"


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """An empty store."""
    from drover_collector.store import Store, StoreError

    opened = Store.open(store_url, retention_days=3650)  # tests have times of their own
    yield opened
    with contextlib.suppress(StoreError):  # the test may have closed it
        opened._clients.command("DROP DATABASE " + store_url.partition("=")[2])  # or every later start would load it
    opened.close()
