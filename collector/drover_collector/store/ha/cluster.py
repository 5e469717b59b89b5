"""Translate the store's statements to those for all servers of a ClickHouse cluster.

Tables of samples and rollups are sharded: `gpu_samples_local` on each server, replicated within its shard, and over it
a Distributed table of the plain name, which all queries and inserts use. The sharding key is the entity id, so the rows
of one entity and time are always on one shard, where a resend collapses, and each shard groups its entities by itself.
All other tables are small and complete on every server, so no query joins over the network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LOCAL = "_local"
KEY = "entity_id"

# With these an ack means durable on a majority of the replicas, and distributed queries answer as one table would.
SETTINGS: dict[str, object] = {
    "distributed_foreground_insert": 1,  # an insert returns when each shard has its rows, not when they are queued
    "insert_quorum": "auto",  # and most replicas of the shard have them
    "insert_quorum_timeout": 30_000,
    "distributed_product_mode": "global",  # a subquery over a Distributed table runs once, not on each shard
    "optimize_skip_unused_shards": 1,  # a question about one entity asks one shard
    "optimize_distributed_group_by_sharding_key": 1,  # GROUP BY entity_id is finished on the shards
    "prefer_localhost_replica": 1,
    "distributed_ddl_output_mode": "throw",  # a server that fails a statement is an error
    "distributed_ddl_task_timeout": 60,
    "allow_nondeterministic_mutations": 1,  # else a replicated table refuses a DELETE with a subquery
    "skip_unavailable_shards": 0,  # an incomplete answer is an error
}

_CREATE = re.compile(r"CREATE TABLE IF NOT EXISTS (\w+) \((.*)\)\s*ENGINE = (\w+)(?:\((.*?)\))?(\s.*|)$", re.DOTALL)
_ON_TABLE = re.compile(r"(ALTER TABLE|OPTIMIZE TABLE|TRUNCATE TABLE|DROP TABLE(?: IF EXISTS)?) (\w+)\b(.*)$", re.DOTALL)
_DESCRIBE = re.compile(r"DESCRIBE TABLE (\w+)$")
_RENAME = re.compile(r"RENAME TABLE (\w+) TO (\w+)$")
_COLUMNS = ("ADD COLUMN", "MODIFY COLUMN", "DROP COLUMN", "RENAME COLUMN")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster. `name`: as in remote_servers of the servers' config; `sharded`: plain names of the sharded tables."""

    name: str
    database: str
    sharded: frozenset[str]

    def statements(self, sql: str) -> list[str]:
        """Return the statements for the cluster. Statements other than DDL are unchanged."""
        if match := _CREATE.match(sql):
            return self._create(*match.groups())
        if match := _ON_TABLE.match(sql):
            return self._on_table(*match.groups())
        if match := _DESCRIBE.match(sql):
            return [f"DESCRIBE TABLE {self._local(match.group(1))}"]
        if match := _RENAME.match(sql):
            return [f"RENAME TABLE {match.group(1)} TO {match.group(2)}{self._on}"]
        return [sql]

    def create_database(self) -> str:
        """Return the statement that creates the database on all servers."""
        return f"CREATE DATABASE IF NOT EXISTS `{self.database}`{self._on} ENGINE = Atomic"

    @property
    def _on(self) -> str:
        return f" ON CLUSTER `{self.name}`"

    def _local(self, table: str) -> str:
        """Return the table that holds the rows of `table`."""
        return f"{table}{LOCAL}" if table in self.sharded else table

    def _create(self, table: str, columns: str, engine: str, arguments: str | None, rest: str) -> list[str]:
        if not engine.endswith("MergeTree"):
            return [
                f"CREATE TABLE IF NOT EXISTS {table}{self._on} ({columns}) ENGINE = {engine}({arguments or ''}){rest}"
            ]
        sharded = table in self.sharded
        # A table that is not sharded has all servers as its replicas, whatever shard they are of.
        path, replica = ("{shard}", "{replica}") if sharded else ("all", "{shard}-{replica}")
        place = f"'/clickhouse/tables/{path}/{self.database}/{table}', '{replica}'"
        given = f", {arguments}" if arguments else ""
        made = [
            f"CREATE TABLE IF NOT EXISTS {self._local(table)}{self._on} ({columns})\n"
            f"ENGINE = Replicated{engine}({place}{given}){rest}"
        ]
        if sharded:
            over = f"Distributed('{self.name}', '{self.database}', '{table}{LOCAL}', {KEY})"
            made.append(f"CREATE TABLE IF NOT EXISTS {table}{self._on} AS {table}{LOCAL} ENGINE = {over}")
        return made

    def _on_table(self, verb: str, table: str, rest: str) -> list[str]:
        if table not in self.sharded and not verb.startswith("DROP"):
            return [f"{verb} {table}{rest}"]  # all servers are its replicas and pass it on
        first = [f"{verb} {self._local(table)}{self._on}{rest}"]
        if table not in self.sharded:
            return first
        over = f"{verb} {table}{self._on}{rest}"
        if verb.startswith("DROP"):
            return [over, *first]
        if verb == "ALTER TABLE" and rest.strip().startswith(_COLUMNS):
            return [*first, over]  # the local table first, so that no query reads a column that does not exist yet
        return first

    @property
    def tables(self) -> str:
        """What replaces `system.tables` of this database: the tables that hold rows, by plain name."""
        return (
            f"(SELECT * REPLACE (replaceRegexpOne(name, '{LOCAL}$', '') AS name) FROM system.tables"
            f" WHERE database = '{self.database}' AND engine LIKE '%MergeTree')"
        )

    @property
    def columns(self) -> str:
        """What replaces `system.columns` of this database: those of the tables that hold rows."""
        return (
            f"(SELECT * REPLACE (replaceRegexpOne(table, '{LOCAL}$', '') AS table) FROM system.columns AS held"
            f" WHERE database = '{self.database}' AND held.table IN"
            f" (SELECT name FROM system.tables WHERE database = '{self.database}' AND engine LIKE '%MergeTree'))"
        )

    @property
    def parts(self) -> str:
        """What replaces `system.parts` of this database: one replica of each shard, by plain name."""
        shards = f"cluster('{self.name}', system.parts)"
        mine = f"active AND database = '{self.database}'"
        return (
            f"(SELECT * REPLACE (replaceRegexpOne(table, '{LOCAL}$', '') AS table) FROM {shards} AS held"
            f" WHERE {mine} AND endsWith(held.table, '{LOCAL}')"  # `table` alone would be the replaced name
            f" UNION ALL SELECT * FROM system.parts WHERE {mine} AND NOT endsWith(table, '{LOCAL}'))"
        )
