"""Make a corpus of jobs that really ran and really failed: torch over gloo, four ranks, one fault each, ground truth.

    nice python benchmarks/job_corpus.py --runs 160 --out /tmp/jobs
    python benchmarks/job_corpus.py --pack /tmp/jobs

Run number N has the fault KINDS[(N // 2) % len(KINDS)]. Even numbers tune, odd numbers score: fixed before any run.
All else (rank, step, message, form of the log, launcher, dumps) is drawn from the number as seed. Needs root for the
cgroup (v1 or v2) in which the kernel kills for memory, and for the file system that is full.

What is real: the processes, their faults, their tracebacks, torchrun's output, the flight recorder's dumps, the
kernel's line of an OOM kill. What stands in: this launcher writes srun's and slurmstepd's lines in the form of Slurm's
source (src/slurmd/slurmstepd/req.c, _handle_signal_container) and of published logs, and names nodes n07 and n08.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import os
import random
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATA = HERE / "data" / "jobs"
RANKS = 4
NODES = ("n07", "n07", "n08", "n08")
KINDS = (
    "healthy", "skip", "order", "size", "dead", "stopped", "oom", "exception", "loader", "storage", "slow",
    "time_limit", "cancel", "skip", "exception", "healthy",
)  # fmt: skip
NOISE = (
    "retrying after OSError: [Errno 5] Input/output error",
    "NCCL WARN is off; gloo is used",
    "CUDA out of memory is not possible on CPU: no memory fraction is set",
    "caught ValueError: bad sample 17, skipped",
    "Connection reset by peer while asking the tracking server, trying again",
    "Traceback (most recent call last):",
    "time limit of this job is 24:00:00",
)
MESSAGES = (
    "expected 3 channels, got 4", "loss is nan at step 7", "shape mismatch: (8, 12) and (8, 13)", "token id 50277",
    "no timeout is set for the killed worker", "the file was closed by peer review", "index 64 is out of bounds",
)  # fmt: skip


def plan(number: int) -> dict[str, Any]:
    """Everything about a run, from its number alone."""
    rng = random.Random(f"job-{number}")
    kind = KINDS[(number // 2) % len(KINDS)]
    how = {
        "skip": ["busy", "goes_on"], "order": ["broadcast", "gather", "barrier"], "size": ["larger", "odd"],
        "dead": ["kill", "segv"], "oom": ["cgroup", "cgroup", "rlimit"], "storage": ["save", "write", "io", "many"],
        "cancel": ["user", "preempted", "user", "node"],
    }.get(kind, [""])  # fmt: skip
    launcher = rng.choice(["files", "files", "labelled", "labelled", "labelled", "merged", "merged", "torchrun", "tee"])
    if kind == "oom" or launcher in ("files", "labelled"):
        launcher = rng.choice(["files", "labelled"]) if kind == "oom" else launcher
    steps = rng.randint(12, 20)
    return {
        "number": number, "half": "score" if number % 2 else "tune", "seed": number, "kind": kind,
        "how": rng.choice(how), "launcher": launcher, "rank": rng.randrange(RANKS), "steps": steps,
        "at": rng.randint(3, steps - 4), "pause": rng.choice([0.01, 0.03, 0.05]), "timeout": 2.0,
        "slow_by": rng.choice([0.05, 0.12]), "evaluate": rng.random() < 0.3, "size": rng.choice([10, 64, 4096]),
        "second": rng.choice(["barrier", "broadcast", "none"]), "noisy": rng.choice([-1, -1, 0, 1, 2, 3]),
        "noise": rng.sample(NOISE, 2), "all_log": rng.random() < 0.5, "say_node": rng.random() < 0.6,
        "dumps": rng.choice(["always", "always", "error", ""]),
        "dump_form": "json" if launcher in ("torchrun", "tee") else rng.choice(["json", "pickle"]),
        "exception": rng.choice(["ValueError", "KeyError", "RuntimeError", "AssertionError", "IndexError",
                                 "TypeError", "ZeroDivisionError"]),
        "message": rng.choice(MESSAGES), "loader_workers": rng.choice([0, 1]), "says_done": rng.random() < 0.5,
        "destroy": rng.random() < 0.7, "line_form": rng.choice(["plain", "time", "iso"]),
        "slurm": launcher in ("files", "labelled", "merged") and rng.random() < 0.75,
        "kernel_log": rng.random() < 0.5, "slurm_oom": rng.random() < 0.6, "give_exit": rng.random() < 0.5,
        "ansi": rng.random() < 0.15,
    }  # fmt: skip


CLASSES = {
    "healthy": "ended_normally", "slow": "ended_normally",
    "order": "collective_mismatch", "size": "collective_mismatch",
    "dead": "peer_died", "stopped": "collective_timeout", "oom": "host_oom", "exception": "program",
    "loader": "program", "storage": "storage", "time_limit": "time_limit",
}  # fmt: skip


def truth(job: dict[str, Any]) -> dict[str, Any]:
    """The class, and the rank that is to blame (None: nobody is)."""
    kind, how = job["kind"], job["how"]
    if kind == "skip":
        found = "collective_timeout" if how == "busy" else "collective_mismatch"
    elif kind == "dead":
        found = "program" if how == "segv" else "peer_died"
    elif kind == "cancel":
        found = "node_lost" if how == "node" else "cancelled"
    else:
        found = CLASSES[kind]
    blamed = None if kind in ("healthy", "time_limit", "cancel") else job["rank"]
    return {"class": found, "rank": blamed, "node": None if blamed is None else NODES[blamed]}


class Cgroup:
    """A memory limit that the kernel enforces by killing. Version 1 or 2, whichever is mounted."""

    def __init__(self, number: int, limit: int) -> None:
        old = Path("/sys/fs/cgroup/memory")
        self.path = (old if old.is_dir() else Path("/sys/fs/cgroup")) / f"drover-jobs-{os.getpid()}-{number}"
        self.path.mkdir()
        (self.path / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(str(limit))

    def remove(self) -> None:
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)
        print(f"{self.path} stays", file=sys.stderr)


class Log:
    """The lines of all ranks as the launcher's form writes them down."""

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        self.form, self.folder, self.ansi = job["launcher"], folder, job["ansi"]
        self.files: dict[str, io.BufferedWriter] = {}

    def of_rank(self, rank: int, line: bytes) -> None:
        if self.ansi and b"Error" in line:
            line = b"\x1b[1;31m" + line + b"\x1b[0m"
        if self.form == "files":
            self._write(f"rank_{rank}.log", line)
        elif self.form == "labelled":
            self._write("job.log", b"%d: %s" % (rank, line))
        else:
            self._write("job.log", line)

    def of_launcher(self, line: str) -> None:
        self._write("slurm-4711.out" if self.form == "files" else "job.log", line.encode())

    def _write(self, name: str, line: bytes) -> None:
        if name not in self.files:
            self.files[name] = (self.folder / name).open("ab")
        self.files[name].write(line + b"\n")

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def fork_rank(job: dict[str, Any], rank: int, port: int) -> tuple[int, int]:
    """Return (pid, end of a pipe with all that the rank writes). torch is loaded already, which saves seconds."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank % 2), "MASTER_PORT": str(port),
                   "MASTER_ADDR": "127.0.0.1", "JOB": json.dumps(job), "SLURMD_NODENAME": NODES[rank]}  # fmt: skip
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # open until the process ends
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  # the same
    import job_corpus_rank

    code = 0
    try:
        job_corpus_rank.main()
    except BaseException:  # noqa: BLE001  # as the interpreter does at its top
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    os._exit(code)


def stamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")


def taskline(rank: int, status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    words = {-9: "Killed", -11: "Segmentation fault", -6: "Aborted", -15: "Terminated"}
    how = words.get(code) or (f"Exited with exit code {code}" if code > 0 else f"signal {-code}")
    return f"srun: error: {NODES[rank]}: task {rank}: {how}"


class Ranks:
    """Four forked ranks and their pipes."""

    def __init__(self, job: dict[str, Any], log: Log, port: int) -> None:
        self.job, self.log = job, log
        self.selector = selectors.DefaultSelector()
        self.left: dict[int, int] = {}  # pid -> rank
        self.status: dict[int, int] = {}
        for rank in range(RANKS):
            pid, pipe = fork_rank(job, rank, port)
            self.left[pid] = rank
            os.set_blocking(pipe, False)
            self.selector.register(pipe, selectors.EVENT_READ, [rank, b""])

    def pump(self, seconds: float) -> None:
        for key, _ in self.selector.select(seconds):
            data = os.read(key.fd, 1 << 16)
            rank, held = key.data
            *lines, key.data[1] = (held + data).split(b"\n")
            for line in lines:
                self.log.of_rank(rank, line)
            if not data:
                if key.data[1]:
                    self.log.of_rank(rank, key.data[1])
                self.selector.unregister(key.fd)
                os.close(key.fd)

    def reap(self) -> list[int]:
        """Return the ranks that ended just now."""
        ended = []
        for pid, rank in list(self.left.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.left[pid]
                self.status[rank] = status
                ended.append(rank)
        return ended

    def kill(self, number: int) -> None:
        for pid in self.left:
            os.kill(pid, number)


def by_srun(job: dict[str, Any], folder: Path, port: int) -> int:
    """Run the ranks as srun does: one that fails ends all, after a second. Returns: the job's exit code."""
    log = Log(job, folder)
    ranks = Ranks(job, log, port)
    begun, failed_at, ended_by = time.monotonic(), 0.0, 0
    while ranks.left:
        ranks.pump(0.02)
        for rank in ranks.reap():
            if ranks.status[rank] and not ended_by:
                ranks.pump(0.1)
                if job["slurm"]:
                    log.of_launcher(taskline(rank, ranks.status[rank]))
                failed_at = failed_at or time.monotonic()
        now = time.monotonic()
        stops = job["kind"] in ("time_limit", "cancel") and now - begun > 1.2
        if not ended_by and (stops or (failed_at and now - failed_at > 3.0) or now - begun > 25):
            if job["slurm"] or stops:
                say_end(job, log, failed_at > 0)
            ranks.kill(signal.SIGTERM)
            ended_by = 1
            stop_at = now + 0.7
        if ended_by == 1 and now > stop_at:
            ranks.kill(signal.SIGKILL)
            ended_by = 2
    for _ in range(20):
        ranks.pump(0.01)
    if job["slurm"] and job["kind"] == "oom" and job["how"] == "cgroup" and job["slurm_oom"]:
        some = "Some of the step tasks have been OOM Killed."
        log.of_launcher(f"slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. {some}")
    log.close()
    codes = [os.waitstatus_to_exitcode(status) for status in ranks.status.values()]
    return max((128 - code if code < 0 else code for code in codes), default=0)


