"""The agent's side of probes: hands a collector's requests to the probe service and its results to the spool.

The agent runs no probe itself. Every request ends in a closing result, whatever becomes of it: also where no service is
installed, where it is killed, and when the agent is restarted meanwhile (all that is awaited lies in the folder).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from drover_agent.atomic_file import write_whole
from drover_agent.probes.base import JOIN_S, Group
from drover_agent.probes.exchange import (
    LONGEST_S,
    ExchangeFolder,
    Outcome,
    ProbeAnswer,
    ProbeAsk,
    is_id,
    read_answer,
    read_ask,
)
from drover_agent.spool.disk_thread import DiskThread
from drover_core.model.events import ProbeResult, to_json
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

POLL_S = 1.0  # while something is awaited
IDLE_S = 10.0  # otherwise: the gate asks for probes after a job without the agent (`gate --deep`)
TAKEN_S = 60.0  # for the service to take a request while it has nothing else to do
OVERDUE_S = 300.0  # beyond the longest that a request may run, for its result
MAX_WAITING = 16  # requests in the folder
REMEMBERED = 500  # ids of requests that are done
NO_SERVICE = f"no probe service on this node took it within {TAKEN_S:g} s: is drover-probe.path enabled?"
TOO_MANY = f"{MAX_WAITING} requests wait on this node already"

AddRecord = Callable[[int, pb.Record], None]


class ProbeRelay:
    """Run `run`; give requests to `ask`.

    Args:
        root: `probes` in the spool's folder. add_record: takes a record for the spool, with its time.
        kept: returns when all records added so far are stored. now_ms: the wall clock.
    """

    def __init__(
        self,
        root: Path,
        node: str,
        add_record: AddRecord,
        kept: Callable[[], Awaitable[None]],
        now_ms: Callable[[], int],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._node, self._add_record, self._kept = ExchangeFolder(root), node, add_record, kept
        self._now_ms, self._monotonic = now_ms, monotonic
        self._disk = DiskThread()
        self._done: list[str] | None = None  # None: not read yet
        self._since: dict[str, float] = {}  # when a request was first seen waiting, or the service was last seen busy
        self._taken_s: dict[str, float] = {}
        self._kept_ids: list[str] = []  # the spool has them, the folder still has too
        self._trouble = ""

    async def run(self, requests: asyncio.Queue[pb.ProbeRequest]) -> None:
        """Until cancelled."""
        try:
            while True:
                awaited = await self._look()
                try:
                    async with asyncio.timeout(POLL_S if awaited else IDLE_S):
                        request = await requests.get()
                except TimeoutError:
                    continue
                await self._ask(request)
        finally:
            self._disk.close()

    async def _ask(self, request: pb.ProbeRequest) -> None:
        try:
            refusal = await self._disk.submit(lambda: self._put(request))
        except OSError as error:
            refusal = f"the request cannot be written: {error.strerror or error}"
        if refusal:
            self._add_results([ProbeAnswer(request.id[:100], Outcome.REFUSED, refusal, request.level[:80])])

    def _put(self, request: pb.ProbeRequest) -> str:
        """Why it is refused; "" when it waits for the service, or is known already."""
        if not is_id(request.id):
            return "its id must be 1 to 100 letters, digits, dots, dashes and underscores"
        self._folder.make()
        if request.id in self._read_done() or any(request.id in self._folder.ids(f) for f in self._folders()):
            log.info("probe request %s is known already", request.id)
            return ""
        ask = ask_of(request, self._now_ms())
        try:
            ask.check()
        except ValueError as error:
            return str(error)
        if len(self._folder.ids(self._folder.requests)) >= MAX_WAITING:
            return TOO_MANY
        self._folder.put(self._folder.requests, ask.id, ask)
        log.info("probe request %s: %s, level %s", ask.id, ", ".join(ask.probes) or "all", ask.level)
        return ""

    def _folders(self) -> tuple[Path, Path, Path]:
        """Return the folders through which a request moves, in that order."""
        return self._folder.requests, self._folder.taken, self._folder.results

    # ---- results

    async def _look(self) -> bool:
        """Hand on what has come; whether anything is still awaited."""
        try:
            answers, waits = await self._disk.submit(self._read)
            if answers:
                self._add_results(answers)
                await self._kept()
                self._kept_ids += [answer.id for answer in answers]
            if self._kept_ids:
                await self._disk.submit(lambda: self._finish(self._kept_ids))
                self._kept_ids = []
        except OSError as error:
            if str(error) != self._trouble:
                log.warning("%s: %s", self._folder.root, error.strerror or error)
            self._trouble = str(error)
            return True
        self._trouble = ""
        return waits

    def _read(self) -> tuple[list[ProbeAnswer], bool]:
        """(results, whether others are awaited). A result that was handed on before a kill is only removed."""
        # List the folders in the order in which a request moves: one that moves meanwhile is found twice. In any other
        # order it could be found in none, and the relay would stop looking for its result.
        waiting, taken, finished = (self._folder.ids(folder) for folder in self._folders())
        answers = []
        done = self._read_done()
        for id_ in finished:
            if id_ in self._kept_ids:
                continue
            if id_ in done or not is_id(id_):
                self._forget(id_)
                continue
            try:
                answer = read_answer(self._folder.results / f"{id_}.json")
            except ValueError as error:
                answer = ProbeAnswer(id_, Outcome.CRASHED, f"the probe service's result cannot be read: {error}"[:500])
            answers.append(
                answer if answer.id == id_ else ProbeAnswer(id_, Outcome.CRASHED, "another request's result")
            )
        found = {answer.id for answer in answers}
        answers += [answer for answer in self._given_up(waiting, taken, busy=bool(found)) if answer.id not in found]
        return answers, bool(self._since or self._taken_s)

    def _given_up(self, waiting: list[str], taken: list[str], *, busy: bool) -> list[ProbeAnswer]:
        """Return answers for requests that nobody takes, and for those that were taken and never answered."""
        now_s = self._monotonic()
        self._taken_s = {id_: self._taken_s.get(id_, now_s) for id_ in taken}
        self._since = {id_: now_s if taken or busy else self._since.get(id_, now_s) for id_ in waiting}
        answers = []
        for id_ in [id_ for id_, since_s in self._since.items() if now_s - since_s > TAKEN_S]:
            with contextlib.suppress(FileNotFoundError):  # taken just now
                (self._folder.requests / f"{id_}.json").unlink()
                answers.append(ProbeAnswer(id_, Outcome.NOT_TAKEN, NO_SERVICE))
        for id_, since_s in self._taken_s.items():
            if now_s - since_s > self._limit_s(id_):
                answers.append(ProbeAnswer(id_, Outcome.CRASHED, "no result of it came from the probe service"))
        return answers

    def _limit_s(self, id_: str) -> float:
        try:
            return (read_ask(self._folder.taken / f"{id_}.json").timeout_s or LONGEST_S) + OVERDUE_S
        except (ValueError, OSError):
            return LONGEST_S + OVERDUE_S

    def _add_results(self, answers: Iterable[ProbeAnswer]) -> None:
        """To the spool."""
        for answer in answers:
            for result in results_of(answer, self._node, self._now_ms()):
                body = pb.ProbeResult(request_id=answer.id, json=to_json(result))
                self._add_record(result.ts_ms, pb.Record(probe_result=body))
            log.info("probe request %s: %s %s", answer.id, answer.end, answer.detail)

    def _finish(self, ids: list[str]) -> None:
        """What the spool has on disk goes from the folder."""
        done = [*(id_ for id_ in self._read_done() if id_ not in ids), *ids][-REMEMBERED:]
        write_whole(self._folder.root / "done.json", json.dumps(done).encode())
        self._done = done
        for id_ in ids:
            self._forget(id_)

    def _forget(self, id_: str) -> None:
        for folder in (self._folder.taken, self._folder.results):
            (folder / f"{id_}.json").unlink(missing_ok=True)
        self._taken_s.pop(id_, None)

    def _read_done(self) -> list[str]:
        if self._done is None:
            try:
                self._done = [str(id_) for id_ in json.loads((self._folder.root / "done.json").read_bytes())]
            except FileNotFoundError:
                self._done = []
            except (OSError, ValueError, TypeError) as error:
                log.warning("%s: %s; results may be sent twice", self._folder.root / "done.json", error)
                self._done = []
        return self._done


def ask_of(request: pb.ProbeRequest, now_ms: int) -> ProbeAsk:
    """Return what the service is asked; it holds `now_ms` too, so that it can get too old."""
    return ProbeAsk(
        request.id, tuple(request.probes), request.level or "quick", tuple(request.gpus), float(request.timeout_s),
        now_ms, request.inlet_c if request.HasField("inlet_c") else None,
        _group(request.group) if request.HasField("group") else None, request.protection,
    )  # fmt: skip


def _group(sent: pb.ProbeGroup) -> Group:
    return Group(
        sent.address, sent.port, sent.node, sent.nodes, tuple(sent.names), tuple(sent.addresses), sent.key,
        sent.join_s or JOIN_S,
    )  # fmt: skip


def results_of(answer: ProbeAnswer, node: str, now_ms: int) -> list[ProbeResult]:
    """The figures, then the closing one, which alone has an `end`. The ids are the same whenever they are made."""
    ts_ms = answer.ts_ms or now_ms
    models = {device.slot: device.model for device in answer.devices}
    all_models = ", ".join(dict.fromkeys(models.values()))
    found = []
    for number, result in enumerate(answer.results):
        found.append(
            ProbeResult(
                f"{answer.id}/{number}", node, result.gpu, result.probe, ts_ms, result.ok, result.value, result.unit,
                result.detail, answer.id, result.peer, result.spread, result.repeats, answer.level,
                device=models.get(result.gpu, all_models),
            )
        )  # fmt: skip
    detail = "; ".join([*([answer.detail] if answer.detail else []), *(f"left out: {gpu}" for gpu in answer.left_out)])
    found.append(
        ProbeResult(
            f"{answer.id}/end", node, answer.gpu, answer.probe, ts_ms, None, None, "", detail[:4000], answer.id,
            level=answer.level, end=answer.end, seconds=answer.seconds, device=models.get(answer.gpu, all_models),
            tries=answer.tries,
        )
    )  # fmt: skip
    return found
