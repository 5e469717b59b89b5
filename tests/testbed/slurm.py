"""A real Slurm in a folder: munge, slurmctld and one slurmd for each node, all on this machine and of their own.

Debian bookworm's packages (22.05), or where a test says so those of trixie (24.11), which tests/slurm_setup.sh has put
next to the system; they are started through its `enter`. GPUs are device files
called nvidiaN with nothing behind them, enough for Slurm to hand them out and to show jobs which they have. Needs root.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from testbed.system_processes import free_port, listens, reachable
from testbed.waiting import wait_until

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "scontrol", "sbatch", "scancel", "squeue")
NEWER = Path("/var/cache/drover-testbed/slurm-24.11")
PREEMPTED = """PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=probes Nodes={nodes} PriorityTier=0 PreemptMode=CANCEL GraceTime=0 MaxTime=INFINITE State=UP"""
START_S = 300.0  # a second where nothing else runs
STOP_S = 15.0


@dataclass(frozen=True)
class Slurm:
    """A running one."""

    folder: Path
    nodes: tuple[str, ...]
    env: Mapping[str, str]
    prefix: tuple[str, ...] = ()  # of all its commands
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def stop(self, name: str) -> None:
        """End one of its programs, such as slurmctld."""
        child = self.children.pop(name)
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(STOP_S)

    def start(self, name: str, words: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("a") as log:
            self.children[name] = subprocess.Popen(
                [*self.prefix, *words], env=self.env, stdout=log, stderr=log, cwd=self.folder
            )

    def start_controller(self) -> None:
        """slurmctld; also again, after `stop("slurmctld")`."""
        self.start("slurmctld", ["slurmctld", "-D", "-f", str(self.folder / "slurm.conf")])

    def start_rest(self, auth: str, address: str) -> None:
        """slurmrestd, its REST API, with this rest_auth plugin, at `unix:/PATH` or `127.0.0.1:PORT`; listening."""
        # By itself it would not run as root or SlurmUser, and without accounting nobody else may change a node.
        words = ["env", "SLURMRESTD_SECURITY=disable_user_check", *(["SLURM_JWT=daemon"] if auth == "jwt" else [])]
        words += ["slurmrestd", "-a", f"rest_auth/{auth}", "-s", "slurmctld" if self.prefix else "v0.0.38"]
        self.start(f"slurmrestd-{auth}", [*words, address])
        host, _, at = address.partition(":")
        wait_until(
            lambda: listens(Path(at)) if host == "unix" else reachable(host, int(at)), "slurmrestd listens", START_S
        )

    def command(self, *words: str) -> str:
        """What a Slurm command prints; it must succeed."""
        done = subprocess.run(
            [*self.prefix, *words],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def submit(self, script: str, *options: str) -> str:
        """The id of a batch job."""
        words = ["sbatch", "--parsable", f"--output={self.folder}/%j.out", *options, f"--wrap={script}"]
        return self.command(*words).strip().partition(";")[0]

    def states(self) -> dict[str, str]:
        """Job -> its state, for jobs that Slurm still knows of; an array's tasks as ID_TASK."""
        lines = self.command("squeue", "--noheader", "--format=%i %T", "--states=all").splitlines()
        return dict(line.split() for line in lines)

    def wait_for(self, job: str, state: str) -> None:
        self.wait(lambda: self.states().get(job) == state, f"job {job} is {state}")

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Return when `condition()` is true; fail with what Slurm's programs have said."""
        try:
            wait_until(condition, what, START_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log")))


@contextmanager
def running(
    folder: Path,
    nodes: Sequence[str] = ("gpu01",),
    gpus: int = 8,
    *,
    newer: bool = False,
    probes: bool = False,
    settings: Sequence[str] = (),
) -> Iterator[Slurm]:
    """Slurm with these nodes, all idle, while inside. `newer`: 24.11, with tokens for its REST API.

    `probes`: with a partition of that name, whose jobs those of the other one preempt. `settings`: further lines of
    slurm.conf.
    """
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    assert not missing, f"{', '.join(missing)} not found: tests/system_setup.sh installs Slurm"
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    assert not newer or (NEWER / "enter").exists(), f"{NEWER} is missing: tests/slurm_setup.sh makes it"
    more = [*(PREEMPTED.format(nodes=",".join(nodes)).split("\n") if probes else ()), *settings]
    _configure(folder, nodes, gpus, newer, more)
    slurm = Slurm(folder, tuple(nodes), env, (str(NEWER / "enter"), str(folder)) if newer else ())
    with ExitStack() as stack:
        munge = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.sock"]
        munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "seed")]
        stack.callback(_stop_all, slurm)
        replace(slurm, prefix=()).start("munge", munge)
        wait_until(lambda: listens(folder / "munge.sock"), "munged listens", START_S)
        slurm.start_controller()
        for node in nodes:
            slurm.start(f"slurmd-{node}", ["slurmd", "-D", "-N", node, "-f", str(folder / "slurm.conf")])
        slurm.wait(lambda: _idle(slurm), "all nodes are idle")
        try:
            yield slurm
        finally:
            for more in (["--signal=KILL"], []):
                subprocess.run([*slurm.prefix, "scancel", "--user=root", *more], env=env, check=False, timeout=120)
            slurm.wait(lambda: not _active(slurm), "all jobs have ended")


