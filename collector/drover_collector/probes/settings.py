"""The [probes] table of the collector's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from drover_core.model.probe_figures import LEVELS
from drover_core.settings import (
    SettingsError,
    between,
    one_of,
    setting,
)


def _ports(value: str) -> str | None:
    first, _, last = value.partition("-")
    if first.isdigit() and last.isdigit() and 1024 <= int(first) <= int(last) < 65_536:
        return None
    return "must be two ports from 1024 to 65535, as in 29500-29599"


@dataclass(frozen=True, slots=True)
class HoldConfig:
    """The [probes.slurm] table; on when it names a partition or a QOS."""

    partition: str = setting(
        "", "partition for jobs that hold nodes while these are probed; others must preempt its jobs"
    )
    qos: str = setting("", "a QOS for the same jobs, with the partition or instead of it; neither: no job holds nodes")
    account: str = setting("", "account of these jobs")
    pools: tuple[str, ...] = setting((), "pools whose nodes are held so; none: all nodes")
    options: tuple[str, ...] = setting((), 'more options of sbatch, as "--reservation=probes"')
    sbatch: str = setting("sbatch", "the program, or its path; squeue and scancel are searched in the same folder")
    conf: str | None = setting(None, "slurm.conf of the cluster; none: as for any Slurm command (SLURM_CONF)")
    agent: str = setting("/opt/drover/bin/drover-agent", "the agent's program on the nodes, which the job runs")
    wait_s: float = setting(
        900.0, "a job that has not begun by then is taken back, and its order has failed", between(10, 86_400)
    )
    timeout_s: float = setting(10.0, "longest wait for one answer of slurmctld", between(1, 120))

    @property
    def on(self) -> bool:
        return bool(self.partition or self.qos)


@dataclass(frozen=True, slots=True)
class ProbesConfig:
    confirm: bool = setting(False, "in observe mode too: probe what is suspected, where no process holds the GPU")
    baseline: bool = setting(False, "probe a node whose driver or firmware has changed, once nothing runs there")
    admit: bool = setting(False, "probe a node that was never probed, while nothing runs there")
    idle_share_per_day: float = setting(
        0.0, "share of the nodes that are probed each day while nothing runs there; 0: none", between(0, 1)
    )
    level: str = setting("quick", "level of all probes that Drover asks for by itself", one_of(*LEVELS))
    idle_for_s: float = setting(900.0, "a node is idle when nothing has run there for this long", between(60, 86_400))
    most_at_once: int = setting(8, "orders under way in the fleet at once", between(1, 10_000))
    most_per_rack: int = setting(2, "orders under way in one rack at once", between(1, 1000))
    group_ports: str = setting(
        "29500-29599", "ports at which the first node of a group listens, FIRST-LAST, one for each group", _ports
    )
    group_join_s: float = setting(60.0, "how long the nodes of a group wait for each other", between(5, 600))
    wait_s: float = setting(900.0, "an order whose node has no stream for this long has failed", between(10, 86_400))
    slurm: HoldConfig = field(default_factory=HoldConfig)

    @property
    def ports(self) -> range:
        first, _, last = self.group_ports.partition("-")
        return range(int(first), int(last) + 1)


def validate_probes(config: ProbesConfig) -> None:
    """
    Raises:
        SettingsError: one line, what does not go together and what to do.
    """
    given = [key for key in ("account", "pools", "options", "conf") if getattr(config.slurm, key)]
    if given and not config.slurm.on:
        raise SettingsError(f"probes.slurm.{given[0]}: name a partition or a qos too, whose jobs others may preempt")
    if config.slurm.conf is not None and not Path(config.slurm.conf).is_file():
        raise SettingsError(f"probes.slurm.conf: {config.slurm.conf}: no such file")
    if " " in config.slurm.agent or not config.slurm.agent.startswith("/"):
        raise SettingsError(
            f"probes.slurm.agent: {config.slurm.agent!r}: must be a path that begins with /, without spaces"
        )
