"""Jobs of Slurm that hold nodes while these are probed, in a partition or QOS whose jobs others may preempt.

A job is found by its name, which carries its order's id: nothing is kept here, so that a stop between any two steps
leaves a job that the next look finds. What it runs is `drover-agent probe --hold ID`, which ends when the probe is over
or when Slurm takes the node back (docs/how-to/probe.md). Options and formats: sbatch(1), squeue(1), scancel(1).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drover_collector.actions.base import ActError
from drover_collector.actions.run_program import Ran, run
from drover_collector.actions.slurm.scontrol import failure
from drover_collector.probes.settings import HoldConfig

NAME = "drover-probe."
GONE = ("already complet", "invalid job id")
NICE = 10_000  # behind all that wait in the partition
ENDS = frozenset({"COMPLETING", "STAGE_OUT"})


@dataclass(frozen=True, slots=True)
class HoldJob:
    """`state`: Slurm's word. `reason`: why it waits."""

    id: str
    order: str
    state: str
    reason: str = ""

    @property
    def runs(self) -> bool:
        return self.state == "RUNNING"

    @property
    def ends(self) -> bool:
        return self.state in ENDS


class SlurmHolds:
    """All raise ActError or its kind: what Slurm says, or that it does not answer."""

    def __init__(self, config: HoldConfig) -> None:
        self._config = config
        near = Path(config.sbatch)
        self._squeue, self._scancel = (
            str(near.with_name(name)) if near.name != config.sbatch else name for name in ("squeue", "scancel")
        )
        # Nothing else of this process' environment: sbatch would hand it to the job, passwords too.
        kept = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
        kept |= (
            {"SLURM_CONF": config.conf or os.environ["SLURM_CONF"]} if config.conf or "SLURM_CONF" in os.environ else {}
        )
        self._env = ["/usr/bin/env", "-i", *(f"{key}={value}" for key, value in kept.items())]

    def look(self) -> Mapping[str, HoldJob]:
        """Order -> its job, of those that have not ended."""
        ran = self._must(self._squeue, "--noheader", f"--user={os.getuid()}", "--format=%A|%T|%j|%r")
        found = {}
        for line in ran.out.splitlines():
            job, state, name, reason = (line.split("|", 3) + [""] * 3)[:4]
            if name.startswith(NAME):
                order = name.removeprefix(NAME)
                found[order] = HoldJob(job, order, state, reason)
        return found

    def submit(self, order: str, node: str, minutes: int) -> None:
        """A job that has all of `node` for so long at most, once nothing runs there."""
        config = self._config
        where = {"partition": config.partition, "qos": config.qos, "account": config.account}
        words = [
            config.sbatch, f"--job-name={NAME}{order}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--exclusive",
            "--no-requeue", f"--time={minutes}", f"--nice={NICE}", "--output=/dev/null", "--chdir=/", "--parsable",
            *(f"--{key}={value}" for key, value in where.items() if value), *config.options,
            f"--wrap=exec {config.agent} probe --hold {order}",
        ]  # fmt: skip
        self._must(*words)

    def end(self, job: str) -> None:
        try:
            self._must(self._scancel, job)
        except ActError as error:  # it has ended since it was seen
            if not any(word in str(error).lower() for word in GONE):
                raise

    def _must(self, *words: str) -> Ran:
        try:
            ran = run([*self._env, *words], self._config.timeout_s)
        except ActError as error:
            raise type(error)(str(error).replace("/usr/bin/env", words[0])) from None
        if ran.status:
            raise failure(ran.said)
        return ran
