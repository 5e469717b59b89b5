"""Take the Job page and `drover job` of five jobs whose ranks really run: what an on-call reads there in ten seconds.

    nice python benchmarks/job_pages.py --out /tmp/pages [--minutes 25]

One collector, one console, five nodes with an agent and four ranks of torch over gloo each. The ranks report their
steps by the agent's client. From minute FAULT_MIN on one job has a slow rank, one waits for its data, one hangs because
a rank came with another size (and leaves its flight recorder's dumps), and one loses a GPU and its ranks die; one is
healthy. What stands in: NVIDIA's library (tests/testbed/nvml; what it shows of a fault is written below), the kernel
log, and the /proc in which Slurm's job has rank N on GPU N.

Writes OUT/JOB.png and OUT/JOB.txt. With `--page` it makes docs/evidence/job-page.md and its pictures of OUT and of
benchmarks/data/job_pages.json, in which a reader who had seen the pictures alone wrote what he understood.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from bench_rank_evidence import RANKS, SPIN, planted_proc, until

READ = Path(__file__).resolve().parent / "data/job_pages.json"
PAGE, PICTURES = ROOT / "docs/evidence/job-page.md", ROOT / "docs/images"
FAULT_MIN, STEP_S, SAVE_STEPS, EVALUATE_STEPS = 14.0, 0.25, 240, 300
CULPRIT = 2
BROKEN_S = 20.0  # after this a rank that waits leaves its dump


@dataclass(frozen=True)
class Kind:
    """A job, what its ranks do from the fault on, and what the stand-in of NVIDIA's library shows then."""

    job: str
    truth: str
    slow_rank: float = 1.0  # times its own step
    all_wait_s: float = 0.0  # for their data, each step
    of_culprit: dict[str, str] = field(default_factory=dict)
    of_others: dict[str, str] = field(default_factory=dict)


# In a collective's kernel, which needs few SMs, for a third of each step.
WAITING = {
    "FI_DEV_POWER_INSTANT": "540000", "GPM_METRIC_ANY_TENSOR_UTIL": "34.5", "GPM_METRIC_DRAM_BW_UTIL": "37.5",
    "GPM_METRIC_SM_UTIL": "68",
}  # fmt: skip
# Nothing runs for a quarter of each step.
STARVED = WAITING | {
    "FI_DEV_POWER_INSTANT": "520000", "nvmlDeviceGetUtilizationRates.gpu": "74", "GPM_METRIC_GRAPHICS_UTIL": "73",
    "GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC": "89000", "GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC": "90000",
}  # fmt: skip
IDLE = SPIN | {
    "FI_DEV_POWER_INSTANT": "70000", "nvmlDeviceGetUtilizationRates.gpu": "0", "GPM_METRIC_SM_UTIL": "0",
    "GPM_METRIC_GRAPHICS_UTIL": "0", "GPM_METRIC_DRAM_BW_UTIL": "0", "nvmlDeviceGetComputeRunningProcesses": "0",
    "nvmlDeviceGetMemoryInfo_v2.used": "600000000",
}  # fmt: skip
KINDS = {
    "healthy": Kind("5001", "nothing is wrong; it saves and evaluates"),
    "slow": Kind(
        "5002", "rank 2 takes 1.4 times as long for its own work: its GPU has a power limit of 420 W", slow_rank=1.4,
        of_culprit={
            "nvmlDeviceGetEnforcedPowerLimit": "420000", "nvmlDeviceGetPowerManagementLimit": "420000",
            "FI_DEV_POWER_INSTANT": "418000", "nvmlDeviceGetClockInfo(SM)": "1230",
            "GPM_METRIC_ANY_TENSOR_UTIL": "34.5", "GPM_METRIC_DRAM_BW_UTIL": "37.5",
            "FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP": "5000000000+1000000000",
        },
        of_others=WAITING,
    ),
    "storage": Kind(
        "5003", "all ranks wait 0.09 s longer for their data in each step", all_wait_s=0.09,
        of_culprit=STARVED, of_others=STARVED,
    ),
    "size": Kind(
        "5004", "rank 2 came to a collective with another size; the others wait", of_culprit=SPIN, of_others=SPIN
    ),
    "lost": Kind("5005", "GPU 2 fell off the bus (XID 79 in the kernel log), and all ranks died"),
}  # fmt: skip


