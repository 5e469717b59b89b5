"""The thread of one actuator: its actions in order, and looks at the nodes that are out."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from drover_collector.actions.base import (
    HAND,
    ActError,
    Actuator,
    AwayError,
    ForeignError,
    LaterError,
    NodeState,
    Order,
    Service,
)
from drover_collector.actions.node_outage import (
    IDLE,
    ITSELF,
    adopted,
    drained_too,
    is_out,
    kept_by,
    mark_of_duty,
    moved,
    taken_out,
    unjudged,
)
from drover_collector.actions.reconciler import SchedulerReconciler
from drover_collector.actions.return_conditions import Lack, LackError
from drover_collector.actions.return_to_service import held
from drover_collector.store import StoreError
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Health,
    WaitsFor,
    Withheld,
)

if TYPE_CHECKING:
    from drover_collector.actions.dispatcher import ActionDispatcher

log = logging.getLogger(__name__)

WAITS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)  # between tries; the last again and again
STORE_WAIT_S = 1.0
ASK_S = 30.0  # for the answer of another actuator's thread, which may be at a slow command
SURVEY_S = 15.0  # a node is closed by a look at all nodes that is not older
CLOSINGS = frozenset({Act.DRAIN, Act.ISOLATE})
RESETS = frozenset({Act.RESET, Act.REBOOT})
WANTED_STILL = frozenset({Act.ADVISE, Act.DRAIN, Act.ISOLATE})  # not done any more when their incident has ended


@dataclass(slots=True)
class Job:
    action: Action
    due: float = 0.0  # time.monotonic
    tries: int = 0
    detail: str | None = None  # of what is done, and not stored yet
    touched: bool = True  # something may have been done; of what a stop left nobody knows
    lack: Lack | None = None  # of a return that failed: what it waits for
    foreign: bool = False  # it failed because somebody else has the node out
    given_up: str = ""  # why; then it is only looked at whether it has closed its node


class Worker:
    """Runs until asked to stop."""

    def __init__(self, desk: ActionDispatcher, actuator: Actuator, look_s: float) -> None:
        self.actuator = actuator
        self._desk, self._look_s = desk, look_s
        self._jobs: dict[str, Job] = {}
        self._changed = threading.Condition()
        self._asks: deque[tuple[Callable[[], NodeState], Future[NodeState]]] = deque()
        self._stopping = False
        self._away_until = 0.0
        self._away = 0
        self._looks = SchedulerReconciler(desk, actuator)
        self._thread = threading.Thread(target=self._run, name=f"act-{actuator.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def add(self, action: Action, fresh: bool = False) -> None:
        """`fresh`: nothing was ever tried of it."""
        with self._changed:
            self._jobs.setdefault(action.id, Job(action, touched=not fresh))
            self._changed.notify_all()

    def ask(self, call: Callable[[], NodeState]) -> NodeState:
        """What `call` finds at this actuator, in its thread: a client is not for several threads at once.

        Raises:
            LaterError: it does not answer, or is busy for too long. ActError.
        """
        answer: Future[NodeState] = Future()
        with self._changed:
            self._asks.append((call, answer))
            self._changed.notify_all()
        try:
            return answer.result(ASK_S)
        except (TimeoutError, CancelledError):
            raise LaterError(f"{self.actuator.name} was busy for {ASK_S:.0f} s") from None

    def _answer_asks(self) -> None:
        while self._asks:
            call, answer = self._asks.popleft()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(call())
            except Exception as error:  # noqa: BLE001  # it is the asker's
                answer.set_exception(error)

    def waiting(self) -> list[Action]:
        with self._changed:
            return [job.action for job in self._jobs.values()]

    def _run(self) -> None:
        look_at = 0.0
        while True:
            with self._changed:
                if self._stopping:
                    for _, answer in self._asks:
                        answer.cancel()
                    return
                now = time.monotonic()
                job = self._next(now)
                if job is None and now < look_at and not self._asks:
                    times = [max(j.due, self._away_until) for j in self._jobs.values()]
                    self._changed.wait(max(0.0, min([look_at, *times]) - now))
                    continue
            self._answer_asks()
            try:
                if now >= self._away_until and self._looks.first:
                    self._survey()
                elif job is not None:
                    self._work(job)
                else:
                    look_at = time.monotonic() + self._look_s
                    if now >= self._away_until and not self._look():
                        look_at = 0.0  # it goes on when nothing is due
            except Exception as error:  # a defect must neither end the thread nor go unseen
                log.exception("%s: a defect", self.actuator.name)
                self._desk.troubles[self.actuator.name] = f"{self.actuator.name}: {type(error).__name__}: {error}."
                if job is not None:
                    self._later(job, f"a defect: {error}", known=self._needs_no_look(job))
                elif self._looks.first:  # not at once: it would be all that this thread does
                    self._away_until = time.monotonic() + STORE_WAIT_S

    def _next(self, now: float) -> Job | None:
        if now < self._away_until:
            return None
        return next((job for job in self._jobs.values() if job.due <= now), None)

    # ---- one action

    def _work(self, job: Job) -> None:
        desk = self._desk
        if job.given_up:
            self._end_given_up(job)
            return
        try:
            if job.detail is None:
                job.detail = self._act(job)
                self._back()
                desk.step("acted")
            self._finish(job, ActionState.DONE, job.detail)
        except StoreError as error:
            log.warning("%s %s waits: %s", job.action.action, job.action.node, error)
            job.due = time.monotonic() + STORE_WAIT_S
        except LaterError as error:
            if isinstance(error, AwayError):
                self._gone_away(str(error))
            self._later(job, str(error), known=self._closed_so_far(job))
        except ActError as error:
            job.lack = error.lack if isinstance(error, LackError) else None
            job.foreign = isinstance(error, ForeignError)
            if self._closed_so_far(job):
                self._fail(job, str(error))
            else:  # a node that it has closed must not be forgotten with it
                self._later(job, str(error), known=False)

    def _act(self, job: Job) -> str:
        """Carries it out. Raises ActError and its kind, StoreError."""
        desk, action = self._desk, job.action
        desk.store.fence()
        if why := self._over(action):
            state = self.actuator.observe_all([action.node]).get(action.node)
            if state is None or state.mark != _mark(action):
                raise ActError(f"not done: {why}")
        if self._has_closed(action):
            state = self.actuator.observe_all([action.node]).get(action.node)
            if state is not None and state.service is Service.IN:
                raise ActError("not done to its end: somebody else has put the node back since it was closed")
        if action.action in (Act.ADVISE, Act.UNADVISE) and not action.before:
            before = self._before(action)
            if before:
                action = job.action = replace(action, before=before)
                desk.store.actions.write([action])
                desk.step("noted")
        if not self.actuator.repeatable:
            if action.running:
                raise ActError("the collector was stopped while its command ran: nobody knows whether it was done")
            job.action = replace(action, running=True, detail="its command runs", attempts=job.tries + 1)
            desk.store.actions.write([job.action])
            desk.step("begun")
        self._must_not_meet(job.action)
        self._must_be_within_the_caps(job.action)

        def may() -> None:
            desk.store.fence()
            job.touched = True

        order = Order(action.id, action.node, _mark(action), action.why, action.by, may, action.before)
        return self.actuator.do(action.action, order).detail

    def _must_not_meet(self, action: Action) -> None:
        """A reset is asked for of a node without jobs, and may wait for those of others: not done when the node is back
        since, or goes back now. A resume waits for a reset that runs: each is told before it looks for the other. One
        that its probes have earned is not done where news came since.

        Raises:
            ActError, LaterError
        """
        desk, node = self._desk, action.node
        others = desk.under_way(node)  # before the duty: a resume that is not among them any more stands there
        if action.action is Act.RESUME:
            if running := [a for a in others if a.action in RESETS and a.running]:
                raise LaterError(f"its {running[0].action} runs")
            if (lack := desk.withheld(action, others)) is not None:
                raise LackError(lack)
        elif action.action in RESETS:
            duty = desk.duties.get(node)
            back = duty is not None and duty.stage not in IDLE and duty.ts_ms > action.ts_ms
            if back or any(a.action is Act.RESUME for a in others):
                raise ActError(f"not done: {node} was put back since it was asked for, and jobs may run there")
            self._must_be_idle(action)

    def _must_be_within_the_caps(self, action: Action) -> None:
        """Others may have closed nodes since it was decided. Raises LaterError: it waits, and counts as leaving."""
        if action.action not in CLOSINGS or action.forced or self._has_closed(action):
            return
        self._looks.survey(SURVEY_S)
        if why := self._desk.held(action, self._desk.later(action)):
            raise LaterError(f"the guard holds it back: {why}")

    def _must_be_idle(self, action: Action) -> None:
        """A reset is not done to a node that its scheduler may give work: asked now, as what is stored is older.

        Raises:
            LaterError: the scheduler does not answer. ActError: the node is not out by Drover, or jobs run there.
        """
        if action.forced:
            return
        node, duty = action.node, self._desk.duties.get(action.node)
        state = self._desk.observed(node)
        if duty is None or not is_out(duty) or not state.out or state.mark != mark_of_duty(duty):
            said = state.text or str(state.service)
            raise ActError(
                f"not done: its scheduler does not have {node} as drained by Drover ({said}): jobs may run there"
            )
        if state.jobs or state.service is not Service.DRAINED:
            jobs = f": {', '.join(state.jobs)}" if state.jobs else ""
            raise ActError(f"not done: jobs run on {node}{jobs}; ask again when they have ended")

    def _over(self, action: Action) -> str:
        """Why it is not wanted any more; "": it is."""
        if action.action not in WANTED_STILL or not action.incident_id:
            return ""
        incident = self._desk.incidents().get(action.incident_id)
        if incident is None:
            over = self._desk.now_ms() - action.ts_ms > self._desk.config.give_up_s * 1000
        else:
            over = incident.closed_ms is not None
        return "its incident ended before it could be" if over else self._desk.lowered(action)

    def _has_closed(self, action: Action) -> bool:
        """Whether it has closed its node before: an isolation that waits for its last pod, or what a stop broke off."""
        duty = self._desk.duties.get(action.node)
        if action.action not in CLOSINGS or duty is None or not is_out(duty):
            return False
        return mark_of_duty(duty) == _mark(action) and duty.ts_ms >= action.ts_ms

    def _before(self, action: Action) -> str:
        if action.action is Act.ADVISE:
            return self.actuator.before(action.node)
        return self._desk.before_advice(action.node)

    def _finish(self, job: Job, state: ActionState, detail: str) -> None:
        """The duty first: a stop in between leaves the intent, which is then found done."""
        desk, action = self._desk, job.action
        if state is ActionState.DONE:
            self._move(action)
            desk.step("moved")
            if action.action is Act.RESUME:
                self._drop_closings(action)  # before it is stored as done: a stop in between does both again
        elif action.action is Act.RESUME:
            self._not_back(action, detail, job.lack)
        ended = replace(
            action, state=state, detail=detail, ts_ms=desk.now_ms(), attempts=job.tries + 1, running=False,
            foreign=state is ActionState.FAILED and job.foreign,
        )  # fmt: skip
        desk.store.actions.write([ended])
        with self._changed:
            self._jobs.pop(action.id, None)
        desk.step("ended")
        desk.end(ended)

    def _drop_closings(self, resume: Action) -> None:
        """What still waited to be done to a node before it was put back would close it again."""
        with self._changed:
            jobs = [j for j in self._jobs.values() if j.action.node == resume.node and j.action.action in CLOSINGS]
        for job in jobs:
            if job.action.ts_ms <= resume.ts_ms:
                self._fail(job, f"not done to its end: {resume.by} has put the node back")

    def _closed_so_far(self, job: Job) -> bool:
        """An isolation that waits for its last pod, or fails there, has closed the node: that is out. So has a drain
        that the scheduler took before it went away.

        False: that cannot be told now, or not be kept.
        """
        if self._needs_no_look(job):
            return True
        action = job.action
        try:
            state = self.actuator.observe_all([action.node]).get(action.node)
            if state is not None and state.mark == _mark(action):
                self._move(action)
        except (ActError, StoreError) as error:
            log.debug("%s: not known whether it is closed: %s", action.node, error)  # the action's detail says it too
            return False
        return True

    def _needs_no_look(self, job: Job) -> bool:
        """Whether it cannot have closed a node that nobody knows to be out."""
        closes = job.action.action in CLOSINGS and job.touched
        return not closes or is_out(self._desk.duties.get(job.action.node))

    def _end_given_up(self, job: Job) -> None:
        if self._closed_so_far(job):
            self._back()
            out = is_out(self._desk.duties.get(job.action.node))
            self._fail(job, f"{job.given_up}{'; its node is closed' if out else ''}")
        else:
            self._put_off(job)

    def _move(self, action: Action) -> None:
        """The node's duty after an act that is done."""
        desk, now_ms = self._desk, self._desk.now_ms()
        duty = desk.duties.get(action.node)
        if action.action in CLOSINGS and not is_out(duty):
            state = self.actuator.observe_all([action.node]).get(action.node)
            found = None if state is None or not state.out else adopted(state, now_ms)
            if found is not None and mark_of_duty(found) != _mark(action):
                # Closed by a person, or for an incident that the store has lost: a pass proves nothing of that.
                desk.set_duty(found if action.by == ITSELF else replace(found, by=action.by))
                return
            mark = _mark(action)
            desk.set_duty(taken_out(action.node, mark, action.why, action.by, duty, now_ms, desk.config.return_days))
        elif action.action in CLOSINGS and action.by != ITSELF and duty is not None:
            if kept := drained_too(duty, action.by, action.why, now_ms):
                desk.set_duty(kept)
        elif action.action is Act.RESUME and duty is not None and is_out(duty):
            asked_ms = duty.asked_ms if action.by == ITSELF else 0
            desk.set_duty(
                moved(duty, Health.HEALTHY, now_ms, action.why, by=action.by, asked_ms=asked_ms, passed_before=False)
            )

    def _not_back(self, action: Action, why: str, lack: Lack | None) -> None:
        """One that passed and could not be put back is seen as such, not as one whose probes run for ever."""
        duty = self._desk.duties.get(action.node)
        now_ms, withheld = self._desk.now_ms(), lack is not None and lack.withheld is not Withheld.NO
        if lack is not None and not withheld and duty is not None and is_out(duty) and not kept_by(duty):
            finding = lack.waits_for is WaitsFor.FINDING
            self._desk.set_duty(self._desk.contradicted(duty, lack) if finding else held(duty, lack, now_ms))
        elif duty is not None and (duty.stage is Health.VALIDATING or (withheld and not kept_by(duty))):
            if lack is not None and withheld:
                after = moved(
                    duty,
                    Health.DRAINED,
                    now_ms,
                    why,
                    withheld=lack.withheld,
                    incidents=lack.incidents,
                    passed_before=True,
                )
            else:
                after = unjudged(duty, f"it could not be put back: {why}", now_ms)
            self._desk.set_duty(replace(after, asked_ms=0))

    def _later(self, job: Job, why: str, known: bool) -> None:
        """`known`: whether it has closed its node: else it is looked at until that is, however long it takes."""
        desk, action = self._desk, job.action
        job.tries += 1
        told = f"not yet, tried again: {why}"
        if job.detail is None and desk.now_ms() - action.ts_ms > desk.config.give_up_s * 1000:
            told = f"given up after {job.tries} tries: {why}"
            if known:
                self._fail(job, told)
                return
            job.given_up = told
            told += "; whether the node was closed is not known, and looked at until it is"
        self._put_off(job)
        if action.detail != told:
            log.warning("%s %s: %s", action.action, action.node, told)
            job.action = replace(action, running=False, detail=told, attempts=job.tries)
            self._note(job.action)

    def _put_off(self, job: Job) -> None:
        job.due = time.monotonic() + WAITS_S[min(job.tries, len(WAITS_S)) - 1]
        with self._changed:  # behind the others
            self._jobs.pop(job.action.id, None)
            self._jobs[job.action.id] = job

    def _fail(self, job: Job, why: str) -> None:
        log.error("%s %s failed: %s", job.action.action, job.action.node, why)
        try:
            self._finish(job, ActionState.FAILED, why)
        except StoreError as error:
            log.warning("the store: %s", error)
            job.due = time.monotonic() + STORE_WAIT_S

    def _note(self, action: Action) -> None:
        try:
            self._desk.store.actions.write([action])
        except StoreError as error:
            log.warning("the store: %s", error)

    def _gone_away(self, why: str) -> None:
        self._looks.first = self.actuator.surveys
        self._desk.note_stale()
        self._away += 1
        self._away_until = time.monotonic() + WAITS_S[min(self._away, len(WAITS_S)) - 1]
        self._desk.troubles[self.actuator.name] = f"{why}; {len(self._jobs)} actions wait for it."

    def _back(self) -> None:
        self._away, self._away_until = 0, 0.0
        self._desk.troubles.pop(self.actuator.name, None)

    # ---- looks at what is out

    def _survey(self) -> None:
        """Who is out, before anything is done: after a start, and when the scheduler was away."""
        try:
            self._desk.store.fence()
            self._looks.survey()
            self._back()
        except StoreError as error:
            log.debug("no look at all nodes: %s", error)
            self._away_until = time.monotonic() + STORE_WAIT_S
        except AwayError as error:
            self._gone_away(str(error))

    def _look(self) -> bool:
        """False: it was broken off, as an action has come meanwhile: many nodes may be out, and a store be slow."""
        try:
            self._desk.store.fence()
            return self._looks.look({a.node for a in self.waiting()}, self._back, self._has_come)
        except StoreError as error:
            log.debug("no look: %s", error)
        except AwayError as error:
            self._gone_away(str(error))
        except ActError as error:
            self._desk.troubles[self.actuator.name] = f"{self.actuator.name}: {error}."
        return True

    def _has_come(self) -> bool:
        with self._changed:
            return self._stopping or self._next(time.monotonic()) is not None


def _mark(action: Action) -> str:
    return action.incident_id or HAND
