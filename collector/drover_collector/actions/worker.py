"""The thread of one actuator: it stores intents, carries out its actions in order, and reconciles what is out."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from drover_collector.actions.base import (
    ActError,
    Actuator,
    AwayError,
    ForeignError,
    GpuIsolator,
    LaterError,
    NodeState,
    NotAloneError,
    Service,
    gpu_of,
    own_mark,
)
from drover_collector.actions.context import ActionContext
from drover_collector.actions.gpu_outages import isolated
from drover_collector.actions.gpu_returns import Returns
from drover_collector.actions.node_outage import (
    CLOSINGS,
    IDLE,
    ITSELF,
    RESETS,
    adopted,
    drained_too,
    is_out,
    moved,
    taken_out,
)
from drover_collector.actions.reconciler import SchedulerReconciler
from drover_collector.actions.return_conditions import Lack, LackError
from drover_collector.actions.saving import LOOK_S as SAVING_LOOK_S
from drover_collector.actions.saving import JobSaver, SavingError
from drover_collector.store import StoreError
from drover_core.model.events import Act, Action, ActionState, Decision, Health, NodeOutage
from drover_core.model.saving import sentence

log = logging.getLogger(__name__)
T = TypeVar("T")

WAITS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)  # between tries; the last again and again
STORE_WAIT_S = 1.0
ASK_S = 30.0  # for the answer of another actuator's thread, which may be at a slow command
SURVEY_S = 15.0  # a node is closed on a survey of all nodes that is no older
WANTED_STILL = frozenset({Act.ADVISE, Act.DRAIN, Act.ISOLATE, Act.ISOLATE_GPU})  # dropped when their incident has ended


@dataclass(slots=True)
class Job:
    action: Action
    due: float = 0.0  # time.monotonic
    tries: int = 0
    detail: str | None = None  # of what is done, and not stored yet
    touched: bool = True  # something may have been done; after a stop nobody knows
    lack: Lack | None = None  # of a return that failed: what it waits for
    foreign: bool = False  # it failed because somebody else has the node out
    withdrawn: bool = False  # by a person: what its jobs have answered so far is no outcome
    given_up: str = ""  # why; then the only question left is whether it has closed its node


class Dispatcher(Protocol):
    """What a worker asks of all workers together."""

    def begin(self, decision: Decision, why: str) -> None:
        """Store the intent of a decision to act, and queue it. Raises StoreError."""

    def intend(self, node: str, act: Act, seed: str, incident: str, why: str, by: str) -> Action:
        """Store an intent and queue it. Raises StoreError."""

    def under_way(self, node: str) -> list[Action]:
        """Return the actions on a node that have not ended, of all actuators."""

    def observe(self, node: str) -> NodeState:
        """Return a node as its scheduler sees it now. Raises LaterError, ActError."""

    def end(self, action: Action) -> None:
        """Publish the stored outcome of an action."""


def waits_to_save(action: Action) -> bool:
    """Return whether an action takes a node out once its jobs have saved themselves."""
    return action.saving is not None and action.action in CLOSINGS


class Worker:
    """Runs until asked to stop."""

    def __init__(self, context: ActionContext, actuator: Actuator, dispatcher: Dispatcher, returns: Returns) -> None:
        self.actuator = actuator
        self._context, self._dispatcher, self._returns = context, dispatcher, returns
        self._decisions: deque[tuple[Decision, str]] = deque()  # whose intents are not stored yet, and why
        self._begin_at = 0.0  # when the next intent is stored, time.monotonic
        self._jobs: dict[str, Job] = {}
        self._changed = threading.Condition()
        self._questions: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = False
        self._away_until = 0.0
        self._away = 0
        self._reconciler = SchedulerReconciler(
            context, actuator, dispatcher.intend, returns.nodes.validate, returns.gpus
        )
        self._saver = JobSaver(context, actuator)
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

    def add_decision(self, decision: Decision, why: str) -> None:
        """Queue a decision to act, whose intent this thread stores. Returns at once."""
        with self._changed:
            self._decisions.append((decision, why))
            self._changed.notify_all()

    @property
    def waiting_decisions(self) -> int:
        """How many wait for their intents to be stored."""
        return len(self._decisions)

    def add(self, action: Action, fresh: bool = False) -> None:
        """Queue an action whose intent is stored. `fresh`: nothing of it was ever tried."""
        with self._changed:
            if action.id not in self._jobs:
                self._jobs[action.id] = Job(action, touched=not fresh)
                self._context.outages.add_closing(action)
                self._context.gpus.add_isolation(action)
            self._changed.notify_all()

    def ask(self, call: Callable[[], T]) -> T:
        """Return what `call` finds, made in this actuator's thread: its client is not for several threads at once.

        Raises:
            LaterError: it does not answer, or is busy for too long. ActError.
        """
        answer: Future[T] = Future()
        with self._changed:
            self._questions.append((call, answer))
            self._changed.notify_all()
        try:
            return answer.result(ASK_S)
        except (TimeoutError, CancelledError):
            answer.cancel()  # else it would be done later, though its asker reads that it was not
            raise LaterError(f"{self.actuator.name} was busy for {ASK_S:.0f} s") from None

    def _answer_questions(self) -> bool:
        """Return whether there were any."""
        were_any = bool(self._questions)
        while self._questions:
            call, answer = self._questions.popleft()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(call())
            except Exception as error:  # noqa: BLE001  # it is raised where the question was asked
                answer.set_exception(error)
        return were_any

    def waiting(self) -> list[Action]:
        """Return the actions that have not ended."""
        with self._changed:
            return [job.action for job in self._jobs.values()]

    def withdraw(self, node: str, by: str, why: str) -> list[str]:
        """End what still waits for the jobs of a node to save themselves; return its ids.

        It happens between two looks of this actuator's thread, so nothing is carried out meanwhile.

        Raises:
            LaterError: it is not known whether the node is closed. ActError: the policy asked for it.
        """
        return self.ask(lambda: self._withdraw(node, f"not done: {by} has withdrawn it: {why}"))

    def _withdraw(self, node: str, text: str) -> list[str]:
        with self._changed:
            jobs = [job for job in self._jobs.values() if job.action.node == node and waits_to_save(job.action)]
        for job in jobs:
            if not self._find_closed(job):
                raise LaterError(f"whether {node} is closed already is not known: {self.actuator.name} does not answer")
        left = [job for job in jobs if job.detail is None and not self._has_closed(job.action)]
        own = [job.action for job in left if job.action.by == ITSELF]
        if own:
            raise ActError(f"{own[0].action} is the policy's, for incident {own[0].incident_id}: it stays")
        for job in left:
            job.withdrawn = True
            self._fail(job, text)
        return [job.action.id for job in left]

    def _run(self) -> None:
        reconcile_at = 0.0
        while True:
            with self._changed:
                if self._stopping:
                    for _, answer in self._questions:
                        answer.cancel()
                    return
                now = time.monotonic()
                job, begins = self._next(now), bool(self._decisions) and now >= self._begin_at
                if job is None and not begins and now < reconcile_at and not self._questions:
                    times = [max(j.due, self._away_until) for j in self._jobs.values()]
                    times += [self._begin_at] if self._decisions else []
                    self._changed.wait(max(0.0, min([reconcile_at, *times]) - now))
                    continue
            if self._answer_questions():
                with self._changed:
                    job = self._next(time.monotonic())  # one of them may have ended what was due
            if begins:
                self._begin()
            try:
                if now >= self._away_until and self._reconciler.survey_first:
                    self._survey()
                elif job is not None:
                    self._work(job)
                elif not begins:
                    reconcile_at = time.monotonic() + self._context.look_s
                    if now >= self._away_until and not self._reconcile():
                        reconcile_at = 0.0  # it goes on when nothing is due
            except Exception as error:  # a defect must neither end the thread nor go unseen
                log.exception("%s: a defect", self.actuator.name)
                self._note_defect(error, job)

    def _begin(self) -> None:
        """Store the intent of the decision that waits longest. It stays first until that has succeeded."""
        decision, why = self._decisions[0]
        first, subject = f"{decision.wanted} {decision.node}", f"{self.actuator.name} intents"
        try:
            self._dispatcher.begin(decision, why)
            self._context.troubles.pop(subject, None)
        except StoreError as error:
            if not self._stopping:
                self._context.troubles[subject] = f"Decisions wait to be begun, {first} first: {error}."
            self._begin_at = time.monotonic() + STORE_WAIT_S
            return
        except Exception as error:  # a defect must neither end the thread nor go unseen
            log.exception("%s: a defect", first)
            self._context.troubles[subject] = f"{first} was not begun: {type(error).__name__}: {error}."
        self._decisions.popleft()

    def _note_defect(self, error: Exception, job: Job | None) -> None:
        name = self.actuator.name
        self._context.troubles[name] = f"{name}: {type(error).__name__}: {error}."
        if job is not None:
            self._retry(job, f"a defect: {error}", known=self._cannot_have_closed(job))
        elif self._reconciler.survey_first:  # not at once: it would be all that this thread does
            self._away_until = time.monotonic() + STORE_WAIT_S

    def _next(self, now: float) -> Job | None:
        if now < self._away_until:
            return None
        return next((job for job in self._jobs.values() if job.due <= now), None)

    # ---- one action

    def _work(self, job: Job) -> None:
        if job.given_up:
            self._end_given_up(job)
            return
        try:
            if job.detail is None:
                job.detail = self._act(job)
                self._note_answer()
                self._context.crash_test_hook("acted")
            self._finish(job, ActionState.DONE, job.detail)
        except StoreError as error:
            log.warning("%s %s waits: %s", job.action.action, job.action.node, error)
            job.due = time.monotonic() + STORE_WAIT_S
        except SavingError as error:
            self._note_answer()
            self._wait_for_jobs(job, str(error))
        except LaterError as error:
            if isinstance(error, AwayError):
                self._note_away(str(error))
            self._retry(job, str(error), known=self._find_closed(job))
        except ActError as error:
            job.lack = error.lack if isinstance(error, LackError) else None
            if isinstance(error, NotAloneError) and job.action.gpu is not None:
                job.action = replace(job.action, gpu=replace(job.action.gpu, refused=True))
            job.foreign = isinstance(error, ForeignError)
            if self._find_closed(job):
                self._fail(job, str(error))
            else:  # a node that it has closed must not be forgotten with it
                self._retry(job, str(error), known=False)

    def _act(self, job: Job) -> str:
        """Carry it out. Raises ActError and its kinds, StoreError."""
        context, action = self._context, job.action
        context.store.fence()
        if (why := self._why_over(action)) and not self._is_marked(action):
            raise ActError(f"not done: {why}")
        if self._has_closed(action):
            state = self._observed(action.node)
            if state is not None and state.service is Service.IN:
                raise ActError("not done to its end: somebody else has put the node back since it was closed")
        if action.action in (Act.ADVISE, Act.UNADVISE) and not action.before:
            before = self._value_before(action)
            if before:
                action = job.action = replace(action, before=before)
                context.store.actions.write([action])
                context.crash_test_hook("noted")
        if not self.actuator.repeatable:
            if action.running:
                raise ActError("the collector was stopped while its command ran: nobody knows whether it was done")
            job.action = replace(action, running=True, detail="its command runs", attempts=job.tries + 1)
            context.store.actions.write([job.action])
            context.crash_test_hook("begun")
        self._refuse_conflict(job.action)
        if already := self._isolated_already(action):
            return already
        self._wait_for_guard(job.action)
        self._let_jobs_save(job)

        def check_lease() -> None:
            context.store.fence()
            job.touched = True

        return self.actuator.do(job.action, check_lease).detail

    def _let_jobs_save(self, job: Job) -> None:
        """Ask the node's jobs to save themselves before it goes, where the policy or a person says so.

        Raises:
            SavingError: they still have time. ActError and its kinds, StoreError.
        """
        action = job.action
        if action.saving is None or action.action not in CLOSINGS or self._has_closed(action):
            return
        if not action.saving.asked_ms:
            job.action = self._saver.prepare(action)
            self._context.crash_test_hook("saving")
            job.action = self._saver.ask(job.action)
            self._context.crash_test_hook("asked")
        job.action = self._saver.take_answers(job.action)
        if why := self._saver.waits(job.action):
            raise SavingError(why)

    def _wait_for_jobs(self, job: Job, why: str) -> None:
        """Look for the jobs' answers again soon. It counts as no try."""
        self._put_behind(job, SAVING_LOOK_S)
        if job.action.detail != why:
            log.info("%s %s %s", job.action.action, job.action.node, why)
            job.action = replace(job.action, detail=why)
            try:
                self._context.store.actions.write([job.action])
            except StoreError as error:
                log.warning("the store: %s", error)

    def _is_marked(self, action: Action) -> bool:
        """Return whether the scheduler shows what an action does: a stop may have come in between."""
        if action.gpu is None:
            state = self._observed(action.node)
            return state is not None and state.mark == own_mark(action)
        if not isinstance(self.actuator, GpuIsolator):
            return False
        return any(s.uuid == action.gpu.uuid and s.mark == own_mark(action) for s in self.actuator.isolated())

    def _isolated_already(self, action: Action) -> str:
        """Return for which other incident a GPU is out; "": for none. Two faults of one board are no failure."""
        if action.action is not Act.ISOLATE_GPU or action.gpu is None:
            return ""
        outage = self._context.gpus.current.get(action.gpu.uuid)
        if outage is None or not is_out(outage) or own_mark(outage) == own_mark(action):
            return ""
        return f"isolated already {f'for another incident, {outage.incident_id}' if outage.incident_id else 'by hand'}"

    def _observed(self, node: str) -> NodeState | None:
        return self.actuator.observe_all([node]).get(node)

    def _refuse_conflict(self, action: Action) -> None:
        """Refuse a reset of a node that is back or goes back, a resume during a reset, and a return on old evidence.

        A reset is asked for of a node without jobs, and may wait for the jobs of others. Each is queued before it
        checks for the other.

        Raises:
            ActError, LaterError
        """
        node = action.node
        others = self._dispatcher.under_way(node)  # read before the outage, which shows a resume that has ended
        if action.action is Act.RESUME:
            if running := [a for a in others if a.action in RESETS and a.running]:
                raise LaterError(f"its {running[0].action} runs")
            if (lack := self._returns.nodes.why_withheld(action, others)) is not None:
                raise LackError(lack)
        elif action.action is Act.RETURN_GPU:
            self._returns.gpus.check(action, others)
        elif action.action in RESETS:
            outage = self._outage_of(action)
            back = outage is not None and outage.stage not in IDLE and outage.ts_ms > action.ts_ms
            if back or any(a.action is Act.RESUME for a in others):
                raise ActError(f"not done: {node} was put back since it was asked for, and jobs may run there")
            self._refuse_busy_node(action)

    def _wait_for_guard(self, action: Action) -> None:
        """Ask the guard again: others may have closed nodes since it was decided.

        Raises:
            LaterError: it waits, and its node counts as leaving.
        """
        if action.action not in {*CLOSINGS, Act.ISOLATE_GPU} or action.forced or self._has_closed(action):
            return
        self._reconciler.survey(SURVEY_S)
        later = self._context.outages.leaving_after(action) | self._context.gpus.leaving_after(action)
        why = self._context.detection.why_held(action, later)
        self._context.outages.note_held(action, why)
        if why:
            raise LaterError(f"the guard holds it back: {why}")

    def _refuse_busy_node(self, action: Action) -> None:
        """Refuse a reset of a node that its scheduler may give work. Ask now: what is stored is older.

        Raises:
            LaterError: the scheduler does not answer. ActError: Drover does not have the node out, or jobs run there.
        """
        if action.forced:
            return
        node, outage = action.node, self._outage_of(action)
        state = self._dispatcher.observe(node)
        if outage is None or not is_out(outage) or not state.out or state.mark != own_mark(outage):
            said = state.text or str(state.service)
            raise ActError(
                f"not done: its scheduler does not have {node} as drained by Drover ({said}): jobs may run there"
            )
        if state.jobs or state.service is not Service.DRAINED:
            jobs = f": {', '.join(state.jobs)}" if state.jobs else ""
            raise ActError(f"not done: jobs run on {node}{jobs}; ask again when they have ended")

    def _why_over(self, action: Action) -> str:
        """Return why it is no longer wanted; "": it is."""
        context = self._context
        if action.action not in WANTED_STILL or not action.incident_id:
            return ""
        incident = context.detection.incidents.get(action.incident_id)
        if incident is None:
            over = context.now_ms() - action.ts_ms > context.config.give_up_s * 1000
        else:
            over = incident.closed_ms is not None
        return "its incident ended before it could be" if over else context.detection.why_unwanted(action)

    def _outage_of(self, action: Action) -> NodeOutage | None:
        return self._context.outages.current.get(action.node)

    def _has_closed(self, action: Action) -> bool:
        """Return whether it has closed its node before: an isolation that waits for its last pod, or after a stop."""
        outage = self._outage_of(action)
        if action.action not in CLOSINGS or outage is None or not is_out(outage):
            return False
        return own_mark(outage) == own_mark(action) and outage.ts_ms >= action.ts_ms

    def _value_before(self, action: Action) -> str:
        if action.action is Act.ADVISE:
            return self.actuator.before(action.node)
        return self._context.advices.value_before(action.node)

    def _finish(self, job: Job, state: ActionState, detail: str) -> None:
        """Store the outage, then the outcome: after a stop in between, the intent is found done."""
        context, action = self._context, job.action
        if action.saving is not None and not job.withdrawn and (said := sentence(action.saving)):
            detail = f"{detail}; {said}"
        if state is ActionState.DONE:
            self._set_outage(action)
            context.crash_test_hook("moved")
            if action.action is Act.RESUME or (action.action is Act.RETURN_GPU and action.by != ITSELF):
                self._drop_closings(action)  # before it is stored as done: after a stop in between both happen again
        elif action.action is Act.RETURN_GPU:
            self._returns.gpus.after_refusal(action, detail, job.lack)
        elif action.action is Act.ISOLATE_GPU:
            self._reconciler.gpus.look_once()  # the scheduler may have taken it without an answer
        elif action.action is Act.RESUME:
            outage = self._outage_of(action)
            after = None if outage is None else self._returns.nodes.after_refusal(outage, detail, job.lack)
            if after is not None:
                context.outages.write(after)
        ended = replace(
            action, state=state, detail=detail, ts_ms=context.now_ms(), attempts=job.tries + 1, running=False,
            foreign=state is ActionState.FAILED and job.foreign,
        )  # fmt: skip
        context.store.actions.write([ended])
        with self._changed:
            self._jobs.pop(action.id, None)
            if not self._stopping:  # else this action may be another worker's by now
                context.outages.end_closing(action)
                context.gpus.end_isolation(action)
        context.crash_test_hook("ended")
        self._dispatcher.end(ended)

    def _drop_closings(self, resume: Action) -> None:
        """End older closings of a node, or of a GPU, that is back: they would close it again."""
        gpu, what = resume.gpu, "node" if resume.gpu is None else "GPU"
        closings = CLOSINGS if gpu is None else {Act.ISOLATE_GPU}
        with self._changed:
            jobs = [j for j in self._jobs.values() if j.action.node == resume.node and j.action.action in closings]
        for job in jobs:
            same = gpu is None or (job.action.gpu is not None and job.action.gpu.uuid == gpu.uuid)
            if same and job.action.ts_ms <= resume.ts_ms:
                self._fail(job, f"not done to its end: {resume.by} has put the {what} back")

    def _find_closed(self, job: Job) -> bool:
        """Set the outage of a node that a job has closed, though it failed or waits; False: unknown, or not stored.

        An isolation that waits for its last pod, or fails there, has closed the node. So has a drain that the
        scheduler took before it stopped answering.
        """
        if self._cannot_have_closed(job):
            return True
        action = job.action
        try:
            state = self._observed(action.node)
            if state is not None and state.mark == own_mark(action):
                self._set_outage(action)
        except (ActError, StoreError) as error:
            log.debug("%s: not known whether it is closed: %s", action.node, error)  # the action's detail says it too
            return False
        return True

    def _cannot_have_closed(self, job: Job) -> bool:
        """Return whether the job has closed no node that is not known to be out."""
        closes = job.action.action in CLOSINGS and job.touched
        return not closes or is_out(self._outage_of(job.action))

    def _end_given_up(self, job: Job) -> None:
        if self._find_closed(job):
            self._note_answer()
            out = is_out(self._outage_of(job.action))
            self._fail(job, f"{job.given_up}{'; its node is closed' if out else ''}")
        else:
            self._put_off(job)

    def _set_outage(self, action: Action) -> None:
        """Set the outage of a node after an act that is done."""
        context, outages = self._context, self._context.outages
        outage, now_ms = self._outage_of(action), context.now_ms()
        if action.gpu is not None:
            self._set_gpu_outage(action, action.gpu.uuid, now_ms)
            return
        if action.action in CLOSINGS and not is_out(outage):
            state = self._observed(action.node)
            found = None if state is None or not state.out else adopted(state, now_ms)
            if found is not None and own_mark(found) != own_mark(action):
                # Closed by a person, or for an incident that the store has lost: a pass proves nothing about that.
                outages.write(found if action.by == ITSELF else replace(found, by=action.by))
                return
            outages.write(taken_out(action, outage, now_ms, context.config.return_days))
        elif action.action in CLOSINGS and action.by != ITSELF and outage is not None:
            if kept := drained_too(outage, action.by, action.why, now_ms):
                outages.write(kept)
        elif action.action is Act.RESUME and outage is not None and is_out(outage):
            asked_ms = outage.asked_ms if action.by == ITSELF else 0
            outages.write(
                moved(outage, Health.HEALTHY, now_ms, action.why, by=action.by, asked_ms=asked_ms, passed_before=False)
            )

    def _set_gpu_outage(self, action: Action, uuid: str, now_ms: int) -> None:
        gpus = self._context.gpus
        outage = gpus.current.get(uuid)
        if action.action is Act.ISOLATE_GPU and not is_out(outage):
            gpus.write(isolated(action, outage, now_ms))
        elif action.action is Act.ISOLATE_GPU and action.by != ITSELF and outage is not None:
            if kept := drained_too(outage, action.by, action.why, now_ms):
                gpus.write(replace(kept, gpu=replace(gpu_of(kept), order="")))
        elif action.action is Act.RETURN_GPU and outage is not None and (is_out(outage) or gpu_of(outage).replaced_by):
            asked_ms = outage.asked_ms if action.by == ITSELF else 0
            back = moved(outage, Health.HEALTHY, now_ms, action.why, by=action.by, asked_ms=asked_ms)
            gpus.write(replace(back, passed_before=False, gpu=replace(gpu_of(outage), replaced_by="")))

    def _retry(self, job: Job, why: str, known: bool) -> None:
        """Try again later. `known`: whether it has closed its node; else it is observed until that is known."""
        context, action = self._context, job.action
        job.tries += 1
        text = f"not yet, tried again: {why}"
        began_ms = action.ts_ms if action.saving is None else max(action.ts_ms, action.saving.until_ms)
        if job.detail is None and context.now_ms() - began_ms > context.config.give_up_s * 1000:
            text = f"given up after {job.tries} tries: {why}"
            if known:
                self._fail(job, text)
                return
            job.given_up = text
            text += "; whether the node was closed is not known, and looked at until it is"
        self._put_off(job)
        if action.detail != text:
            log.warning("%s %s: %s", action.action, action.node, text)
            job.action = replace(action, running=False, detail=text, attempts=job.tries)
            try:
                context.store.actions.write([job.action])
            except StoreError as error:
                log.warning("the store: %s", error)

    def _put_off(self, job: Job) -> None:
        self._put_behind(job, WAITS_S[min(job.tries, len(WAITS_S)) - 1])

    def _put_behind(self, job: Job, seconds: float) -> None:
        job.due = time.monotonic() + seconds
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

    # ---- the scheduler

    def _note_away(self, why: str) -> None:
        self._reconciler.survey_first = self.actuator.surveys
        self._context.surveys.drop_stale()
        self._away += 1
        self._away_until = time.monotonic() + WAITS_S[min(self._away, len(WAITS_S)) - 1]
        self._context.troubles[self.actuator.name] = f"{why}; {len(self._jobs)} actions wait for it."

    def _note_answer(self) -> None:
        self._away, self._away_until = 0, 0.0
        self._context.troubles.pop(self.actuator.name, None)

    def _survey(self) -> None:
        """Survey who is out before anything is done: after a start, and when the scheduler was away."""
        try:
            self._context.store.fence()
            self._reconciler.survey()
            self._note_answer()
        except StoreError as error:
            log.debug("no survey of all nodes: %s", error)
            self._away_until = time.monotonic() + STORE_WAIT_S
        except AwayError as error:
            self._note_away(str(error))

    def _reconcile(self) -> bool:
        """Return False if it was interrupted, because an action is due."""
        waiting = self.waiting()
        nodes = {a.node for a in waiting if a.gpu is None} | {a.gpu.uuid for a in waiting if a.gpu is not None}
        try:
            self._context.store.fence()
            return self._reconciler.reconcile(nodes, self._note_answer, self._is_due)
        except StoreError as error:
            log.debug("not reconciled: %s", error)
        except AwayError as error:
            self._note_away(str(error))
        except ActError as error:
            self._context.troubles[self.actuator.name] = f"{self.actuator.name}: {error}."
        return True

    def _is_due(self) -> bool:
        with self._changed:
            return self._stopping or self._next(time.monotonic()) is not None