def _configure(folder: Path, nodes: Sequence[str], gpus: int, newer: bool, more: Sequence[str]) -> None:
    host = socket.gethostname().partition(".")[0]
    (folder / "state").mkdir()
    lines = [
        "ClusterName=drover", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={free_port()}", "SlurmUser=root",
        "SlurmdUser=root", "AuthType=auth/munge",
        # A requeued job begins when its credential has expired, 120 s by default, at the next look at the queue.
        f"AuthInfo=socket={folder}/munge.sock,cred_expire=5",
        "SchedulerParameters=sched_interval=1,bf_interval=1,nohold_on_prolog_fail",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core", "ReturnToService=2", "MpiDefault=none", "GresTypes=gpu", "MinJobAge=300",
        "JobAcctGatherType=jobacct_gather/none", "PropagateResourceLimits=NONE", "InactiveLimit=0", "KillWait=2",
        "SlurmdParameters=config_overrides",
        f"StateSaveLocation={folder}/state", f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid", f"SlurmdSpoolDir={folder}/spool-%n",
    ]  # fmt: skip
    for node in nodes:
        (folder / f"spool-{node}").mkdir()
        lines.append(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8 Gres=gpu:{gpus}"
        )
    lines.append(f"PartitionName=all Nodes={','.join(nodes)} Default=YES MaxTime=INFINITE State=UP")
    lines += more
    if newer:
        lines += ["AuthAltTypes=auth/jwt", f"AuthAltParameters=jwt_key={folder}/jwt.key"]
        (folder / "jwt.key").write_bytes(os.urandom(32))
        (folder / "jwt.key").chmod(0o600)
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    for gpu in range(gpus):
        os.mknod(folder / f"nvidia{gpu}", stat.S_IFCHR | 0o600, os.makedev(195, gpu))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/nvidia[0-{gpus - 1}]\n")
    # Named so that slurmd need not find out; unused.
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={'disabled' if newer else 'cgroup/v1'}\n")
    subprocess.run(["mungekey", "--create", f"--keyfile={folder}/munge.key"], check=True, env={"PATH": _path()})


def _stop_all(slurm: Slurm) -> None:
    for name in reversed(slurm.children.copy()):
        slurm.stop(name)


def _idle(slurm: Slurm) -> bool:
    done = subprocess.run(
        [*slurm.prefix, "sinfo", "--noheader", "--Node", "--partition=all", "--format=%T"], env=slurm.env,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode == 0 and done.stdout.split() == ["idle"] * len(slurm.nodes)


def _active(slurm: Slurm) -> bool:
    return any(state in ("PENDING", "RUNNING", "COMPLETING") for state in slurm.states().values())


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
