"""What Drover asks the jobs of a node before it takes it out of service: to save themselves; and their answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobSave:
    """One job on the node. Times are the collector's clock, in ms; 0: not.

    Without a name: which jobs the node has is not known, and `why_not` says why.
    """

    job: str
    how: str = ""  # how it is asked, for people: "signal USR1"; "": it is not asked
    signal: str = ""  # name of the signal, without SIG
    to_script: bool = False  # the signal is for its batch script, not for its steps
    why_not: str = ""  # why it was not asked
    answered_ms: int = 0  # when it reported a checkpoint, or had left the node
    left: bool = False  # its answer: it has left the node
    step: int | None = None  # of the checkpoint; None: nothing reported one
    step_before: int | None = None  # of the last checkpoint before it was asked; None: nothing reported one
    saved_ms: int = 0  # when the checkpoint was on disk
    before_ms: int = 0  # when the last checkpoint before it was on disk
    asked_ms: int = 0  # when it was asked already, for another of its nodes; 0: with the others of this node

    @property
    def open(self) -> bool:
        """Whether it was asked and has not answered."""
        return bool(self.how) and not self.answered_ms

    @property
    def steps_kept(self) -> int | None:
        """Steps that are not repeated because it saved; None: not known."""
        if self.step is None or self.step_before is None or self.step < self.step_before:
            return None
        return self.step - self.step_before

    @property
    def kept_ms(self) -> int | None:
        """Time that is not repeated because it saved; None: not known."""
        return self.saved_ms - self.before_ms if self.saved_ms and 0 < self.before_ms <= self.saved_ms else None


@dataclass(frozen=True, slots=True)
class Saving:
    """A policy rule lets jobs save themselves before their node goes. Stored with the action, so a restart goes on.

    Attributes:
        wait_s: how long they have to answer.
        asked_ms: when they were asked; 0: not yet. It is stored before the first is asked, and none is asked twice.
    """

    wait_s: float
    asked_ms: int = 0
    jobs: tuple[JobSave, ...] = ()

    @property
    def until_ms(self) -> int:
        return self.asked_ms + round(self.wait_s * 1000)


def sentence(saving: Saving) -> str:
    """Return what the jobs answered, for the operator; "": there were none."""
    return "; ".join(sentence_of(each) for each in saving.jobs)


def sentence_of(save: JobSave) -> str:
    if not save.job:
        return f"its jobs were not asked to save themselves: {save.why_not}"
    if not save.how:
        return f"job {save.job} was not asked to save itself: {save.why_not}"
    if save.step is not None:
        kept = "" if save.steps_kept is None else f", {save.steps_kept} steps after its last checkpoint"
        return f"job {save.job} saved itself at step {save.step}{kept}"
    if save.left:
        return f"job {save.job} left the node after it was asked to save itself; whether it saved is not known"
    return f"job {save.job} was asked to save itself ({save.how}) and did not answer in time"
