"""Stand in for a scheduler: close, open, reset and reboot simulated nodes, without touching real ones.

It answers on a Unix socket, one request a connection: a line of JSON as docs/how-to/own-scheduler.md gives it to
`act.command` and the reboot and reset commands, then a line of JSON: {"status": 0, "said": ...}. `status` is the
exit status for the program that asked; `said` is an object for its standard output, or a sentence where it failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drover_simulator.fleet import SimulatedFleet
from drover_simulator.operations import (
    BOOT_S,
    LEAVE_S,
    RESET_S,
    Operations,
)
from drover_simulator.sku import SimulationError

log = logging.getLogger(__name__)

NAME = "demo scheduler (a stand-in, no real nodes)"
ANSWER_S = 10.0
DONE, FAILED = 0, 1


class RefusedError(Exception):
    """The stand-in refuses a request; the message is one line."""


@dataclass(frozen=True, slots=True)
class _Closed:
    mark: str
    reason: str
    by: str


class StandIn:
    """The closed nodes, by whom and why. Call it only from the loop that steps the fleet."""

    def __init__(self, fleet: SimulatedFleet, operations: Operations) -> None:
        self._fleet, self._operations = fleet, operations
        self._closed: dict[str, _Closed] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return `status` and `said` for one request."""
        try:
            act, node = str(request.get("act")), str(request.get("node"))
            if node not in self._fleet.hardware.number:
                raise RefusedError(f"{node!r} is not a node of this simulation")
            if act == "observe":
                return {"status": DONE, "said": self._state(node)}
            return {"status": DONE, "said": {"detail": f"{NAME}: {self._do(act, node, request)}"}}
        except RefusedError as error:
            return {"status": FAILED, "said": f"{NAME}: {error}"}

    def _state(self, node: str) -> dict[str, Any]:
        jobs, closed = self._operations.jobs_on(node), self._closed.get(node)
        if closed is not None:
            service = "draining" if jobs else "drained"
            return {"service": service, "reason": closed.reason, "by": closed.by, "jobs": jobs}
        silent = node in self._fleet.silent_nodes()
        return {"service": "down" if silent else "in", "reason": "it does not answer" if silent else "", "jobs": jobs}

    def _do(self, act: str, node: str, request: Mapping[str, Any]) -> str:
        if act in ("drain", "isolate"):
            return self._close(node, request, at_once=act == "isolate")
        if act == "resume":
            if (closed := self._closed.get(node)) is not None:
                if closed.mark != str(request.get("mark")):
                    raise RefusedError(f"{node} was closed for another reason: {closed.reason}")
                del self._closed[node]
            self._operations.open(node)
            return f"{node} gets jobs again"
        if act in ("advise", "unadvise"):
            return f"noted for {node}; simulated jobs do not choose their nodes"
        if act == "reset":
            self._operations.reset(node)
            return f"the simulated GPUs of {node} are reset, which takes {RESET_S:.0f} s"
        if act == "reboot":
            self._operations.reboot(node)
            return f"{node}, a simulated node, reboots, which takes {BOOT_S:.0f} s"
        raise RefusedError(f"it does not know the act {act!r}")

    def _close(self, node: str, request: Mapping[str, Any], *, at_once: bool) -> str:
        mark = str(request.get("mark"))
        closed = self._closed.get(node)
        if closed is not None and closed.mark != mark:
            raise RefusedError(f"{node} is closed already: {closed.reason}")
        self._closed[node] = _Closed(mark, str(request.get("reason")), str(request.get("by") or "drover"))
        self._operations.close(node, at_once=at_once)
        jobs = self._operations.jobs_on(node)
        if jobs and not at_once:
            return f"{node} gets no new jobs; {', '.join(jobs)} leaves it within {LEAVE_S:.0f} s"
        return f"{node} gets no new jobs"


@contextlib.asynccontextmanager
async def listening(stand_in: StandIn, socket: Path) -> AsyncIterator[None]:
    """Answer on `socket` inside the context.

    Raises:
        SimulationError: the socket cannot be opened.
    """

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                request = json.loads(await reader.readline())
                answer = stand_in.answer(request if isinstance(request, dict) else {})
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError, TimeoutError) as error:
            log.error("stand-in scheduler: a request was not answered: %s", error)
        finally:
            writer.close()

    try:
        server = await asyncio.start_unix_server(talk, socket)
    except OSError as error:
        raise SimulationError(f"--scheduler {socket}: {error.strerror or error}; choose another path") from None
    async with server:
        yield
