"""Report the steps of a training loop to the agent on its node.

Import this file or copy it: it needs only the standard library, and nothing of Drover.

    from drover_agent.client.training_steps import Reporter, transformer_flops

    reporter = Reporter("pretrain", tokens_per_step=4_194_304, flops_per_step=transformer_flops(7e9, 4_194_304))
    for batch in data:
        train(batch)
        reporter.step()          # or reporter.step(step_time_s=...) if the loop measures its time itself
    ...
    reporter.reset()             # after a pause that is not a step, such as an evaluation
    reporter.saved(step)         # a checkpoint is on disk; it resets too

Drover may ask a job to save itself before it takes its node out of service, by a signal, or by a file of its pod:

    reporter.on_save(save)       # one process: `step` calls save() between two steps, then reports it
    reporter.on_save()           # several ranks: let them agree on `reporter.save_asked`, save, then call `saved`

A loop that splits its model says where this rank stands, so that a GPU is compared with those that do the same work:

    reporter.parallel(tp=(tp_rank, 8), pp=(pp_rank, 4), dp=(dp_rank, 2))

Axes: tp (tensor), pp (pipeline), dp (data), cp (context), ep (expert). Without `dp` it is what is left of the world;
with it, tp, pp, cp and dp make up the world, else the places are not used.

Call it on every rank. `tokens_per_step` and `flops_per_step` are those of the whole job, over all its ranks. A call
takes microseconds, never waits and never raises: about once a second it sends one datagram to a Unix socket without
blocking. If no agent listens or it is behind, the time is added to the next report, `unsent` counts the tries, and the
loop goes on. A forked process may go on using its parent's reporter. Not thread-safe.

Wire, version 1: one JSON object per datagram, at most 1,024 bytes, sent to $DROVER_STEPS_SOCKET or
/run/drover/steps.sock (SOCK_DGRAM):

    v            1
    name         of the workload: letters, digits, "." "_" "-", at most 64
    rank         of this process in the job, from 0
    world_size   processes (GPUs) of the job
    step         steps so far by this process
    steps        steps that this report is about
    step_time_s  their mean time in seconds
    tokens       optional: tokens of one step, over all ranks
    flops        optional: floating-point operations of one step, over all ranks
    job          optional: the scheduler's name of the job
    parallel     optional: {axis: [rank, size]}, the rank's place in the job's parallel groups

or, of rank 0 alone, `saved` instead of step, steps and step_time_s: the number of steps in a checkpoint on disk.

A reader skips keys that it does not know and refuses another version.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
from collections.abc import Callable
from time import monotonic
from types import FrameType

SOCKET = "/run/drover/steps.sock"
SEND_S = 1.0  # between two reports of one process
LOOK_S = 2.0  # between two looks at the file that asks for a checkpoint
RECONNECT_S = 5.0  # between two tries to connect to an agent that is not there
_JOB = ("DROVER_JOB", "SLURM_JOB_ID", "POD_UID", "POD_NAME", "PBS_JOBID", "LSB_JOBID")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_AXES = ("tp", "pp", "dp", "cp", "ep")
_PARALLEL = ', "parallel": '  # in a text of JSON its quotes would be escaped


class Reporter:
    """Sums up steps and sends them. See the module's docstring.

    Attributes:
        unsent: reports that could not be sent when they were due.
        save_asked: the job is asked to save itself, and has not since.

    Raises (at construction only):
        ValueError: the agent would refuse the name or a number.
    """

    def __init__(
        self,
        name: str,
        tokens_per_step: float | None = None,
        flops_per_step: float | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        socket_path: str | None = None,
    ) -> None:
        """Without `rank` and `world_size` they are taken from the environment of torchrun or srun."""
        if not _NAME.fullmatch(name):
            raise ValueError(f'name {name!r}: letters, digits, ".", "_" and "-" are right, 64 at most')
        fields: dict[str, object] = {"v": 1, "name": name}
        fields["rank"] = _number("RANK", "SLURM_PROCID") if rank is None else int(rank)
        fields["world_size"] = (_number("WORLD_SIZE", "SLURM_NTASKS") or 1) if world_size is None else int(world_size)
        for key, value in (("tokens", tokens_per_step), ("flops", flops_per_step)):
            if value is not None:
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"{key}_per_step must be a number from 0 on, found {value!r}")
                fields[key] = float(value)  # numpy's numbers are not JSON
        if job := next((os.environ[key] for key in _JOB if os.environ.get(key)), ""):
            fields["job"] = job.encode("ascii", "replace").decode()[:128]  # escaped it may be too long
        self.unsent = 0
        self.save_asked = False
        self._save: Callable[[], object] | None = None
        self._file: _ChangingFile | None = None
        self._reports_saves = fields["rank"] == 0
        self._head = json.dumps(fields)[:-1]
        self._path = socket_path or os.environ.get("DROVER_STEPS_SOCKET") or SOCKET
        self._socket: socket.socket | None = None
        self._pid = 0
        self._steps = self._pending = 0  # so far; of those, not sent yet
        self._pending_s = 0.0
        self._began: float | None = None  # when the present step began
        self._next_send = self._next_connect = 0.0

    def step(self, step_time_s: float | None = None) -> None:
        """Count a step. Its time is `step_time_s`, or the time since the last call; the first call only begins."""
        self._count(step_time_s)
        if self._file is not None and self._file.changed():
            self.save_asked = True
        if self.save_asked and self._save is not None:
            self._save()
            self.saved()

    def _count(self, step_time_s: float | None) -> None:
        now = monotonic()
        taken = step_time_s if step_time_s is not None else None if self._began is None else now - self._began
        self._began = now
        if taken is None or not 0 < taken < math.inf:
            return
        self._steps += 1
        self._pending += 1
        self._pending_s += taken
        if now >= self._next_send:
            self._next_send = now + SEND_S
            if self._send(now):
                self._pending, self._pending_s = 0, 0.0
            else:
                self.unsent += 1

    def reset(self) -> None:
        """Begin the next step now: the time since the last one was not a step."""
        self._began = monotonic()

    def parallel(self, **axes: tuple[int, int]) -> None:
        """Say where this rank stands in the job's parallel groups: axis=(rank, size). Call it before the first step.

        Raises:
            ValueError: the agent would refuse it.
        """
        found = {axis: [int(rank), int(size)] for axis, (rank, size) in axes.items()}
        if wrong := [axis for axis, (rank, size) in found.items() if axis not in _AXES or not 0 <= rank < size]:
            raise ValueError(f"parallel {wrong[0]!r}: (rank, size), the rank below the size, of {', '.join(_AXES)}")
        self._head = f"{self._head.partition(_PARALLEL)[0]}{_PARALLEL}{json.dumps(found)}"

    def on_save(
        self, save: Callable[[], object] | None = None, number: int = signal.SIGUSR1, path: str | None = None
    ) -> None:
        """Listen to a signal, and to a file, that asks the job to save itself: set `save_asked`.

        Args:
            save: writes a checkpoint; the next `step` calls it. Only for a job of one process: ranks may get the signal
                at different steps. What it raises comes out of `step`.
            number: the signal that the job names to its scheduler, as in `#SBATCH --signal=USR1@120`.
            path: of a file that changes when the job is asked, as a pod's own annotation does; `step` looks at it
                every 2 s. What it says now asks for nothing.
        Raises:
            ValueError: this is not the main thread.
        """
        before = signal.getsignal(number)

        def asked(signum: int, frame: FrameType | None) -> None:
            self.save_asked = True
            if callable(before):
                before(signum, frame)

        self._save = save
        self._file = None if path is None else _ChangingFile(path)
        signal.signal(number, asked)

    def saved(self, step: int | None = None) -> None:
        """Report that a checkpoint is on disk. Call it on every rank; rank 0 sends it.

        Args:
            step: steps of the training that are in it; None: those that this process has counted.
        """
        self.save_asked = False
        self.reset()
        if self._reports_saves:
            number = self._steps if step is None else int(step)
            self.unsent += not self._write(f'{self._head}, "saved": {number}}}', self._began or 0.0)

    def _send(self, now: float) -> bool:
        mean_s = float(self._pending_s / self._pending)  # repr of a numpy number is not a number
        text = f'{self._head}, "step": {self._steps}, "steps": {self._pending}, "step_time_s": {mean_s!r}}}'
        return self._write(text, now)

    def _write(self, text: str, now: float) -> bool:
        try:
            if self._pid != os.getpid():  # the first report, or the first one after a fork
                self._pid, self._socket, self._next_connect = os.getpid(), None, 0.0
            if self._socket is None:
                if now < self._next_connect:
                    return False
                self._next_connect = now + RECONNECT_S
                fresh = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                fresh.setblocking(False)
                try:
                    fresh.connect(self._path)
                except OSError:
                    fresh.close()
                    raise
                self._socket = fresh
            self._socket.send(text.encode())
        except BlockingIOError:  # the agent is behind
            return False
        except (OSError, ValueError):  # no agent, or it has restarted with a new socket
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            return False
        return True


class _ChangingFile:
    """A small file, looked at every LOOK_S. It may not be there: then it says nothing."""

    def __init__(self, path: str) -> None:
        self._path, self._text, self._next_look = path, "", 0.0
        self.changed()

    def changed(self) -> bool:
        """Return True once when it says something new."""
        now = monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_S
        try:
            with open(self._path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  # once in a loop's step
                text = file.read(256).strip()
        except OSError:
            return False
        new, self._text = bool(text) and text != self._text, text
        return new


def transformer_flops(
    parameters: float, tokens: float, layers: int = 0, hidden: int = 0, sequence_length: int = 0
) -> float:
    """Return the operations of one training step (forward and backward) of a dense transformer over `tokens` tokens.

    6 N per token (Kaplan et al. 2020, arXiv:2001.08361), and 12 L H Q T for attention if layers, width and sequence
    length are given (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Recomputed activations do not count. For a
    mixture of experts `parameters` are those that one token uses.
    """
    return tokens * (6.0 * parameters + 12.0 * layers * hidden * sequence_length)


def _number(*names: str) -> int:
    """Return the first of these variables that is a number, else 0."""
    return next((int(text) for name in names if (text := os.environ.get(name, "")).isdecimal()), 0)
