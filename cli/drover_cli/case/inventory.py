"""`inventory.jsonl` of a case: what nodes reported about themselves; a line is all that one node reported at a time."""

from __future__ import annotations

from pathlib import Path

from drover_cli.case.lines import CaseError, read_jsonl
from drover_collector.fleet.index import FleetIndex
from drover_core.times import from_iso


def read_inventories(path: Path, index: FleetIndex, notes: list[str]) -> list[tuple[int, str, dict[str, str]]]:
    """(time in ms, node, flat map as agents send it), in order of time; none where the file is missing.

    Raises:
        CaseError: a line that cannot be used.
    """
    if not path.exists():
        return []
    found, strangers = [], 0
    for number, row in read_jsonl(path):
        try:
            ts_ms, node, facts = from_iso(row["ts"]), str(row["node"]), row["inventory"]
            reported = {str(key): str(value) for key, value in facts.items() if value is not None}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CaseError(
                f'{path}: line {number}: expected {{"ts", "node", "inventory": {{key: value}}}} ({error!r})'
            ) from None
        if node in index.node_number:
            found.append((ts_ms, node, reported))
        else:
            strangers += 1
    if strangers:
        notes.append(f"inventory.jsonl: {strangers} lines of nodes that fleet.json does not list were left out")
    return sorted(found, key=lambda row: row[0])
