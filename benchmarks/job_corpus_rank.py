"""One rank of a job of benchmarks/job_corpus.py: a small training loop over gloo, with one fault.

The launcher describes the job in the environment variable JOB, as JSON. Nothing here knows how a log is judged.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data

MIB = 2**20
WRITING = threading.Lock()


class Samples(torch.utils.data.Dataset[torch.Tensor]):  # type: ignore[misc]  # mypy does not read torch
    """Samples; one cannot be read."""

    def __init__(self, job: dict[str, Any], bad: bool) -> None:
        self.job, self.bad = job, bad

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> torch.Tensor:
        if self.bad and at == 8:
            raise EXCEPTIONS[self.job["exception"]](self.job["message"])
        return torch.ones(8)


EXCEPTIONS: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (ValueError, KeyError, RuntimeError, AssertionError, IndexError, TypeError, ZeroDivisionError)
}


def dump(job: dict[str, Any], rank: int) -> None:
    """Write the flight recorder as PyTorch does: pickle or JSON, the rank at the end of the name."""
    import torch._C._distributed_c10d as c10d

    if not job["dumps"]:
        return
    if job["dump_form"] == "json":
        made = c10d._dump_fr_trace_json()
        data, name = (made.encode() if isinstance(made, str) else made), f"trace_rank_{rank}.json"
    else:
        data, name = c10d._dump_fr_trace(), f"comm_lib_trace_rank_{rank}"
    path = Path(job["folder"]) / name
    part = path.with_name(f".{path.name}")
    with WRITING:
        part.write_bytes(data)
        part.rename(path)


def keep_dumping(job: dict[str, Any], rank: int) -> None:
    while True:
        time.sleep(0.6)
        dump(job, rank)


def misbehave(job: dict[str, Any], rank: int, x: torch.Tensor) -> torch.Tensor | None:
    """Do what the job's fault is. Returns: the tensor to go on with; None: leave the collective out."""
    kind, how = job["kind"], job["how"]
    if kind == "skip":
        if how == "busy":
            time.sleep(60)
        return None
    if kind == "order":
        if how == "broadcast":
            dist.broadcast(x, 0)
        elif how == "gather":
            dist.all_gather([torch.empty_like(x) for _ in range(dist.get_world_size())], x)
        else:
            dist.barrier()
    elif kind == "size":
        return torch.ones(x.numel() * (2 if how == "larger" else 1) + (0 if how == "larger" else 7))
    elif kind == "dead":
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "segv": signal.SIGSEGV}[how])
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "oom":
        held = []
        if how == "rlimit":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 64 * MIB, resource.RLIM_INFINITY))
        while True:
            held.append(torch.ones(8 * MIB) if job["seed"] % 2 else bytearray(os.urandom(MIB)) * 16)
    elif kind == "exception":
        raise EXCEPTIONS[job["exception"]](job["message"])
    elif kind == "storage":
        write_until_it_fails(job, rank, how)
    return x


def write_until_it_fails(job: dict[str, Any], rank: int, how: str) -> None:
    full = Path(job["full"])
    if how == "save":
        torch.save({"weights": torch.ones(4 * MIB)}, full / f"checkpoint-{rank}.pt")
    elif how == "write":
        with (full / f"shard-{rank}.bin").open("wb") as file:
            file.write(bytes(16 * MIB))
    elif how == "io":
        with Path("/proc/self/mem").open("rb", buffering=0) as file:  # address 0 is not mapped: the kernel answers EIO
            file.read(4096)
    else:
        for at in range(100_000):
            (full / f"log-{at}").write_bytes(bytes(65536))


def chatter(job: dict[str, Any], rank: int, step: int, log: logging.Logger) -> None:
    """Write what healthy loops write, and what looks like a fault and is none."""
    if job["all_log"] or rank == 0:
        log.info("step %d loss %.4f tokens/s %d", step, 8 / (step + 3), 1000 + step)
    if step == 2 and rank == job["noisy"]:
        for line in job["noise"]:
            log.warning(line)


def train(job: dict[str, Any], rank: int, log: logging.Logger) -> None:
    rng = random.Random(job["seed"])
    loader = iter(())
    if job["kind"] == "loader":
        bad = rank == job["rank"]
        loader = iter(torch.utils.data.DataLoader(Samples(job, bad), batch_size=2, num_workers=job["loader_workers"]))
    for step in range(job["steps"]):
        time.sleep(job["pause"] * (1 + 0.3 * rng.random()))
        if job["kind"] == "loader":
            next(loader)
        if job["kind"] == "slow" and rank == job["rank"]:
            time.sleep(job["slow_by"])
        if job["evaluate"] and step == job["steps"] // 2:
            time.sleep(0.4)
            log.info("evaluation at step %d", step) if rank == 0 else None
        x: torch.Tensor | None = torch.ones(job["size"])
        if step == job["at"] and rank == job["rank"]:
            x = misbehave(job, rank, x)
        if x is not None:
            dist.all_reduce(x)
        if job["second"] == "barrier":
            dist.barrier()
        elif job["second"] == "broadcast":
            dist.broadcast(torch.ones(3), 0)
        chatter(job, rank, step, log)


def main() -> None:
    job = json.loads(os.environ["JOB"])
    form = {"plain": "%(message)s", "time": "%(asctime)s %(levelname)s %(message)s",
            "iso": "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"}[job["line_form"]]  # fmt: skip
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stdout, force=True)
    log = logging.getLogger("train")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    rank = dist.get_rank()
    dist.barrier()
    seconds = datetime.timedelta(seconds=job["timeout"])
    dist.distributed_c10d._set_pg_timeout(seconds, dist.group.WORLD)
    node = os.environ.get("SLURMD_NODENAME")
    if node and job["say_node"]:
        log.info("rank %d on %s, local rank %s", rank, node, os.environ["LOCAL_RANK"])
    if job["dumps"] == "always":
        threading.Thread(target=keep_dumping, args=(job, rank), daemon=True).start()
    if job.get("cgroup") and rank == job["rank"]:
        Path(job["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
    try:
        train(job, rank, log)
    except BaseException:
        dump(job, rank)
        raise
    dump(job, rank)
    if job["kind"] in ("skip", "order") and rank == job["rank"]:
        log.info("done")
        sys.stdout.flush()
        os._exit(0)
    if job["says_done"]:
        log.info("training finished after %d steps", job["steps"])
    if job["destroy"]:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
