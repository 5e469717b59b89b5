"""`probes.jsonl` of a case: what was measured, who asked for it, and what it proved; a line each.

{"result": ProbeResult, "key": its configuration, "serial", "uuid", "received_ms"}
{"order": ProbeOrder}       each version
{"verdict": ProbeVerdict}   a replay judges by these; the others are kept and imported
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover_cli.case.lines import CaseError, read_jsonl
from drover_collector.fleet.index import FleetIndex
from drover_collector.store.repositories.probes import Key
from drover_core.model.events import (
    ProbeOrder,
    ProbeResult,
    ProbeVerdict,
    from_dict,
)

if TYPE_CHECKING:
    from drover_collector.store import ProbeRow, Store


@dataclass(slots=True)
class CaseProbes:
    results: list[ProbeRow] = field(default_factory=list)
    orders: list[ProbeOrder] = field(default_factory=list)
    verdicts: list[ProbeVerdict] = field(default_factory=list)

    def write(self, store: Store) -> int:
        """Into a store; gives how many lines. An order that had not ended is left out: it would be sent to its node.

        Raises:
            StoreError.
        """
        ended = {order.id for order in self.orders if order.state in ("done", "failed")}
        orders = [order for order in self.orders if order.id in ended]
        store.probes.results.write(self.results)
        store.probes.orders.write(orders)
        store.probes.verdicts.write(self.verdicts)
        return len(self.results) + len(orders) + len(self.verdicts)


def read_probes(path: Path, index: FleetIndex, notes: list[str]) -> CaseProbes:
    """None without the file; nodes that fleet.json does not list are left out and reported.

    Raises:
        CaseError: a line that cannot be used.
    """
    found = CaseProbes()
    if not path.exists():
        return found
    strangers = 0
    for number, row in read_jsonl(path):
        try:
            node = _take(found, row, index)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CaseError(
                f'{path}: line {number}: expected {{"result"}}, {{"order"}} or {{"verdict"}} of a probe ({error!r})'
            ) from None
        strangers += node not in index.node_number
    if strangers:
        notes.append(f"probes.jsonl: {strangers} lines of nodes that fleet.json does not list were left out")
    return found


def _take(found: CaseProbes, row: dict[str, Any], index: FleetIndex) -> str:
    """The node that a line is of."""
    from drover_collector.store import ProbeRow

    if "result" in row:
        result = from_dict(ProbeResult, row["result"])
        made = ProbeRow(
            result, from_dict(Key, row.get("key") or {}), str(row.get("serial", "")), str(row.get("uuid", "")),
            int(row.get("received_ms", result.ts_ms)),
        )  # fmt: skip
        if result.node in index.node_number:
            found.results.append(made)
        return result.node
    if "order" in row:
        order = from_dict(ProbeOrder, row["order"])
        if order.node in index.node_number:
            found.orders.append(order)
        return order.node
    verdict = from_dict(ProbeVerdict, row["verdict"])
    if verdict.node in index.node_number:
        found.verdicts.append(verdict)
    return verdict.node