def say_end(job: dict[str, Any], log: Log, failed: bool) -> None:
    """Slurm's words when it ends a step: for its own reasons, or because a task failed (--kill-on-bad-exit)."""
    why = {"time_limit": " DUE TO TIME LIMIT"}.get(job["kind"], "")
    if job["kind"] == "cancel":
        why = {"preempted": " DUE TO PREEMPTION", "user": "",
               "node": " DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"}[job["how"]]  # fmt: skip
    if not failed or job["slurm"]:
        if job["how"] == "node" and job["kind"] == "cancel":
            log.of_launcher("srun: error: Node failure on n08")
        log.of_launcher("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.")
        log.of_launcher(f"slurmstepd: error: *** STEP 4711.0 ON n07 CANCELLED AT {stamp()}{why} ***")


def by_torchrun(job: dict[str, Any], folder: Path, port: int) -> int:
    """Run the ranks under the real torchrun, without or with prefixes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS),
               "--master-port", str(port), "--monitor-interval", "0.2"]  # fmt: skip
    if job["launcher"] == "tee":
        command += ["--tee", "3", "--log-dir", str(folder / "torchrun")]
    env = {**os.environ, "JOB": json.dumps(job), "OMP_NUM_THREADS": "1"}
    with (folder / "job.log").open("ab") as log:
        process = subprocess.Popen([*command, str(HERE / "job_corpus_rank.py")], stdout=log, stderr=log, env=env)
        if job["kind"] in ("time_limit", "cancel"):
            time.sleep(9)
            holder = Log({**job, "launcher": "merged"}, folder)
            say_end(job, holder, False)
            holder.close()
            process.terminate()
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    shutil.rmtree(folder / "torchrun", ignore_errors=True)
    return 128 - code if code < 0 else code


def kernel_lines() -> list[str]:
    done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", check=False)
    return done.stdout.splitlines()


def run(number: int, out: Path) -> dict[str, Any]:
    job = plan(number)
    folder = out / f"run-{number:04d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    full = Path(tempfile.mkdtemp(prefix="full-"))
    job |= {"folder": str(folder), "full": str(full)}
    if job["kind"] in ("time_limit", "cancel"):
        job["steps"] = 4000
    before, cgroup = set(kernel_lines()), None
    if job["kind"] == "storage":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(full)], check=True)
    if job["kind"] == "oom" and job["how"] == "cgroup":
        cgroup = Cgroup(number, 700 << 20)
        job["cgroup"] = str(cgroup.path)
    begun = time.monotonic()
    port = 20000 + os.getpid() % 5000 + number
    try:
        code = (by_torchrun if job["launcher"] in ("torchrun", "tee") else by_srun)(job, folder, port)
    finally:
        if job["kind"] == "storage":
            subprocess.run(["umount", str(full)], check=True)
        shutil.rmtree(full)
        if cgroup:
            cgroup.remove()
    new = (
        [line for line in kernel_lines() if line not in before and re.search("memory|oom", line, re.I)]
        if cgroup
        else []
    )
    if cgroup and (job["kernel_log"] or not job["slurm"] or not job["slurm_oom"]):
        (folder / "kernel-n07-n08.log").write_text("\n".join(new[-12:]) + "\n")
    for part in folder.glob(".*"):
        part.unlink()
    happened = cgroup is None or any("Killed process" in line for line in new)
    found = {
        **truth(job), **{name: job[name] for name in ("number", "half", "kind", "how", "launcher", "give_exit")},
        "dumps": bool(list(folder.glob("*trace*"))), "exit": code, "happened": happened,
        "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip
    (folder / "truth.json").write_text(json.dumps(found) + "\n")
    return found


def pack(out: Path) -> None:
    """Write both halves as DATA/tune.tar.xz and DATA/score.tar.xz, without owners and times.

    A run whose fault did not take place is left out: a rank that the kernel was to kill, and the job ended before.
    """
    DATA.mkdir(parents=True, exist_ok=True)
    for half in ("tune", "score"):
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as tar:
            for folder in sorted(out.glob("run-*")):
                found = json.loads((folder / "truth.json").read_text())
                if found["half"] != half or not found.get("happened", True):
                    continue
                for path in sorted(folder.iterdir()):
                    data = path.read_bytes()
                    info = tarfile.TarInfo(f"{folder.name}/{path.name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        (DATA / f"{half}.tar.xz").write_bytes(lzma.compress(made.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=160)
    parser.add_argument("--only", help="numbers, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("/tmp/jobs"))
    parser.add_argument("--pack", type=Path, help="pack the runs of this folder")
    args = parser.parse_args()
    if args.pack:
        pack(args.pack)
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "100", "PYTHONUNBUFFERED": "1"}
    sys.path.insert(0, str(HERE))
    import job_corpus_rank  # noqa: F401  # loads torch once; ranks are forked
    from torch._C._profiler import gather_traceback, symbolize_tracebacks

    symbolize_tracebacks([gather_traceback(True, False, False)])  # the first time takes 5 s of CPU, in each process

    numbers = [int(each) for each in args.only.split(",")] if args.only else range(args.runs)
    for number in numbers:
        print(json.dumps(run(number, args.out)), flush=True)


if __name__ == "__main__":
    main()
