"""What a test leaves in its store, no other finds: the fixtures `store` and `databases`, in all three forms."""

from __future__ import annotations

import pytest

from drover_collector.store import Store
from drover_collector.store.schema import codecs
from drover_collector.store.sql import sql_timestamp
from testbed.collected import small_index, write_entities, write_ticks
from testbed.databases import Databases

T0 = 1_800_000_000_000


def name_of(store: Store) -> str:
    return str(store.clients.rows("SELECT currentDatabase() AS name")[0]["name"])


def rows(store: Store) -> dict[str, int]:
    """How many rest in each table, on whatever shard."""
    found = store.clients.rows(
        "SELECT name, total_rows AS n FROM system.tables"
        " WHERE database = currentDatabase() AND engine LIKE '%MergeTree' ORDER BY name"
    )
    return {row["name"]: row["n"] for row in found}


def dirt(store: Store) -> None:
    """Rows in every table."""
    write_entities(store, small_index())
    write_ticks(store, small_index(), T0, T0 + 60_000)
    for name, count in rows(store).items():
        if not count:
            times = store.clients.rows(
                "SELECT name FROM system.columns WHERE database = currentDatabase()"
                f" AND table = '{name}' AND type LIKE '%DateTime64%'"
            )
            kept = ", ".join(f"{sql_timestamp(T0)} AS `{row['name']}`" for row in times)  # else retention may take them
            replace = f" REPLACE ({kept})" if kept else ""
            store.clients.command(f"INSERT INTO {name} SELECT *{replace} FROM generateRandom() LIMIT 3")


def given_back(store: Store, databases: Databases) -> str:
    name = name_of(store)
    store.close()
    databases.give(name)
    return databases.empty()


def opened(store_url: str, name: str) -> Store:
    return Store.open(store_url.rpartition("t")[0] + name, retention_days=3650)


def test_no_row_of_a_test_is_found_by_the_next(store_url: str, databases: Databases) -> None:
    first = Store.open(store_url, retention_days=3650)
    made, name = rows(first), name_of(first)
    databases.opened(name)
    dirt(first)
    assert all(rows(first).values()), rows(first)
    assert given_back(first, databases) == name
    second = opened(store_url, name)
    assert rows(second) == made
    assert {table for table, count in made.items() if count} == {"schema_versions"}
    assert not second.entities.registry.rows()
    dirt(second)
    assert rows(second)["entities"] == 12  # and what was there before takes nothing of what comes
    second.close()


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE drops ADD COLUMN more UInt8",
        "ALTER TABLE drops MODIFY SETTING old_parts_lifetime = 1",
        "DROP TABLE drops SYNC",
        "CREATE TABLE another (n UInt8) ENGINE = Memory",
        "RENAME TABLE drops TO another",
        "INSERT INTO schema_versions SELECT * FROM schema_versions LIMIT 1",
    ],
)
def test_a_database_whose_tables_a_test_changed_is_given_to_no_other(
    store_url: str, databases: Databases, change: str
) -> None:
    store = Store.open(store_url, retention_days=3650)
    name = name_of(store)
    databases.opened(name)
    dirt(store)
    store.clients.command(change)
    assert given_back(store, databases) != name
    assert not any(row["name"] == name for row in databases.clients.rows("SHOW DATABASES"))


def test_a_store_that_wants_other_tables_than_were_made_changes_them(store_url: str, databases: Databases) -> None:
    """Of tables as it wants them it does not ask (`Databases.opening`), which nobody may notice."""
    name = store_url.rpartition("=")[2].rpartition("/")[2]

    def noted() -> int:
        with databases.opening(name):
            store = Store.open(store_url, retention_days=3650)
        databases.opened(name)
        count = rows(store)["schema_versions"]
        kept.append(given_back(store, databases) == name)
        return count

    kept: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codecs, "block_of", lambda metric: 0)
        made = [noted(), noted()]
    assert made[0] == made[1] < noted()
    assert kept == [True, True, False]
