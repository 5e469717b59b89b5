"""Before a node goes out: ask its jobs to save themselves, and wait for their answers.

What was asked is stored with the action before the first job is asked. After a stop nothing is asked twice: a job may
be in the middle of its checkpoint. The next start waits for what is left of the time, then the node goes. A job on
several nodes that go at once is asked for the first of them only. Any process can report a checkpoint of any job, so
only a report from a node on which the job runs is an answer.

A scheduler may fail to list jobs and still close nodes (squeue fails, scontrol works). That holds a sick node no longer
than its jobs would. A person who wants the jobs saved gets the error instead.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from drover_collector.actions.base import ActError, Actuator, AwayError, LaterError
from drover_collector.actions.context import ActionContext
from drover_collector.actions.node_outage import ITSELF
from drover_core.jobs.checkpoint import ReportError, from_message
from drover_core.model.events import Action
from drover_core.model.kinds import CHECKPOINT, EventKind
from drover_core.model.saving import JobSave, Saving
from drover_core.times import iso

log = logging.getLogger(__name__)

LOOK_S = 2.0  # between two looks for answers
CLOCKS_MS = 5_000  # a node's clock may differ so much; beyond it, its answers are not believed
MOST_NODES = 8  # from which a job answers, asked about in one look
BEFORE_MS = 7 * 86_400_000  # how far back a job's last checkpoint is looked for


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was reported from a node."""

    at_ms: int
    step: int
    node: str


class SavingError(LaterError):
    """The node waits for its jobs. Nothing went wrong."""


@runtime_checkable
class Saver(Protocol):
    """An actuator that can ask jobs to save themselves. All raise ActError and its kinds."""

    def find_saves(self, node: str) -> tuple[JobSave, ...]:
        """Return the jobs on a node, each with how it is asked, or why it is not. Changes nothing."""

    def ask_to_save(self, save: JobSave) -> None:
        """Ask one of them."""


