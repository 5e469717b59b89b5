"""One rank of the job of benchmarks/bench_save_first.py: it trains on CPU over gloo, and keeps a log of its steps.

save_first_job.py FOLDER CHECKPOINT_EVERY STEP_S
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from drover_agent.client.training_steps import Reporter


def main() -> None:
    folder, every, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    rank, ranks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    attempt = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    torch.set_num_threads(1)
    store = f"file://{folder}/gloo-{os.environ['SLURM_JOB_ID']}-{attempt}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    checkpoint, step = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        held = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        step = held["step"]
    reporter = Reporter("pretrain")
    reporter.on_save()
    with (folder / f"steps-{rank}.jsonl").open("a", buffering=1) as log:
        log.write(json.dumps({"attempt": attempt, "begins_at": step}) + "\n")
        while True:
            loss = model(torch.ones(16, 256)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(step_s)
            step += 1
            reporter.step()
            log.write(json.dumps({"attempt": attempt, "step": step}) + "\n")
            asked = torch.tensor(float(reporter.save_asked))
            dist.all_reduce(asked)  # the ranks may get the signal at different steps
            if asked.item() or step % every == 0:
                if rank == 0:
                    part = checkpoint.with_suffix(".part")
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, part)
                    part.rename(checkpoint)
                dist.barrier()
                reporter.saved(step)


main()
