"""A node under the agent of `bench_agent.py`: ports, a job of Slurm on all GPUs, an inference server. What this machine
does not have is made up; the processes, files and the HTTP server are real."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from testbed.pages import Served
from testbed.waiting import wait_until

GPUS, PORTS = 8, 8
PAGE = Path(__file__).resolve().parents[1] / "tests/cases/agent/vllm/v1_two_engines/first.txt"
IB_COUNTERS = (
    "symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors", "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors", "port_xmit_discards", "port_xmit_constraint_errors", "port_rcv_constraint_errors",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors", "VL15_dropped", "port_xmit_data",
    "port_rcv_data", "port_xmit_packets", "port_rcv_packets", "unicast_rcv_packets", "unicast_xmit_packets",
    "multicast_rcv_packets", "multicast_xmit_packets", "port_xmit_wait",
)  # fmt: skip
IB_HW_COUNTERS = (
    "out_of_buffer", "out_of_sequence", "duplicate_request", "rnr_nak_retry_err", "packet_seq_err",
    "implied_nak_seq_err", "local_ack_timeout_err", "np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled",
    "rp_cnp_ignored", "rx_icrc_encapsulated", "req_cqe_error", "req_remote_access_errors", "resp_cqe_error",
    "roce_adp_retrans", "lifespan", "rx_read_requests", "rx_write_requests",
)  # fmt: skip


def system(folder: Path) -> Path:
    """This machine's /sys, and 8 InfiniBand ports (mlx5, NDR) that this machine does not have."""
    root = folder / "sys"
    (root / "class").mkdir(parents=True)
    for entry in Path("/sys").iterdir():
        if entry.name != "class":
            (root / entry.name).symlink_to(entry)
    for entry in Path("/sys/class").iterdir():
        if entry.name != "infiniband":
            (root / "class" / entry.name).symlink_to(entry)
    for number in range(PORTS):
        device = root / f"class/infiniband/mlx5_{number}"
        port = device / "ports/1"
        for part in ("counters", "hw_counters"):
            (port / part).mkdir(parents=True)
        values = {
            "fw_ver": "28.39.1002", "hca_type": "MT4129", "board_id": "MT_0000000838", "node_type": "1: CA",
            "ports/1/state": "4: ACTIVE", "ports/1/phys_state": "5: LinkUp", "ports/1/rate": "400 Gb/sec (4X NDR)",
            "ports/1/link_layer": "InfiniBand", "ports/1/lid": "0x12", "ports/1/sm_lid": "0x1",
            **{f"ports/1/counters/{counter}": str(1000 + number) for counter in IB_COUNTERS},
            **{f"ports/1/hw_counters/{counter}": str(2000 + number) for counter in IB_HW_COUNTERS},
        }  # fmt: skip
        for file, value in values.items():
            (device / file).write_text(value + "\n")
    return root


class Traffic:
    """What goes over the ports of `system`, at a share of 50 GB/s that changes each second."""

    # counter: what a port counts a second at its full rate. Data is counted in 4 bytes, packets are of 4 KiB.
    RATES: ClassVar = {
        "counters/port_xmit_data": 12_500_000_000, "counters/port_rcv_data": 12_500_000_000,
        "counters/port_xmit_packets": 12_207_031, "counters/port_rcv_packets": 12_207_031,
        "counters/unicast_xmit_packets": 12_207_031, "counters/unicast_rcv_packets": 12_207_031,
        "counters/port_xmit_wait": 1_700_000, "hw_counters/np_cnp_sent": 310, "hw_counters/rp_cnp_handled": 290,
        "hw_counters/rx_write_requests": 190_000, "hw_counters/rx_read_requests": 1_100,
    }  # fmt: skip

    def __init__(self, root: Path) -> None:
        self._chance = random.Random(1)
        self._counts = {
            root / f"class/infiniband/mlx5_{number}/ports/1" / counter: (rate, 10**15)
            for number in range(PORTS)
            for counter, rate in self.RATES.items()
        }

    def second(self) -> None:
        for path, (rate, before) in self._counts.items():
            self._counts[path] = rate, before + round(rate * self._chance.uniform(0.5, 0.9))
            with path.open("r+b", buffering=0) as file:  # a reader in between sees the old text or the new one
                file.write(f"{self._counts[path][1]}\n".encode())


@contextlib.contextmanager
def job(folder: Path) -> Iterator[list[int]]:
    """The ids of eight processes below a step daemon of Slurm's, all of them real: by its name, title and user the
    daemon is one (see `drover_agent.sources.workloads.slurm`), so this needs root as Slurm does."""
    daemon = folder / "slurmstepd"
    shutil.copy(str(shutil.which("bash")), daemon)
    given = {"SLURM_JOB_ID": "4242", "SLURM_STEP_GPUS": ",".join(map(str, range(GPUS)))}
    script = f"for rank in $(seq {GPUS}); do sleep 86400 & done; wait"
    with subprocess.Popen(
        ["slurmstepd: [4242.0]", "-c", script], executable=str(daemon), env=os.environ | given, start_new_session=True
    ) as step:
        children = Path(f"/proc/{step.pid}/task/{step.pid}/children")
        try:
            wait_until(lambda: len(children.read_text().split()) == GPUS, "the processes of the job")
            yield [int(pid) for pid in children.read_text().split()]
        finally:
            os.killpg(step.pid, 15)


class Requests:
    """What a vLLM server with two engines reports while it serves: its counters grow each second."""

    _COUNTER = re.compile(r"^(vllm:\S+(?:_total|_bucket|_sum|_count)(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)

    def __init__(self, served: Served) -> None:
        self._served, self._page, self._seconds = served, PAGE.read_text(), 0
        self.second()

    def second(self) -> None:
        self._seconds += 1
        grown = 1 + self._seconds / 100
        page = self._COUNTER.sub(lambda found: f"{found[1]} {float(found[2]) * grown:.6f}", self._page)
        self._served.body = page.encode()
