"""Steps that a job repeats after its node was taken out: with and without a checkpoint before the move.

A real Slurm, a real torch job of two ranks over gloo on CPU, a real agent and a real collector in enforce mode. An XID
in the kernel log makes the policy isolate the job's node: it is drained and the job is requeued, which starts on
another node from its last checkpoint. With `save_s` in the rule the job is asked to save itself first, by the signal of
its own `#SBATCH --signal`. When in its interval between two checkpoints the fault comes is drawn for each run, the same
for both ways. Steps lost are counted in the job's own log: the last step before the move, less the first after it.

Needs root, Slurm and gcc. A run takes about a minute.

    python benchmarks/bench_save_first.py [--runs 5] [--write]     # docs/evidence/save-first.md
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from testbed.acting import POLICY, Acting, acting
from testbed.nvml import FakeNvml, build
from testbed.slurm import Slurm
from testbed.slurm import running as running_slurm
from testbed.system_processes import running
from testbed.waiting import wait_until

PAGE = ROOT / "docs/evidence/save-first.md"
EVERY, STEP_S, RANKS = 200, 0.05, 2
SAVE_S = 60
XID = "<4>NVRM: Xid (PCI:0000:3b:00): 64, pid=1, name=python, Failed to persist row remapping table"
SLOW_S = 120.0
SCRIPT = """#!/bin/sh
#SBATCH --ntasks={ranks} --requeue --open-mode=append
#SBATCH --signal=USR1@30
srun --ntasks={ranks} --kill-on-bad-exit=1 {python} {job} {folder} {every} {step_s}
"""


@dataclass(frozen=True)
class Run:
    """One move. `repeated`: steps done before it that the job does again; `detail`: what the action says."""

    way: str
    at_step: int
    repeated: int
    closed_after_s: float  # from the fault to the drain
    detail: str


def steps(folder: Path) -> list[dict[str, int]]:
    path = folder / "steps-0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def where(slurm: Slurm, job: str) -> str:
    found = slurm.command("squeue", "--noheader", "--job", job, "--format=%T %N").split()
    return found[1] if len(found) == 2 and found[0] == "RUNNING" else ""


def answered(question: Callable[[], bool]) -> bool:
    """Return its answer; False: the collector was too busy to answer in time."""
    try:
        return question()
    except grpc.RpcError:
        return False


def submit(slurm: Slurm, folder: Path, socket: Path) -> str:
    script = folder / "job.sh"
    fields = {"ranks": RANKS, "python": sys.executable, "job": ROOT / "benchmarks/save_first_job.py"}
    script.write_text(SCRIPT.format(**fields, folder=folder, every=EVERY, step_s=STEP_S))
    words = ["sbatch", "--parsable", f"--output={folder}/out", f"--export=ALL,DROVER_STEPS_SOCKET={socket}"]
    return slurm.command(*words, str(script)).strip()


def move(slurm: Slurm, one: Acting, fake: FakeNvml, folder: Path, at_step: int, way: str) -> Run:
    folder.mkdir()
    socket = folder / "steps.sock"
    job = submit(slurm, folder, socket)
    wait_until(lambda: where(slurm, job), "the job runs", SLOW_S)
    node = where(slurm, job)
    args = ["run", "--set", f"node={node}", "--set", f'collectors=["{one.agents}"]', "--set", "batch_s=1"]
    args += ["--set", f"spool.dir={folder}/spool", "--set", "kmsg_accept_user_facility=true"]
    args += ["--set", f"steps_socket={socket}"]
    with running(folder, "drover_agent.main", *args, env={**os.environ, **fake.env()}):
        wait_until(lambda: answered(lambda: one.reports(node, 0)), "the agent reports", SLOW_S)
        wait_until(lambda: any(each.get("step", 0) >= at_step for each in steps(folder)), "it trains", SLOW_S)
        began = time.monotonic()
        with Path("/dev/kmsg").open("w") as kernel_log:
            kernel_log.write(XID + "\n")
        wait_until(
            lambda: answered(lambda: any(a.state == "done" for a in one.actions(node))), "the node is isolated", SLOW_S
        )
        closed_after_s = time.monotonic() - began
        try:
            wait_until(lambda: any(each["attempt"] > 0 for each in steps(folder)), "it has started again", SLOW_S)
        except AssertionError as error:
            said = (folder / "out").read_text()[-3000:]
            raise AssertionError(f"{error}\n{said}\n{slurm.command('scontrol', 'show', 'job', job)}") from None
    slurm.command("scancel", "--signal=KILL", job)
    slurm.command("scancel", job)
    (action,) = one.actions(node)
    first = [each.get("step", 0) for each in steps(folder) if each["attempt"] == 0]
    again = next(each["begins_at"] for each in steps(folder) if each["attempt"] > 0)
    made = Run(
        way,
        max(first),
        max(first) - again,
        closed_after_s,
        action.detail.replace(f"job {job}", "the job").replace("requeued: " + job, "requeued: the job"),
    )
    print(json.dumps(made.__dict__), flush=True)
    return made


def measure(runs: int, seed: int) -> list[Run]:
    draw = random.Random(seed)
    at_steps = [EVERY + draw.randrange(EVERY) for _ in range(runs)]
    made = []
    with tempfile.TemporaryDirectory(prefix="drover-save-") as name:
        folder = Path(name)
        (folder / "slurm").mkdir()
        (folder / "nvml").mkdir()
        fake = FakeNvml(folder / "nvml.script", build(folder / "nvml"))
        fake.healthy(8)
        nodes = [f"gpu{number:02d}" for number in range(1, 2 * runs + 2)]
        with running_slurm(folder / "slurm", nodes) as slurm:
            for way, rule in (("without", ""), ("with", f"save_s = {SAVE_S}\n")):
                policy = POLICY.replace('action = "drain"\n', f'action = "isolate"\n{rule}')
                policy = policy.replace('kind = ["xid"]', 'kind = ["xid", "memory"]')
                with acting(folder / way, slurm, policy=policy) as one:
                    wait_until(lambda one=one: one.role() == "active", "it is active", SLOW_S)  # type: ignore[misc]  # bound now
                    for number, at_step in enumerate(at_steps):
                        made.append(move(slurm, one, fake, folder / f"{way}-{number}", at_step, way))
    return made


def page(made: list[Run], seed: int) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    rows = [
        "| way | at step | repeated | fault to closed node |", "| --- | --- | --- | --- |",
        *(f"| {r.way} | {r.at_step} | {r.repeated} | {r.closed_after_s:.1f} s |" for r in made),
    ]  # fmt: skip
    sums = []
    for way in ("without", "with"):
        of = [r for r in made if r.way == way]
        lost = [r.repeated for r in of]
        sums.append(
            f"| {way} | {len(of)} | {sum(lost)} | {statistics.median(lost):g} | {max(lost)} |"
            f" {statistics.median(r.closed_after_s for r in of):.1f} s |"
        )
    last = [r.detail for r in made if r.way == "with"][-1]
    return "\n".join([
        "# Checkpoint, then move", "",
        "What a job repeats when Drover takes its node out: with `save_s` in the policy's rule, and without",
        "([how to](../how-to/save-first.md)). `benchmarks/bench_save_first.py --write` writes this page.", "",
        f"- **Real**: Slurm 22.05, torch on CPU ({RANKS} ranks over gloo), the agent, the collector in enforce",
        "  mode, the XID in the kernel log, the signal, the requeue. NVML is a stand-in, and all nodes are on",
        "  one machine, so times say little.",
        f"- **The job** saves every {EVERY} steps of {STEP_S * 1000:.0f} ms by itself, and when it is asked.",
        f"  The step at which the fault comes is drawn (seed {seed}), the same for both ways.",
        "- **Repeated**: the last step in the job's own log before the move, less the one it goes on from.",
        f"- Code of commit {commit.stdout.strip()}.", "",
        "| way | moves | steps repeated | median | most | median time to the closed node |",
        "| --- | --- | --- | --- | --- | --- |", *sums, "",
        "A job that is asked still repeats the steps between its checkpoint and its end: Drover looks for the",
        "answer every 2 s, the agent sends it about once a second, and Slurm takes a moment to end the job.", "",
        "The interval between two checkpoints is short here, about 10 s, so that the answer takes a good part of",
        "it. In training it is minutes to hours, and the answer takes as long.", "",
        "The last action said:", "", f"> {last}", "",
        "## Each move", "", *rows, "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each way")
    parser.add_argument("--seed", type=int, default=24)
    parser.add_argument("--write", action="store_true", help="write the page in docs/evidence")
    args = parser.parse_args()
    made = measure(args.runs, args.seed)
    if args.write:
        PAGE.write_text(page(made, args.seed))


if __name__ == "__main__":
    main()