def rank_main(folder: Path, name: str) -> None:
    """Train until the job is killed. `folder`/fault: the fault has begun."""
    import torch
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    from drover_agent.client.training_steps import Reporter

    kind, rank = KINDS[name], int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(hours=2))
    reporter = Reporter("pretrain", tokens_per_step=262_144.0)
    last = [time.monotonic()]

    def watch() -> None:
        while time.monotonic() - last[0] < BROKEN_S:
            time.sleep(0.5)
        (folder / f"trace_rank_{rank}").write_bytes(c10d._dump_fr_trace())

    if name == "size":
        threading.Thread(target=watch, daemon=True).start()
    step = 0
    while True:
        begun = time.monotonic()
        broken = (folder / "fault").exists()
        time.sleep((kind.all_wait_s if broken else 0) + STEP_S * (kind.slow_rank if broken and rank == CULPRIT else 1))
        values = torch.ones(96 if broken and name == "size" and rank == CULPRIT else 64)
        try:
            dist.all_reduce(values)
        except RuntimeError:
            (folder / f"trace_rank_{rank}").write_bytes(c10d._dump_fr_trace())
            time.sleep(3600)
        step += 1
        last[0] = time.monotonic()
        reporter.step(step_time_s=time.monotonic() - begun)
        if step % SAVE_STEPS == 0:
            time.sleep(1.5)
            dist.barrier()
            reporter.saved(step)
        elif step % EVALUATE_STEPS == 0:
            time.sleep(3)
            dist.barrier()
            reporter.reset()


class Node:
    """One node with its agent and the ranks of its job."""

    def __init__(self, base: Path, name: str, number: int, library: Path, agents: str, stack: ExitStack) -> None:
        from testbed.nvml import FakeNvml
        from testbed.system_processes import running

        self.name, self.kind = f"node{number}", KINDS[name]
        self.base = base / name
        self.folder = self.base / self.kind.job
        self.folder.mkdir(parents=True)
        self.fake = FakeNvml(self.base / "nvml.script", library)
        self.fake.healthy(RANKS)
        with self.fake.batch():  # two nodes with one GPU's identity would be one that moved
            for gpu in range(RANKS):
                self.fake.set(gpu, "serial", f"1654{number:04d}{gpu:05d}")
                self.fake.set(gpu, "uuid", f"GPU-{number:04x}{gpu:04x}-0000-4000-8000-000000000000")
        self.log = self.base / "kmsg"
        self.log.write_text("")
        steps, self.proc = self.base / "steps.sock", planted_proc(self.base, self.kind.job)
        settings = (
            f"node={self.name}", f"spool.dir={self.base}/spool", "batch_s=1", f"kmsg_path={self.log}",
            f"steps_socket={steps}", f"proc_root={self.proc}", f'rank_dumps=["{self.base}/{{job}}/trace_rank_*"]',
            f'collectors=["{agents}"]',
        )  # fmt: skip
        args = [part for each in settings for part in ("--set", each)]
        environment = {**os.environ, **self.fake.env()}
        stack.enter_context(running(self.base, "drover_agent.main", "run", *args, env=environment))
        until(steps.exists, f"the socket of {self.name}")
        env = os.environ | {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29800 + number)}
        env |= {"SLURM_JOB_ID": self.kind.job, "DROVER_STEPS_SOCKET": str(steps), "OMP_NUM_THREADS": "1"}
        env |= {"TORCH_FR_BUFFER_SIZE": "200"}
        command = [sys.executable, __file__, "--rank-of", str(self.folder), "--kind", name]
        log = stack.enter_context((self.base / "ranks.log").open("w"))
        self.ranks = [
            subprocess.Popen(command, env=env | {"RANK": str(n)}, stdout=log, stderr=log) for n in range(RANKS)
        ]
        stack.callback(self.end)

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def break_it(self) -> None:
        (self.folder / "fault").touch()
        with self.fake.batch():
            for gpu in range(RANKS):
                for key, value in (self.kind.of_culprit if gpu == CULPRIT else self.kind.of_others).items():
                    self.fake.set(gpu, key, value)
        if self.kind is KINDS["lost"]:
            self._lose()

    def _lose(self) -> None:
        """As a driver does: a line in the kernel log, a GPU that answers nothing; the job's processes go."""
        from drover_agent.sources.kmsg.clock import system_clocks
        from testbed.nvml import pci_of

        where = ":".join(pci_of(CULPRIT).lower().split(":")[:3]).split(".")[0]
        said = f"NVRM: Xid (PCI:{where}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
        with self.log.open("a") as log:
            log.write(f"4,1,{system_clocks().awake_us},-;{said}\n")
        self.fake.lose(CULPRIT)
        self.end()
        with self.fake.batch():
            for gpu in set(range(RANKS)) - {CULPRIT}:
                for key, value in IDLE.items():
                    self.fake.set(gpu, key, value)
        shutil.rmtree(self.proc)
        self.proc.mkdir()


