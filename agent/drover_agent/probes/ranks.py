"""The processes of a collective or of a training step over several devices: one for each device of this node.

They are of the probe's session, so that they end with it. One that waits for another node does not hang: who waits
here gives signs of life.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

from drover_agent.probes.base import Context
from drover_agent.probes.child import die_with_parent

IMPORT_S = 60.0  # of torch, by a process for each device at once
PROGRESS_S = 5.0  # between two lines of progress


class RankError(RuntimeError):
    """One of them failed, or ended by itself, or they did not finish."""


class DiedError(RankError):
    """A process of this node ended by itself."""


class MissedError(Exception):
    """They could not begin: a node of the group was not there, or is of another kind. No word against any of them."""


def first_answer(
    context: Context, what: str, work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], limit_s: float
) -> Any:
    """Run `work` in one process per device and return the first answer. All have ended when it returns.

    Args:
        work: a function of a module, called with each of `arguments` in a process of its own. What it returns is the
            answer; None: another one answers.
        limit_s: beyond importing torch.
    Raises:
        InterruptedError: it was asked to stop. MissedError, RankError.
    """
    spawned = context.torch.multiprocessing.get_context("spawn")
    # A pipe each, and no queue: that has locks in /dev/shm, which stay there when the session is killed.
    pipes = [spawned.Pipe(duplex=False) for _ in arguments]
    ranks = [
        spawned.Process(target=_rank, args=(work, given, answer), daemon=True)
        for given, (_, answer) in zip(arguments, pipes, strict=True)
    ]
    try:
        for rank in ranks:
            rank.start()
        for _, answer in pipes:
            answer.close()
        return _await(context, what, ranks, [receiving for receiving, _ in pipes], IMPORT_S + limit_s)
    finally:
        for rank in ranks:
            if rank.ident is not None:
                rank.kill()
                rank.join()
        for pipe in pipes:
            for end in pipe:
                end.close()


def _await(
    context: Context, what: str, ranks: Sequence[Any], answers: list[Connection], limit_s: float
) -> Any:  # fmt: skip
    began = shown = time.monotonic()
    while (answer := _received(answers)) is None:
        now_s = time.monotonic()
        if now_s > shown + PROGRESS_S:
            shown = now_s
            context.show_progress(f"{what}, since {shown - began:.0f} s")
        if context.stopping():
            raise InterruptedError("asked to stop")
        if dead := [k for k, rank in enumerate(ranks) if rank.exitcode not in (None, 0)]:
            if (answer := _received(answers)) is not None:  # it answered before it ended
                break
            raise DiedError(f"process {dead[0]} of {len(ranks)} on this node ended by itself")
        if now_s > began + limit_s:
            raise RankError("they did not finish: one of them, or the way between them, hangs")
        time.sleep(0.05)
    missed, error, found = answer
    if error:
        raise MissedError(error) if missed else RankError(error)
    return found


def _received(answers: list[Connection]) -> Any:
    """Return one answer, None: none yet. Drop those that ended without one."""
    for answer in wait(answers, 0):
        assert isinstance(answer, Connection)
        try:
            return answer.recv()
        except EOFError:
            answers.remove(answer)
    return None


def _rank(work: Callable[..., Any], given: tuple[Any, ...], answer: Connection) -> None:
    """One process."""
    die_with_parent()
    if (parent := parent_process()) is not None and parent.pid != os.getppid():
        return  # it had ended before that held
    try:
        found = work(*given)
    except MissedError as error:
        answer.send((True, str(error), None))
    except Exception as error:  # noqa: BLE001  # whatever it is, it is why there is no figure
        answer.send((False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", None))
    else:
        if found is not None:
            answer.send((False, "", found))
