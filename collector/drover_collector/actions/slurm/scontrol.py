"""Slurm through `scontrol` and `squeue`, as their manual pages describe them; parsed as version 22.05 prints.

22.05 has no --json for scontrol. `show node -o` gives one line per node, with KEY=VALUE parted by spaces that values
(OS, Reason, Comment) have as well; a reason is followed by [USER@TIME].
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drover_collector.actions.base import ActError, AwayError, LaterError
from drover_collector.actions.run_program import Ran, run
from drover_collector.actions.settings import SlurmConfig
from drover_collector.actions.slurm.save_signal import SaveSignal, of_comment, of_script

_NODE = re.compile(r"^NodeName=(\S+)", re.MULTILINE)
_REASON = re.compile(r" Reason=(.*?) \[([^][@]*)@[^][]*\]", re.DOTALL)
_SUFFIXES = "*~#!%$@^-+"  # not responding, powered down, ... behind a state: sinfo(1), NODE STATE CODES
_FLAGS = {  # what some of them say of a node whose slurmd may not answer
    "*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "%": "POWERING_DOWN", "^": "REBOOT_ISSUED",
}  # fmt: skip
_WRONG = ("not found", "invalid node name", "invalid job id")
_AWAY = ("contact slurm controller", "timed out", "connection", "zero bytes", "backup", "not responding")
_BUSY = frozenset({"ALLOCATED", "MIXED", "COMPLETING"})


@dataclass(frozen=True, slots=True)
class SlurmNode:
    name: str
    states: frozenset[str]  # base and flags: IDLE, DRAIN, DOWN, NOT_RESPONDING, ...
    weight: int
    reason: str = ""
    by: str = ""

    @property
    def busy(self) -> bool:
        return bool(self.states & _BUSY)


class Scontrol:
    """The client of `slurm.SlurmActuator`, by programs."""

    requeues = True

    def __init__(self, config: SlurmConfig) -> None:
        self._scontrol = config.scontrol
        path = Path(config.scontrol)
        near = path.name != config.scontrol
        self._squeue, self._scancel = (str(path.with_name(n)) if near else n for n in ("squeue", "scancel"))
        self._timeout_s = config.timeout_s
        self._env = {"LC_ALL": "C"} | ({"SLURM_CONF": config.conf} if config.conf else {})

    def nodes(self, names: Sequence[str]) -> Mapping[str, SlurmNode]:
        """Those of `names` that Slurm knows."""
        if not names:
            return {}
        ran = self._run(self._scontrol, "-o", "show", "node", ",".join(names))
        found = parse(ran.out)
        if not found and ran.status and "not found" not in ran.err + ran.out:
            raise failure(ran.said)
        return {node.name: node for node in found}

    def update(self, node: str, **fields: str) -> None:
        self._must(self._scontrol, "update", f"nodename={node}", *(f"{key}={value}" for key, value in fields.items()))

    def jobs(self, node: str) -> tuple[str, ...]:
        """Ids of jobs (of an array: of its tasks) that hold something of the node now."""
        states = "running,suspended,completing,configuring,stopped"
        ran = self._must(self._squeue, "--noheader", f"--nodelist={node}", f"--states={states}", "--format=%A")
        return tuple(dict.fromkeys(ran.out.split()))

    def requeue(self, job: str) -> None:
        self._must(self._scontrol, "requeue", job)

    def save_signal(self, job: str) -> SaveSignal | None:
        """Return the signal in a job's comment, else that of its batch script; None: neither names one."""
        shown = self._must(self._scontrol, "-o", "show", "job", job).out
        if (found := of_comment(shown)) is not None:
            return found
        if " BatchFlag=0" in shown:  # salloc and srun have no script
            return None
        script = self._must(self._scontrol, "write", "batch_script", job, "-").out
        if not script.strip():  # some versions end well without having it
            raise failure(f"the batch script of job {job} could not be read")
        return of_script(script)

    def signal(self, job: str, signal: SaveSignal) -> None:
        """See scancel(1): without --batch all steps get it, and the batch script does not."""
        self._must(self._scancel, f"--signal={signal.name}", *(["--batch"] if signal.to_script else []), job)

    def _must(self, *words: str) -> Ran:
        ran = self._run(*words)
        if ran.status:
            raise failure(ran.said)
        return ran

    def _run(self, *words: str) -> Ran:
        return run(words, self._timeout_s, env=self._env)


def parse(text: str) -> list[SlurmNode]:
    """Of `scontrol -o show node`."""
    begins = [found.start() for found in _NODE.finditer(text)]
    return [_node(text[begin:end]) for begin, end in itertools.pairwise([*begins, len(text)])]


def _node(entry: str) -> SlurmNode:
    name = _NODE.match(entry)
    reason = _REASON.search(entry)
    plain = entry[: reason.start()] if reason else entry
    state = re.search(r" State=(\S+)", plain)
    weight = re.search(r" Weight=(\d+)", plain)
    if name is None or state is None or weight is None:
        raise ActError(f"scontrol printed something other than a node: {entry[:80]!r}; is this Slurm 20.02 or newer?")
    return SlurmNode(
        name[1], states_of(state[1].split("+")), int(weight[1]),
        reason[1].strip() if reason else "", reason[2] if reason else "",
    )  # fmt: skip


def states_of(words: Sequence[str]) -> frozenset[str]:
    """Base state and flags of DOWN*, MIXED+DRAIN, IDLE+NOT_RESPONDING. Signs that say more become flags."""
    bare = [word.rstrip(_SUFFIXES) for word in words]
    signs = (sign for word, name in zip(words, bare, strict=True) for sign in word[len(name) :])
    return frozenset({name.upper() for name in bare if name} | {_FLAGS[sign] for sign in signs if sign in _FLAGS})


def failure(said: str) -> ActError:
    """The error that Slurm's words stand for."""
    if any(word in said.lower() for word in _WRONG):
        return ActError(f"Slurm: {said}")
    if any(word in said.lower() for word in _AWAY):
        return AwayError(f"Slurm does not answer: {said}")
    return LaterError(f"Slurm: {said}")  # such as a right that an administrator may yet give
