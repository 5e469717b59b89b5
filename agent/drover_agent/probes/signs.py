"""Signs of life of the processes of a group, kept in its store: who stands still when a step does not end.

Each process says twice a second where it is. When a step fails or does not end, a process looks at all of them twice:
one that gave no sign in between is named; else one that is in an earlier step than the others; else nobody, because all
wait for each other.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass
from typing import Any

BEAT_S = 0.5
LOOK_S = 5.0  # between two looks: ten beats
LEAVE_S = 90.0  # for the others to have looked, before the first process takes the store away


@dataclass(frozen=True, slots=True)
class Odd:
    """`ranks` stand still, as the sentence `why` says; none: it is not known who."""

    ranks: tuple[int, ...]
    why: str


class Signs:
    """Of one process. `at` from the thread that measures; all else from the one that watches.

    Args:
        store: torch's, over a connection that nothing else uses. here: processes of each node.
    """

    def __init__(self, store: Any, rank: int, world: int, here: int = 1) -> None:
        self._store, self._rank, self._world, self._here = store, rank, world, here
        self._place: tuple[int, str] = (0, "its start")
        self._moved_s = time.monotonic()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._beats = 0
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def at(self, what: str) -> None:
        """Note that the next step begins; all processes of a group note the same steps."""
        self._place = self._place[0] + 1, what
        self._moved_s = time.monotonic()

    @property
    def still_s(self) -> float:
        """Return for how long no step has begun."""
        return time.monotonic() - self._moved_s

    @property
    def place(self) -> str:
        return self._place[1]

    def odd(self) -> Odd:
        """Return who stands still. Takes LOOK_S."""
        try:
            before = self._read()
            time.sleep(LOOK_S)
            after = self._read()
        except RuntimeError:
            return Odd((0,), "it holds the meeting point and does not answer")
        left = {rank for rank in range(self._world) if self._has_left(rank)}
        living = {rank: sign for rank, sign in after.items() if sign is not None and rank not in left}
        silent = tuple(r for r in range(self._world) if r not in left and (after[r] is None or after[r] == before[r]))
        if silent:
            return Odd(silent, f"no sign of life for {LOOK_S:g} s")
        steps = {rank: step for rank, (_, step, _) in living.items()}
        behind = tuple(rank for rank, step in steps.items() if step < max(steps.values()))
        if len({rank // self._here for rank in behind}) == 1:
            return Odd(behind, f"still in {living[behind[0]][2]} when the others waited for it")
        if behind:  # of two nodes that are in one step, one may wait for the other
            who = ", ".join(map(str, behind))
            return Odd((), f"ranks {who} are still in {living[behind[0]][2]}: one of them, or the way between them")
        return Odd((), "all wait for each other: the network between them, or a step too long for its limit")

    def _has_left(self, rank: int) -> bool:
        """Return whether a process has finished: it gives no more signs, and is not odd."""
        with self._lock:
            return bool(self._store.check([f"left/{rank}"]))

    def leave(self) -> None:
        """Stop; the process that holds the store waits until the others have left, or are dead."""
        until = time.monotonic() + LEAVE_S
        with contextlib.suppress(RuntimeError):
            self._set(f"left/{self._rank}", "1")
            while self._rank == 0 and time.monotonic() < until:
                with self._lock:
                    if self._store.check([f"left/{rank}" for rank in range(self._world)]):
                        break
                time.sleep(BEAT_S / 5)
        self._over.set()

    def hand_over(self, text: str) -> None:
        """Leave a text for the first process of this node."""
        with contextlib.suppress(RuntimeError):  # then it is missing there
            self._set(f"text/{self._rank}", text)

    def handed_over(self, rank: int) -> str:
        """Return the text of another process; "": it does not come."""
        try:
            with self._lock:
                return str(self._store.get(f"text/{rank}").decode())
        except RuntimeError:
            return ""

    def _set(self, key: str, value: str) -> None:
        with self._lock:
            self._store.set(key, value)

    def _beat(self) -> None:
        while not self._over.is_set():
            self._beats += 1
            with contextlib.suppress(RuntimeError):  # the others see that no sign comes
                self._set(f"at/{self._rank}", json.dumps([self._beats, *self._place]))
            self._over.wait(BEAT_S)

    def _read(self) -> dict[int, tuple[int, int, str] | None]:
        """Return rank -> (beats, step, what); None: it never gave one."""
        found: dict[int, tuple[int, int, str] | None] = {}
        for rank in range(self._world):
            with self._lock:
                if not self._store.check([f"at/{rank}"]):
                    found[rank] = None
                    continue
                beats, step, what = json.loads(self._store.get(f"at/{rank}"))
            found[rank] = beats, step, what
        return found
