"""A job's report that a checkpoint is on disk, as the message of an event.

One JSON object: `v` 1, `job` the scheduler's name of the job, `step` of the checkpoint, `text` a sentence for people.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

MAX_STEP = 1 << 53
_JOB = re.compile(r"[!-~]{1,128}")


class ReportError(ValueError):
    """A message that is no report of a checkpoint."""


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    job: str
    step: int


def to_message(report: CheckpointReport) -> str:
    found = {"v": 1, "job": report.job, "step": report.step, "text": sentence(report)}
    return json.dumps(found, separators=(",", ":"))


def sentence(report: CheckpointReport) -> str:
    return f"job {report.job} saved a checkpoint at step {report.step}"


def from_message(message: str) -> CheckpointReport:
    """
    Raises:
        ReportError: what is wrong with it.
    """
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        raise ReportError("it is no JSON") from None
    if not isinstance(found, dict) or found.get("v") != 1:
        raise ReportError("it is no report of version 1")
    job, step = found.get("job"), found.get("step")
    if not isinstance(job, str) or not _JOB.fullmatch(job):
        raise ReportError("its job has no usable name")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MAX_STEP:
        raise ReportError("its step is no number of a step")
    return CheckpointReport(job, step)
