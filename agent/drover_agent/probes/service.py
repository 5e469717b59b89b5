"""The probe service, `drover-agent probe --serve FOLDER`: works off the agent's requests, one by one, and ends.

systemd starts it, in a unit of its own, when a request lies there (`agent/systemd/drover-probe.path`). It runs what the
table of probes has and nothing else. It stays a little for the next request, so that systemd need not start it often.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from drover_agent.probes import Level, eligible, hold, plan, trying
from drover_agent.probes.exchange import AFTER_JOB, JOB, ExchangeFolder, Outcome, ProbeAnswer, ProbeAsk, is_id, read_ask
from drover_agent.probes.inlet import inlet_c
from drover_agent.probes.runner import Report, Request, Runner

log = logging.getLogger(__name__)

LINGER_S = 10.0  # systemd gives up on a unit that is started ten times a minute
LOOK_S = 0.5
KILLED = "the probe service was killed in the middle of it, or the node went down"
TEXT = 2_000


class Busy(Exception):  # noqa: N818  # it is no error of anything
    """Another service works on the folder."""


class Service:
    """`stop` may be called from a signal handler or another thread.

    Args:
        scratch: where the disk's probes write, "" for the temporary folder. shared: a folder of storage that nodes
            share, "" for none.
    """

    def __init__(self, folder: Path, scratch: str = "", shared: str = "") -> None:
        self._folder, self._scratch, self._shared = ExchangeFolder(folder), scratch, shared
        self._stop = threading.Event()
        self._runner: Runner | None = None

    def stop(self) -> None:
        self._stop.set()
        if runner := self._runner:
            runner.stop("the probe service was asked to stop")

    def serve(self, linger_s: float = LINGER_S) -> None:
        """Serve until asked to stop, or until no request came for `linger_s`.

        Raises:
            Busy: another one is at it. OSError: the folder cannot be used.
        """
        self._folder.make()
        with self._alone():
            self._clear_up()
            idle_s = time.monotonic()
            while not self._stop.is_set() and time.monotonic() - idle_s < linger_s:
                for id_ in self._folder.ids(self._folder.requests):
                    if self._stop.is_set():
                        return
                    self._take(id_)
                    idle_s = time.monotonic()
                self._stop.wait(min(LOOK_S, linger_s))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        descriptor = os.open(self._folder.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy("another probe service works on it") from None
            yield
        finally:
            os.close(descriptor)

    def _clear_up(self) -> None:
        """What a service that was killed had taken: its result, unless it had written that."""
        for id_ in self._folder.ids(self._folder.taken):
            if (self._folder.results / f"{id_}.json").exists():
                (self._folder.taken / f"{id_}.json").unlink(missing_ok=True)
            else:
                self._finish(ProbeAnswer(id_, Outcome.CRASHED, KILLED, ts_ms=now_ms()))

    def _take(self, id_: str) -> None:
        path, taken = self._folder.requests / f"{id_}.json", self._folder.taken / f"{id_}.json"
        if not is_id(id_):
            log.warning("%s: no name of a request; removed", path)
            path.unlink(missing_ok=True)
            return
        try:
            path.rename(taken)
        except FileNotFoundError:  # the agent withdrew it
            return
        try:
            ask = read_ask(taken)
            if ask.id != id_:
                raise ValueError(f"its id is {ask.id[:100]!r}")
            ask.check()
        except (ValueError, OSError) as error:
            self._finish(ProbeAnswer(id_, Outcome.REFUSED, f"this is no request: {error}"[:TEXT], ts_ms=now_ms()))
            return
        log.info("request %s: %s, level %s", id_, ", ".join(ask.probes) or "all", ask.level)
        self._finish(self._answer(ask))

    def _finish(self, answer: ProbeAnswer) -> None:
        """The result first, then the request goes."""
        log.info("request %s: %s %s", answer.id, answer.end, answer.detail)
        self._folder.put(self._folder.results, answer.id, answer)
        (self._folder.taken / f"{answer.id}.json").unlink(missing_ok=True)

    def _answer(self, ask: ProbeAsk) -> ProbeAnswer:
        if ask.protection != JOB:
            return self._probed(ask)
        try:
            held = hold.join(ask.id, self._stop.wait)
        except hold.NotHeldError as error:
            return ProbeAnswer(ask.id, Outcome.REFUSED, str(error), ask.level, now_ms())
        with contextlib.closing(held):  # only now may the job end
            return self._probed(ask, held.lost)

    def _probed(self, ask: ProbeAsk, wanted: Callable[[], str] = str) -> ProbeAnswer:
        def refused(outcome: Outcome, why: str) -> ProbeAnswer:
            return ProbeAnswer(ask.id, outcome, why[:TEXT], ask.level, now_ms())

        level = Level(ask.level)
        names = plan.names_of(ask.probes, level)
        if not plan.has_torch():
            return refused(Outcome.REFUSED, plan.NO_TORCH)
        try:
            found = eligible.look()
        except eligible.DriverError as error:
            return refused(Outcome.REFUSED, str(error))
        gpus, left_out = eligible.choose(found, ask.gpus)
        named = [slot for slot in ask.gpus if slot in left_out]
        if named or (found.gpus and not gpus):
            slot = named[0] if named else next(iter(left_out))
            return refused(Outcome.REFUSED, f"GPU {slot}: {left_out[slot]}")
        if ask.id.startswith(AFTER_JOB) and left_out:
            # Figures taken next to another job's traffic would prove a healthy GPU slow.
            slot, why = next(iter(left_out.items()))
            return refused(Outcome.REFUSED, f"GPU {slot}: {why}; after a job a node is probed as a whole")
        if ask.group is not None and left_out:  # its nodes must all be alike
            slot, why = next(iter(left_out.items()))
            return refused(Outcome.REFUSED, f"GPU {slot}: {why}; a group has all GPUs of its nodes")
        limit_s = ask.timeout_s or plan.timeout_s(names, level, len(gpus))
        if ask.asked_ms and now_ms() > ask.asked_ms + limit_s * 1000:
            return refused(Outcome.EXPIRED, f"it waited for longer than its timeout of {limit_s:g} s")
        request = dataclasses.replace(
            plan.request_of(names, level, gpus, limit_s, self._scratch),
            shared=self._shared,
            inlet_c=inlet_c()[0] if ask.inlet_c is None and gpus and "soak" in names else ask.inlet_c,
            group=dataclasses.asdict(ask.group) if ask.group else None,
        )
        report = self._run(request, gpus, wanted)
        return ProbeAnswer(
            ask.id, report.end, report.detail[:TEXT], ask.level, now_ms(), report.probe, report.gpu,
            round(report.seconds, 3), tuple(report.results),
            tuple(f"GPU {slot}: {why}" for slot, why in left_out.items()), tuple(report.devices), report.tries,
        )  # fmt: skip

    def _run(self, request: Request, gpus: Sequence[eligible.Gpu], wanted: Callable[[], str]) -> Report:
        try:
            return trying.run(request, gpus, self._started, log.info, wanted=wanted)
        finally:
            self._runner = None

    def _started(self, runner: Runner) -> None:
        self._runner = runner
        if self._stop.is_set():
            runner.stop("the probe service was asked to stop")


def now_ms() -> int:
    return time.time_ns() // 1_000_000
