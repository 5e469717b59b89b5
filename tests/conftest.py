"""Fixtures for tests of several packages.

The embedded engine holds one path per process, and all tests of a pytest worker run in its process: they share that of
`store_root`, and each test has a database of its own in it: an emptied one of a test that is over, if that left its
tables as created, or a new one. A test that needs a second engine starts a process.

Tests of the modules in FORMS that use `store` or `store_url` run in several forms of the store: embedded, on a server
over HTTP, and spread over a cluster of two shards; docs/explanation/testing.md says what of the latter two is real.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from testbed.examples import register

if TYPE_CHECKING:
    from drover_collector.store import Store
    from testbed.databases import Databases
    from testbed.front import Front

# A probe's ranks share a core with those of the other workers: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["testbed.system", "testbed.kinds", "testbed.ending"]

register()


def _not_of_a_test_that_is_over(record: logging.LogRecord) -> bool:
    """False for what grpc.aio logs of a loop that is closed.

    It hands the events of every loop of a process to whichever loop runs (grpc/grpc#23377). Each test has a loop of its
    own, so a test would find in its log the last event of a channel that an earlier test closed.
    """
    ended = record.exc_info is not None and str(record.exc_info[1]) == "Event loop is closed"
    return not (ended and "PollerCompletionQueue" in record.getMessage())


logging.getLogger("asyncio").addFilter(_not_of_a_test_that_is_over)

EMBEDDED, SERVER, CLUSTER = "embedded", "server", "cluster"
FORMS = {
    "test_store_samples": (EMBEDDED, CLUSTER),
    "test_store_series": (EMBEDDED, CLUSTER),
    "test_store_history": (EMBEDDED, CLUSTER),
    "test_store_actions": (EMBEDDED, CLUSTER),
    "test_store_jobs": (EMBEDDED, CLUSTER),
    "test_schema": (EMBEDDED, SERVER),
    "test_ingest": (EMBEDDED, SERVER),
    "test_role": (SERVER,),
    "test_databases": (EMBEDDED, SERVER, CLUSTER),
}
# What is of the embedded form, or the same in all: one process holds the store, tables are copied into a new form.
EMBEDDED_ONLY = {
    "test_a_database_whose_tables_a_test_changed_is_given_to_no_other",
    "test_open_twice_in_one_process",
    "test_a_store_of_the_first_version_is_copied",
    "test_a_copy_that_was_stopped_goes_on",
    "test_a_copy_of_a_table_without_versions_doubles_no_row",
    "test_a_copy_that_the_disk_did_not_take_is_no_copy",
    # Of streams and of what a message says, and not of a store.
    "test_bad_batches_are_refused_with_their_reason_and_the_stream_goes_on",
    "test_a_batch_for_another_node",
    "test_before_hello",
    "test_hellos_that_cannot_be",
    "test_the_newer_stream_of_a_node_wins",
    "test_impossible_values_are_absent_and_counted",
    "test_the_age_of_an_error_goes_by_its_boot_and_the_time_since_then",
    "test_only_errors_of_an_earlier_boot_are_history",
    "test_what_cannot_be_stored_is_refused_alone",
}


# To collect makes 400,000 objects that all stay. Each full collection of garbage would look at every one of them, seven
# times while they are made and again in the tests, and each worker of pytest collects all tests.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    forms = FORMS.get(metafunc.module.__name__.rpartition(".")[2])
    if forms and "store_form" in metafunc.fixturenames:
        only = metafunc.function.__name__ in EMBEDDED_ONLY
        metafunc.parametrize("store_form", forms[:1] if only else forms, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spread the files that mostly wait (e2e) evenly among those that mostly compute: the workers take files in order.

    pytest-xdist itself would take the files with the fewest tests last: browsers and Slurms all at once, on idle cores.
    The last of them begins early enough that other workers have something to do until it has ended. Of those that
    compute, the files with long tests come first, for the same reason; last in a run that has to end, as it may not
    come to them (testbed/ending.py).
    """
    ends = config.getoption("end_at") is not None
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [path for path in files if path.parent.name == "e2e"]
    long = {item.path for item in items if item.get_closest_marker("long")}
    computing = sorted((path for path in files if path.parent.name != "e2e"), key=lambda path: (path in long) == ends)
    share = 0.85 * len(computing) / max(len(waiting), 1)
    place = {path: (number + 0.5) * share for number, path in enumerate(waiting)}
    place |= {path: float(number) for number, path in enumerate(computing)}
    place |= {
        path: 0.8 * len(computing) for path in computing if path.name == "test_kubernetes.py"
    }  # it waits for a build
    items[:] = [item for path in sorted(files, key=place.__getitem__) for item in files[path]]


@pytest.fixture(scope="session")
def kept_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Keeps this process' embedded engine running: each start of it costs more than an open store does."""
    from drover_collector.store import Store
    from testbed.databases import ask_engine_once

    ask_engine_once()
    kept = Store.open(f"chdb://{tmp_path_factory.mktemp('store')}?database=kept")
    yield kept
    kept.close()


@pytest.fixture(scope="session")
def store_root(kept_store: Store) -> Path:
    """The folder of this process' embedded engine."""
    assert kept_store.clients.home is not None
    return kept_store.clients.home[0]


@pytest.fixture(scope="session")
def server_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    from testbed.front import front

    with front(tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.fixture(scope="session")
def cluster_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    from testbed.front import front

    with front(tmp_path_factory.mktemp("cluster"), "--cluster", "drover") as made:
        yield made


@pytest.fixture(scope="session")
def embedded_databases(kept_store: Store, store_root: Path) -> Databases:
    from drover_collector.store.clickhouse import embedded
    from testbed.databases import Databases

    return Databases(kept_store.clients, store_root, lambda name: name in embedded._held[store_root].databases)


@pytest.fixture(scope="session")
def server_databases(server_front: Front) -> Iterator[Databases]:
    with server_front.databases() as made:
        yield made


@pytest.fixture(scope="session")
def cluster_databases(cluster_front: Front) -> Iterator[Databases]:
    with cluster_front.databases() as made:
        yield made


@pytest.fixture
def store_form(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", EMBEDDED))


@pytest.fixture
def databases(store_form: str, request: pytest.FixtureRequest) -> Databases:
    made: Databases = request.getfixturevalue(f"{store_form}_databases")
    return made


@pytest.fixture
def store_url(
    store_form: str, databases: Databases, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The url of a database that no other test uses at the time; without `store`, of one that is not made yet."""
    name = databases.empty() if "store" in request.fixturenames else databases.new()
    if store_form == EMBEDDED:
        return f"chdb://{request.getfixturevalue('store_root')}?database={name}"
    if store_form == CLUSTER:
        from drover_collector.store import Store

        monkeypatch.setattr(Store, "open", functools.partial(Store.open, cluster="drover"))
    server: Front = request.getfixturevalue(f"{store_form}_front")
    return server.url(name)


@pytest.fixture
def store(store_url: str, databases: Databases) -> Iterator[Store]:
    """An empty store."""
    from drover_collector.store import Store

    name = store_url.rpartition("=")[2].rpartition("/")[2]
    with databases.opening(name):
        opened = Store.open(store_url, retention_days=3650)  # tests have times of their own
    databases.opened(name)
    yield opened
    opened.close()
    databases.give(name)
