"""Collectors that kill themselves with -9 at a write of the store: `-m testbed.killed_collector run --config FILE`.

For each line on stdin one is started, with those arguments: its process id goes to stdout, and when it has ended its
exit status. Each is the collector unchanged, and a process of its own; it is forked from this one, which has imported
everything and started nothing: else half of a test's time would be imports. Only the store's writes are wrapped, here.

The file that KILL_AT of its environment names says where it dies: `METHOD WORD before` or `METHOD WORD after`, such as
`write_actions done before`: WORD is the state of what is written. It is read at each write; no file: nobody dies.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path

from drover_collector.main import main
from drover_collector.store.repositories.actions import ActionTable, OutageTable
from drover_collector.store.repositories.decisions import DecisionTable
from drover_core.model.events import Action, Decision, NodeOutage

WORD: dict[type, Callable[..., str]] = {
    Action: lambda action: action.state,
    Decision: lambda decision: decision.outcome,
    NodeOutage: lambda duty: duty.stage,
}

TABLES: dict[str, type] = {"write_decisions": DecisionTable, "write_actions": ActionTable, "write_duties": OutageTable}


def wrap(at: Path, name: str, table: type) -> None:
    write = table.write  # type: ignore[attr-defined]  # each of TABLES has it

    def die(rows: Sequence[object], when: str) -> None:
        points = {f"{name} {WORD[type(row)](row)} {when}" for row in rows}
        if at.exists() and at.read_text() in points:
            os.kill(os.getpid(), signal.SIGKILL)

    @wraps(write)
    def wrapped(self: object, rows: Sequence[object]) -> None:
        die(rows, "before")
        write(self, rows)
        die(rows, "after")

    table.write = wrapped


def serve(arguments: Sequence[str]) -> None:
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            os.close(0)
            os.dup2(2, 1)
            os._exit(main(arguments))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    for method, written in TABLES.items():
        wrap(Path(os.environ["KILL_AT"]), method, written)
    serve(sys.argv[1:])
