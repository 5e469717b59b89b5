"""Running a program: an argument list, never a shell; bounded in time and in what it may say."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drover_collector.actions.base import ActError, AwayError

SAID = 20_000  # characters of complaints that are looked at
MOST_OUT = 64 << 20  # characters of an answer; 10,000 nodes of Slurm take some 10 million


@dataclass(frozen=True, slots=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """One line: what it complains of."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return lines[-1].strip()[:300] if lines else f"exit status {self.status}"


def run(
    words: Sequence[str], timeout_s: float, *, stdin: str | None = None, env: Mapping[str, str] | None = None
) -> Ran:
    """
    Raises:
        ActError: no such program, or an answer of more than MOST_OUT characters: half of one would say that the nodes
            of the other half are in service.
        AwayError: it did not end in time, and was killed with what it had started.
    """
    try:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=None if env is None else {**os.environ, **env},
            start_new_session=True,  # so that its children can be ended with it
        )
    except OSError as error:
        raise ActError(f"{words[0]} cannot be started: {error.strerror or error}") from None
    with child:
        try:
            out, err = child.communicate(stdin, timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            raise AwayError(f"{words[0]} did not end within {timeout_s:g} s") from None
    if len(out) > MOST_OUT:
        raise ActError(f"{Path(words[0]).name} printed more than {MOST_OUT} characters, which Drover does not read")
    return Ran(child.returncode, out, err[:SAID])
