"""A training loop of several ranks on the CPU, that gets slower from a step on: real torch, gloo and Reporter.

python gloo_loop.py STORE STEP_S STEPS SLOWER_FROM FACTOR          with RANK, WORLD_SIZE and DROVER_STEPS_SOCKET
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from drover_agent.client import training_steps

REPORT_S = 0.045  # instead of a second: a bucket of the test is one report


def main() -> None:
    store, step_s, steps, slower_from, factor = sys.argv[1], *map(float, sys.argv[2:])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    training_steps.SEND_S = REPORT_S
    reporter = training_steps.Reporter("pretrain", tokens_per_step=1e6)
    weights = torch.ones(64, 64)
    for step in range(int(steps)):
        gradient = weights @ weights
        time.sleep(step_s * (factor if rank == 0 and step >= slower_from else 1.0))
        dist.all_reduce(gradient)
        reporter.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
