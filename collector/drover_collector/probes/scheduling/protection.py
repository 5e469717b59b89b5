"""Keep new jobs off a node while it is probed: its scheduler drained it, or runs Drover's own job there.

Between a look at an idle node and a probe on it a job may start; only the scheduler itself can shut that out. So where
one is configured nothing is sent to a node that is in service, but what a person asks for by hand.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drover_collector.actions.base import ActError, Actuator, AwayError, LaterError, Service
from drover_collector.probes.scheduling.slurm_holds import HoldJob
from drover_collector.probes.settings import HoldConfig
from drover_core.model.events import NodeOutage, ProbeOrder, ProbeReason
from drover_core.model.probe_figures import LEVELS

log = logging.getLogger(__name__)

DRAINED, JOB, HAND, NONE = "drained", "job", "hand", "none"
OF_DRAINED = frozenset({ProbeReason.VALIDATE, ProbeReason.REPAIRED})
MORE_S = 300.0  # beyond what a level may take: of a job, for the request to arrive and its result to be reported
AGAIN_MS = 30_000  # between two tries of a job that Slurm does not take
REMEDY = "drain it, or let a preemptible job hold it: [probes.slurm] in the collector's settings (docs/how-to/probe.md)"


class Holds(Protocol):
    """`holding.SlurmHolds`."""

    def look(self) -> Mapping[str, HoldJob]: ...

    def submit(self, order: str, node: str, minutes: int) -> None: ...

    def end(self, job: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Given:
    """Of one order: `word` once its node is safe (drained, job, hand; none where no scheduler is known). `job`: its id.

    Else `wait`, what is waited for, or `never`, why it will not be sent. `away`: the scheduler does not answer.
    """

    word: str = ""
    job: str = ""
    wait: str = ""
    never: str = ""
    away: bool = False


class Protection:
    """Used in one thread at a time; its questions to schedulers take up to seconds.

    Args:
        actuator_of: who has a node and may be asked; None: nobody. scheduled: whether the settings name a scheduler
            that has the node, though Drover may not act there. holds: None: Drover runs no jobs. may: raises StoreError
            when this collector is not the active one any more; called before each job.
    """

    def __init__(
        self,
        actuator_of: Callable[[str], Actuator | None],
        scheduled: Callable[[str], bool],
        holds: Holds | None = None,
        held_by_us: Callable[[str], bool] = lambda _: True,
        config: HoldConfig | None = None,
        may: Callable[[], object] = lambda: None,
        now_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        self._actuator_of, self._scheduled, self._holds, self._may = actuator_of, scheduled, holds, may
        self._ours, self._wait_ms, self._now_ms = held_by_us, (config or HoldConfig()).wait_s * 1000, now_ms
        self.needed = True  # by some node
        self._jobs: Mapping[str, HoldJob] | None = None  # None: not looked yet
        self._seen = False  # the last look was well
        self._asked: dict[str, int] = {}  # order -> when its job was submitted
        self._refusals: dict[str, tuple[int, int, str]] = {}  # order -> when first and last, and what was said

    def refused(self, node: str) -> str:
        """Why Drover asks for no probe of a node in service by itself; "" where it may. Asks nobody."""
        if self._holds is not None and self._ours(node):
            return ""
        return f"{node} is in service: {REMEDY}" if self._scheduler(node) else ""

    def look(self, orders: Collection[str], *, unsent: bool = True) -> None:
        """Read the current jobs, and end those of orders that are no longer open.

        Args:
            orders: all that are open. unsent: some are not sent yet; else only what has a job is of interest.
        Raises:
            ActError: they could not be seen or ended. StoreError.
        """
        if self._holds is None or not (unsent or self._jobs is None or self._jobs):
            return
        self._seen = False
        self._jobs = self._holds.look()
        self._seen = True
        self._refusals = {order: of for order, of in self._refusals.items() if order in orders}
        self._asked = {order: ms for order, ms in self._asked.items() if order in orders}
        for job in self._jobs.values():
            if job.order not in orders and not job.ends:
                log.info("job %s is ended: order %s is over", job.id, job.order)
                self._may()
                self._holds.end(job.id)

    def stands(self, order: ProbeOrder) -> bool:
        """Whether one that was to be sent to a drained node may be sent (again) now. Of a job the node itself knows."""
        if self._alone(order):
            return True
        if order.protection != DRAINED or (actuator := self._actuator_of(order.node)) is None:
            return True
        try:
            return actuator.observe(order.node).service is Service.DRAINED
        except ActError as error:
            log.warning("order %s is not sent again: %s", order.id, error)
            return False

    @property
    def held(self) -> Collection[str]:
        """Orders with a job."""
        return self._jobs or {}

    def of(self, order: ProbeOrder, *, busy: bool) -> Given:
        """
        Args:
            busy: a job is known there.
        Raises:
            StoreError.
        """
        if self._alone(order):
            return Given(DRAINED)
        service, person = Service.IN, order.why is ProbeReason.PERSON and not order.group
        if (actuator := self._actuator_of(order.node)) is not None:
            try:
                service = actuator.observe(order.node).service
            except ActError as error:
                if person:  # who need not wait for a scheduler that is away, or has no such node
                    return Given(HAND)
                later = isinstance(error, LaterError)
                return Given(wait=str(error), away=True) if later else Given(never=f"not sent: {error}")
        if service is Service.DRAINED:
            return Given(DRAINED)
        if service is Service.DRAINING and not person:
            return Given(wait="jobs still run there, it drains")
        if order.why in OF_DRAINED and actuator is not None:
            return Given(never="not sent: it is not drained any more")
        if order.why in OF_DRAINED:
            known = not self._scheduled(order.node)
            return Given(NONE) if known else Given(never="not sent: in observe mode nobody asks if it is drained still")
        if person and (busy or service is not Service.IN):
            return Given(HAND)
        if self._holds is not None and self._ours(order.node):
            return self._by_job(order, self._holds)
        if order.why is ProbeReason.PERSON:
            return Given(HAND)
        return Given(never=f"not sent: {self.refused(order.node)}") if self._scheduler(order.node) else Given(NONE)

    def _alone(self, order: ProbeOrder) -> bool:
        """Return whether all GPUs of an order are out of service alone: nothing new starts on them."""
        return order.why in OF_DRAINED and bool(order.gpus) and self.isolated(order.node, order.gpus)

    def isolated(self, node: str, gpus: Sequence[int]) -> bool:  # noqa: ARG002  # where no GPU is ever out alone
        """Return whether each of these GPUs of a node is out of service alone."""
        return False

    def _scheduler(self, node: str) -> bool:
        return self._actuator_of(node) is not None or self._scheduled(node)

    def _by_job(self, order: ProbeOrder, holds: Holds) -> Given:
        job = (self._jobs or {}).get(order.id)
        if job is not None and job.runs:
            return Given(JOB, job.id)
        since_ms = self._asked.get(order.id)
        if not self._seen:  # it may have one already
            return Given(wait="the scheduler's jobs cannot be seen", away=True)
        if job is None:
            if since_ms is not None:
                return Given(never="given up: its scheduler's job was ended before the probe began")
            return self._submit(order, holds)
        since_ms = self._asked.setdefault(order.id, self._now_ms())
        if self._now_ms() - since_ms >= self._wait_ms:
            return Given(
                never=f"given up: job {job.id} had not begun within {self._wait_ms / 1000:.0f} s ({job.reason})"
            )
        return Given(wait=f"job {job.id} is {job.state.lower()}")

    def _submit(self, order: ProbeOrder, holds: Holds) -> Given:
        """A refusal may be of this node alone (not in the partition): others are not kept waiting for it."""
        now_ms = self._now_ms()
        first_ms, last_ms, text = self._refusals.get(order.id, (now_ms, -AGAIN_MS, ""))
        if now_ms - last_ms < AGAIN_MS:
            return Given(wait=text)
        self._may()
        try:
            holds.submit(order.id, order.node, math.ceil((LEVELS[order.level] + MORE_S) / 60))
        except ActError as error:
            text = f"its job cannot be submitted: {error}"
            if isinstance(error, AwayError):
                return Given(wait=text, away=True)
            if not isinstance(error, LaterError) or now_ms - first_ms >= self._wait_ms:
                return Given(never=text)
            self._refusals[order.id] = first_ms, now_ms, text
            return Given(wait=text)
        self._asked[order.id] = now_ms
        return Given(wait="its job is submitted")


class GpuProtection(Protection):
    """Of a fleet in which single GPUs go out of service while their nodes stay.

    Args:
        out: returns the outage of the GPU that went out of a node's slot alone; None: it is not out.
        board: returns the UUID of the GPU that is in this slot now; "": not known. Any thread may call both.
    """

    def __init__(
        self, out: Callable[[str, int], NodeOutage | None], board: Callable[[str, int], str], *args: Any
    ) -> None:
        super().__init__(*args)
        self._out, self._board = out, board

    def isolated(self, node: str, gpus: Sequence[int]) -> bool:
        return all(self._is_out(node, gpu) for gpu in gpus)

    def _is_out(self, node: str, slot: int) -> bool:
        """Return whether the very board that went out is in its slot: after a boot another one may work there."""
        outage = self._out(node, slot)
        return outage is not None and outage.gpu is not None and outage.gpu.uuid == self._board(node, slot)


class Unprotected(Protection):
    """Of a fleet whose scheduler, if it has one, is not known here."""

    def __init__(self) -> None:
        super().__init__(lambda _: None, lambda _: False)
        self.needed = False