def take(out: Path, minutes: float) -> None:
    from playwright.sync_api import sync_playwright

    from testbed.browser import CHROMIUM, FLAGS
    from testbed.browsing import at_rest
    from testbed.nvml import build
    from testbed.system_processes import collector, free_port, reachable, running

    out.mkdir(parents=True, exist_ok=True)
    fleet = f'[[nodes]]\nnames = "node[1-{len(KINDS)}]"\nrack = "r1"\nsku = "H100-SXM"\ngpus = {RANKS}\n'
    with tempfile.TemporaryDirectory(prefix="job-pages-") as folder, ExitStack() as stack:
        base, port, library = Path(folder), free_port(), build(Path(folder))
        agents, api, _ = stack.enter_context(collector(base, fleet))
        nodes = [Node(base, name, n + 1, library, agents, stack) for n, name in enumerate(KINDS)]
        stack.enter_context(running(base, "drover_dashboard.main", "--collector", api, "--port", str(port)))
        until(lambda: reachable("127.0.0.1", port), "the console")
        time.sleep(60 * FAULT_MIN)
        for node in nodes:
            node.break_it()
        time.sleep(60 * (minutes - FAULT_MIN))
        for node in nodes:
            command = [sys.executable, "-m", "drover_cli.main", "job", "--collector", api, node.kind.job]
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
            (out / f"{node.kind.job}.txt").write_text(said.stdout)
        browser = stack.enter_context(sync_playwright()).chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        tab = browser.new_page(viewport={"width": 1440, "height": 1000}, color_scheme="light", timezone_id="UTC")
        for node in nodes:
            tab.goto(f"http://127.0.0.1:{port}/job?job={node.kind.job}")
            tab.wait_for_function("document.title.endsWith(' · Drover')")
            at_rest(tab)
            tab.wait_for_timeout(3000)
            tab.screenshot(path=str(out / f"{node.kind.job}.png"))
        browser.close()


def page(out: Path, commit: str) -> str:
    """Return docs/evidence/job-page.md; put its pictures where it shows them."""
    read: dict[str, Any] = json.loads(READ.read_text("utf-8"))
    lines = [
        "# What an on-call reads on the Job page in ten seconds", "",
        *textwrap.wrap(
            f"Made by `benchmarks/job_pages.py` at {commit}: five jobs of four real ranks of torch over gloo, with the "
            f"agent, the collector and the console. The fault begins after {FAULT_MIN:.0f} minutes. NVIDIA's library, "
            f"the kernel log and Slurm's /proc stand in. {read['reader']}",
            100,
        ),
    ]  # fmt: skip
    for name, kind in KINDS.items():
        shutil.copy(out / f"{kind.job}.png", PICTURES / f"job-{name}.png")
        said = next(line for line in (out / f"{kind.job}.txt").read_text("utf-8").splitlines() if line.strip())
        lines += ["", f"## Job {kind.job}", "", *textwrap.wrap(f"- **Truth**: {kind.truth}.", 100)]
        lines += textwrap.wrap(f"- **`drover job {kind.job}`** begins: {said}", 100, subsequent_indent="  ")
        lines += textwrap.wrap(f"- **The reader**: {read['jobs'][name]}", 100, subsequent_indent="  ")
        lines += ["", f"![The page of job {kind.job}](../images/job-{name}.png)"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("/tmp/job-pages"))
    parser.add_argument("--minutes", type=float, default=25.0, help="from the start to the picture")
    parser.add_argument("--page", metavar="COMMIT", help="make the page of what was taken at this commit")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=list(KINDS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        rank_main(given.rank_of, given.kind)
    elif given.page:
        PAGE.write_text(page(given.out, given.page), encoding="utf-8")
    else:
        take(given.out, given.minutes)


if __name__ == "__main__":
    main()
