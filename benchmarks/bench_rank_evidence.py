"""From the dumps of real ranks that hang to the incident that names the rank: real gloo ranks, agent and collector.

    nice python benchmarks/bench_rank_evidence.py --runs 6

A run is a collector, an agent and four ranks of torch over gloo. One rank sleeps, is stopped (SIGSTOP), or comes with
another size. Each rank that can writes its flight recorder's dump 33 s after its last step, as PyTorch's watchdog does
after its timeout, or when it fails. Time counts from the newest dump to the incident in the Fleet API.

What stands in: NVIDIA's library (tests/testbed/nvml), and the /proc in which Slurm's job 4242 has rank N on GPU N.
Writes benchmarks/data/rank_evidence.json; `bench_job_failures.py --write` makes the page of it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

DATA = Path(__file__).resolve().parent / "data/rank_evidence.json"
RANKS, CULPRIT, AT = 4, 2, 6
KINDS = ("sleeps", "stopped", "size")
TIMEOUT_S = 33.0
NODE = "node1"
FLEET = f'[[nodes]]\nnames = "{NODE}"\nrack = "r1"\nsku = "H100-SXM"\ngpus = {RANKS}\n'
# All GPUs wait in a collective's kernel.
SPIN = {
    "GPM_METRIC_ANY_TENSOR_UTIL": "0", "GPM_METRIC_DRAM_BW_UTIL": "0.2", "FI_DEV_POWER_INSTANT": "210000",
    "GPM_METRIC_PCIE_TX_PER_SEC": "0", "GPM_METRIC_PCIE_RX_PER_SEC": "0", "GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC": "0",
    "GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC": "0",
}  # fmt: skip


def rank_main(folder: Path, kind: str) -> None:
    """Train in a loop until the fault; write a dump when the last step is TIMEOUT_S ago, or at an error."""
    import torch
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    last = [time.monotonic()]

    def dump() -> None:
        (folder / f"trace_rank_{rank}").write_bytes(c10d._dump_fr_trace())

    def watch() -> None:
        while time.monotonic() - last[0] < TIMEOUT_S:
            time.sleep(0.2)
        dump()

    threading.Thread(target=watch, daemon=True).start()
    try:
        for step in range(10_000):
            x = torch.ones(64)
            if rank == CULPRIT and step == AT:
                (folder.parent / "hangs").touch()
                if kind == "sleeps":
                    time.sleep(600)
                elif kind == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    x = torch.ones(96)
            dist.all_reduce(x)
            dist.barrier()
            last[0] = time.monotonic()
            time.sleep(0.1)
    except RuntimeError:
        dump()
        time.sleep(600)


def planted_proc(folder: Path, job: str = "4242") -> Path:
    """Return a /proc in which a job of Slurm has a process on each GPU, with its rank."""
    parts = ["[proc/1]\ncomm: systemd\nstat: 1 (systemd) S 0 1 1 0 -1 4194304\ncgroup: 0::/init.scope\n"]
    step = f"0::/system.slice/slurmstepd.scope/job_{job}/step_0"
    children = " ".join(str(1000 * (n + 1)) for n in range(RANKS))
    parts.append(
        f"[proc/900]\ncomm: slurmstepd\nstat: 900 (slurmstepd) S 1 900 900 0 -1 4194304\ncgroup: {step}/slurm\n"
        f"cmdline: slurmstepd: [{job}.0]\\0\ntask/900/children: {children}\n"
    )
    parts += [
        f"[proc/{1000 * (n + 1)}]\ncomm: python\nstat: {1000 * (n + 1)} (python) S 900 1 1 0 -1 4194304\n"
        f"cgroup: {step}/user/task_{n}\nenviron: SLURM_JOB_ID={job}\\0SLURM_STEP_GPUS=0,1,2,3\\0RANK={n}\\0\n"
        for n in range(RANKS)
    ]
    from testbed.trees import plant

    (folder / "job.txt").write_text("".join(parts))
    return plant(folder / "job.txt", folder / "root") / "proc"


@contextlib.contextmanager
def ranks(folder: Path, kind: str, port: int) -> Any:
    env = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"TORCH_FR_BUFFER_SIZE": "200", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--rank-of", str(folder), "--kind", kind]
    with (folder.parent / "ranks.log").open("w") as log:
        children = [
            subprocess.Popen(command, env={**env, "RANK": str(n)}, stdout=log, stderr=log) for n in range(RANKS)
        ]
        try:
            yield children
        finally:
            for child in children:
                child.kill()
                child.wait()


def until(ready: Callable[[], Any], what: str, limit_s: float = 120.0) -> Any:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := ready():
            return found
        time.sleep(0.1)
    raise TimeoutError(f"waited {limit_s:.0f} s: {what}")


def run(kind: str, port: int) -> dict[str, Any]:
    from drover_core.model.events import Incident, from_json
    from drover_proto import fleet_pb2 as pb
    from testbed.nvml import FakeNvml, build
    from testbed.system_processes import collector, running

    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        folder = base / "4242"
        folder.mkdir()
        fake = FakeNvml(base / "nvml.script", build(base))
        fake.healthy(RANKS)
        settings = [
            f"node={NODE}", f"spool.dir={base}/spool", "batch_s=1", "kmsg_enabled=false", "steps_socket=",
            f"proc_root={planted_proc(base)}", f'rank_dumps=["{base}/{{job}}/trace_rank_*"]',
        ]  # fmt: skip
        with collector(base, FLEET) as (address, _, stub):
            args = [part for each in [*settings, f'collectors=["{address}"]'] for part in ("--set", each)]
            with running(base, "drover_agent.main", "run", *args, env={**os.environ, **fake.env()}):

                def holds() -> bool:
                    found = stub.GetNode(pb.NodeRequest(node=NODE), timeout=10)
                    return all(gpu.job == "4242" for gpu in found.gpus) and len(found.gpus) == RANKS

                until(holds, "the job holds the GPUs")
                time.sleep(45)  # the detector learns how the job works
                with ranks(folder, kind, port):
                    until((base / "hangs").exists, "the fault")
                    with fake.batch():
                        for gpu in range(RANKS):
                            for key, value in SPIN.items():
                                fake.set(gpu, key, value)

                    def named() -> Incident | None:
                        reply = stub.ListIncidents(pb.ListIncidentsRequest(state="all", limit=50), timeout=10)
                        found = [from_json(Incident, text) for text in reply.incidents_json]
                        return next((i for i in found if i.kind == "hang" and i.cause != "standstill"), None)

                    incident = until(named, "the incident", 150)
                    seen_s = time.time()
                    newest_s = max(path.stat().st_mtime for path in folder.iterdir())
                    return {
                        "kind": kind, "seconds": round(seen_s - newest_s, 1), "dumps": len(list(folder.iterdir())),
                        "right": (incident.node, incident.gpu) == (NODE, CULPRIT) and f"ank {CULPRIT} " in
                        incident.summary, "summary": incident.summary,
                    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        rank_main(args.rank_of, args.kind)
        return
    if shutil.which("gcc") is None:
        parser.error("the stand-in for NVML is compiled with gcc: apt-get install gcc libc6-dev")
    found = []
    for number in range(args.runs):
        found.append(run(KINDS[number % len(KINDS)], 29700 + number))
        print(json.dumps(found[-1]), flush=True)
    DATA.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
