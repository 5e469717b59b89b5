"""A store that fails: a full disk, a server that is away, questions that take long."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

from drover_collector.store import Store, StoreError
from drover_collector.store.clickhouse import client as engine
from drover_collector.store.clickhouse import pool as pool_module
from drover_core.metrics.catalog import Scope
from testbed.fleets import T0, everything, gpu_row, index_of, samples

ROW = samples(Scope.GPU, [(gpu_row(0, 0), T0, {"power_w": 300.0})])


def test_below_the_reserve_nothing_is_inserted_and_above_it_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.entities.write(everything())
    with monkeypatch.context() as patched:
        patched.setattr(engine, "KEEP_FREE_BYTES", 1 << 62)
        with pytest.raises(StoreError, match=r"MB are free on its disk, .* are needed; make room"):
            store.samples.write(ROW)
        assert store.buckets.read(index_of(), T0).gpu_rows.sum() == 0  # reads go on
    store.samples.write(ROW)
    assert store.buckets.read(index_of(), T0).gpu_rows.sum() == 1


@pytest.mark.parametrize("fails", ["SELECT throwIf(number = 50) AS n FROM numbers(100) SETTINGS max_block_size = 10",
    "SELECT sleepEachRow(0.1) AS n FROM numbers(9) SETTINGS max_execution_time = 0.3, max_block_size = 1"])  # fmt: skip
def test_what_a_query_wrote_before_it_failed_is_not_in_the_next_result(store: Store, fails: str) -> None:
    """The engine keeps it with the client, which the next query of this thread takes again."""
    for _ in range(2):
        with pytest.raises(StoreError, match="refused"):
            store.clients.rows(fails)
        assert store.clients.rows("SELECT 7 AS n") == [{"n": 7}]
        with pytest.raises(StoreError, match="refused"), store.clients.use() as client:
            client.query_arrow(fails)
        with store.clients.use() as client:
            assert client.command("SELECT 7") == 7


class Broken:
    """A client that fails, also when it is asked again."""

    def __init__(self) -> None:
        self.closed = False

    def query_arrow(self, *_: object, **__: object) -> None:
        raise DatabaseError("cut off")

    def raw_query(self, _: str) -> bytes:
        return b"left over 1\n"

    def close(self) -> None:
        self.closed = True


def test_a_client_that_is_not_cleared_is_replaced() -> None:
    made: list[Broken] = []
    clients = engine.Clients(lambda: made.append(Broken()) or made[-1])  # type: ignore[func-returns-value]  # one line
    for _ in range(engine.CLIENTS + 1):  # none of them is lost to the pool
        with pytest.raises(StoreError, match="cut off"):
            clients.rows("SELECT 1")
    assert [client.closed for client in made] == [True] * (engine.CLIENTS + 1)


FILL = """
import sys
sys.path.insert(0, sys.argv[2])
import numpy as np
from drover_collector.store import Store, StoreError
from drover_core.metrics.catalog import Scope, of_scope
from testbed.fleets import T0, everything, gpu_row, random_values
from drover_collector.store import SampleBatch

store = Store.open(f"chdb://{sys.argv[1]}/store", retention_days=3650)
store.entities.write(everything())
metrics, rng, rows = of_scope(Scope.GPU), np.random.default_rng(0), 10_000
ids = np.full(rows, gpu_row(0, 0).entity_id, np.uint64)
taken = refused = 0
while refused < 20:
    values = {m.name: random_values(rng, m, rows, 0) for m in metrics}
    try:
        store.samples.write(SampleBatch.of_values(Scope.GPU, ids, T0 + taken * rows + np.arange(rows), values))
        taken += 1
    except StoreError:
        refused += 1
found = store.clients.rows("SELECT count() AS n, sum(isNotNull(power_w)) AS p FROM gpu_samples FINAL")
assert found == [{"n": taken * rows, "p": taken * rows}], (taken, found)
assert taken > 3
store.close()
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 20 MB more than the reserve."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = engine.KEEP_FREE_BYTES + (20 << 20)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.system
def test_a_disk_that_fills_up_costs_nothing_that_was_taken(small_disk: Path) -> None:
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(small_disk), tests], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("error", [OSError("connection refused"), pa.ArrowInvalid("cut off"), MemoryError()])
def test_whatever_goes_wrong_with_the_store_is_a_store_error(error: Exception) -> None:
    """Anything else would look like a fault of the data, which would then be refused for ever."""

    def make() -> object:
        raise error

    with pytest.raises(StoreError):
        engine.Clients(make).rows("SELECT 1")
    with pytest.raises(StoreError):
        engine.Clients(make).insert("t", pa.table({"a": [1]}))


def test_inserts_do_not_wait_for_questions(store: Store) -> None:
    held, done = threading.Barrier(engine.CLIENTS + 1), threading.Event()

    def ask() -> None:
        with store.clients.use():
            held.wait(120)
            done.wait(120)

    asking = [threading.Thread(target=ask) for _ in range(engine.CLIENTS)]
    for thread in asking:
        thread.start()
    held.wait(120)
    try:
        writing = threading.Thread(target=store.samples.write, args=(ROW,))
        writing.start()
        writing.join(20)
        assert not writing.is_alive()
    finally:
        done.set()
        for thread in asking:
            thread.join()


def test_who_waits_for_a_client_gets_another_in_place_of_a_discarded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CLOSED_S", 0.01)
    pool = pool_module.Pool(Broken, 1)
    first, taken = pool.take(), []
    waiting = threading.Thread(target=lambda: taken.append(pool.take()))
    waiting.start()
    pool.discard(first)
    waiting.join(120)
    assert taken and taken[0] is not first
    closing = threading.Thread(target=pool.close)
    closing.start()
    pool.discard(taken[0])
    closing.join(120)
    assert not closing.is_alive()


def test_who_waits_for_a_client_learns_that_the_store_closed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CLOSED_S", 0.01)
    pool = pool_module.Pool(lambda: pytest.fail("not made"), 0)
    errors: list[str] = []

    def wait() -> None:
        with pytest.raises(StoreError) as raised:
            pool.take()
        errors.append(str(raised.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    pool.close()
    waiting.join(20)
    assert errors == ["the store is closed"]