class JobSaver:
    """Of one actuator, in its worker's thread."""

    def __init__(self, context: ActionContext, actuator: Actuator) -> None:
        self._context, self._actuator = context, actuator

    def prepare(self, action: Action) -> Action:
        """Find the jobs of the node, and store that they are asked. Raises ActError and its kinds, StoreError."""
        saving = action.saving
        if saving is None or not isinstance(self._actuator, Saver):
            return action
        asked = self._asked_for_others(action)
        found = self._find_saves(self._actuator, action, saving)
        jobs = tuple(asked.get(each.job) or self._with_last_checkpoint(each) for each in found)
        return self._store(action, replace(saving, asked_ms=max(1, self._context.now_ms()), jobs=jobs))

    def _find_saves(self, actuator: Saver, action: Action, saving: Saving) -> tuple[JobSave, ...]:
        try:
            return actuator.find_saves(action.node)
        except AwayError:
            raise
        except ActError as error:
            early = self._context.now_ms() < action.ts_ms + round(saving.wait_s * 1000)
            if action.by != ITSELF or (isinstance(error, LaterError) and early):
                raise
            log.warning("%s: its jobs are not asked to save themselves: %s", action.node, error)
            return (JobSave("", why_not=f"which jobs run there is not known: {error}"),)

    def ask(self, action: Action) -> Action:
        """Ask the jobs, once: call this after `prepare`, and never again. Raises StoreError."""
        if action.saving is None or not isinstance(self._actuator, Saver):
            return action
        return self._store(action, self._ask(self._actuator, action.saving))

    def take_answers(self, action: Action) -> Action:
        """Take in what the jobs have answered. Raises AwayError while they have time, StoreError."""
        saving = action.saving
        if saving is None or not any(each.open for each in saving.jobs):
            return action
        try:
            there = set(self._actuator.observe(action.node).jobs or ())
            jobs = tuple(
                self._answer(each, each.asked_ms or saving.asked_ms, action.node if each.job in there else "")
                for each in saving.jobs
            )
        except ActError as error:
            if isinstance(error, AwayError) and self.waits(action):
                raise
            log.warning("%s: whether its jobs have saved themselves is not known: %s", action.node, error)
            return action
        return self._store(action, replace(saving, jobs=jobs))

    def waits(self, action: Action) -> str:
        """Return what the node waits for, as a sentence; "": nothing."""
        saving, now_ms = action.saving, self._context.now_ms()
        if saving is None or not saving.asked_ms <= now_ms < saving.until_ms:  # over too if the clock went back
            return ""
        jobs = ", ".join(each.job for each in saving.jobs if each.open)
        return f"waits until {iso(saving.until_ms)} for jobs to save themselves: {jobs}" if jobs else ""

    def _asked_for_others(self, action: Action) -> dict[str, JobSave]:
        """Return the jobs that have time to answer for another of their nodes: a second signal may harm them."""
        now_ms = self._context.now_ms()
        return {
            save.job: replace(save, asked_ms=save.asked_ms or other.saving.asked_ms)
            for other in self._context.store.actions.intended()
            if other.saving is not None
            and other.saving.asked_ms
            and other.id != action.id
            and other.saving.asked_ms <= now_ms < other.saving.until_ms
            for save in other.saving.jobs
            if save.how
        }

    def _store(self, action: Action, saving: Saving) -> Action:
        if saving == action.saving:
            return action
        action = replace(action, saving=saving)
        self._context.store.actions.write([action])
        return action

    def _ask(self, actuator: Saver, saving: Saving) -> Saving:
        asked = []
        for save in saving.jobs:
            if save.how and not save.asked_ms:
                self._context.store.fence()
                try:
                    actuator.ask_to_save(save)
                    log.info("job %s is asked to save itself: %s", save.job, save.how)
                except LaterError as error:  # it may have got it all the same: it has its time
                    log.warning("whether job %s was asked to save itself is not known: %s", save.job, error)
                except ActError as error:
                    log.warning("job %s could not be asked to save itself: %s", save.job, error)
                    save = replace(save, how="", why_not=str(error))
            asked.append(save)
        return replace(saving, jobs=tuple(asked))

    def _answer(self, save: JobSave, asked_ms: int, node: str) -> JobSave:
        """
        Args:
            node: on which it still runs; "": it has left the node that is to go.
        """
        if not save.open:
            return save
        reports = self._reports(asked_ms, save.job, asked_ms - CLOCKS_MS)
        names = list(dict.fromkeys([node, *(report.node for report in reversed(reports))]))[: MOST_NODES + 1]
        its_nodes = {name for name in names if not node or name == node or self._runs(save.job, name)}
        saved = next((report for report in reversed(reports) if report.node in its_nodes), None)
        if saved is None and node:
            return save
        save = replace(save, answered_ms=self._context.now_ms(), left=not node)
        return save if saved is None else replace(save, saved_ms=saved.at_ms, step=saved.step)

    def _runs(self, job: str, node: str) -> bool:
        """Return whether a job runs on another node. Raises LaterError."""
        try:
            return job in (self._actuator.observe(node).jobs or ())
        except LaterError:
            raise
        except ActError:  # no node of this scheduler
            return False

    def _with_last_checkpoint(self, save: JobSave) -> JobSave:
        reports = self._reports(self._context.now_ms() - BEFORE_MS, save.job) if save.how else []
        return replace(save, before_ms=reports[-1].at_ms, step_before=reports[-1].step) if reports else save

    def _reports(self, since_ms: int, job: str, saved_ms: int = 0) -> list[Saved]:
        """Return the checkpoints of a job that were received since then, oldest first.

        Args:
            saved_ms: without those that are older by their node's clock: a node that was cut off sends old ones late.
        """
        containing = f'"job":{json.dumps(job)}'
        found = []
        for event in self._context.store.events.of_code(EventKind.RANK, CHECKPOINT, since_ms, containing):
            try:
                report = from_message(event.message)
            except ReportError as error:
                log.info("%s: a report of a checkpoint is left out: %s", event.node, error)
                continue
            if report.job == job and event.ts_ms >= saved_ms:
                at_ms = event.ts_ms if event.received_ms is None else event.received_ms
                found.append(Saved(at_ms, report.step, event.node))
        return found
