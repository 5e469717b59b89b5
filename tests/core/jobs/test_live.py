"""One real job: two ranks over gloo, one never comes. Its real dumps name it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from drover_core.jobs.files import File, gather
from drover_core.jobs.judge import judge
from drover_core.jobs.model import Failure

JOB = r"""
import datetime, os, sys, time
os.environ |= {"TORCH_FR_BUFFER_SIZE": "50", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "3"}
import torch, torch.distributed as dist
import torch._C._distributed_c10d as c10d
folder = sys.argv[1]
rank, children = 0, []
for n in (1, 2):
    pid = os.fork()
    if not pid:
        rank, children = n, []
        break
    children.append(pid)
log = os.open(f"{folder}/rank_{rank}.log", os.O_CREAT | os.O_WRONLY)
os.dup2(log, 1), os.dup2(log, 2)
code = 0
try:
    store = dist.FileStore(f"{folder}/.store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=datetime.timedelta(seconds=30))
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.5), dist.group.WORLD)
    for step in range(4):
        if step == 3 and rank == 2:
            time.sleep(1.2)
            break
        dist.all_reduce(torch.ones(4))
except BaseException:
    sys.excepthook(*sys.exc_info())
    code = 1
made = c10d._dump_fr_trace_json()
with open(f"{folder}/trace_rank_{rank}.json", "wb") as file:
    file.write(made.encode() if isinstance(made, str) else made)
for pid in children:
    os.waitpid(pid, 0)
sys.stderr.flush()
os._exit(code)
"""


def test_the_rank_that_never_came_is_named_by_real_dumps(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", JOB, str(tmp_path)], timeout=120, check=False)
    assert done.returncode == 1
    paths = sorted(path for path in tmp_path.iterdir() if not path.name.startswith("."))
    verdict = judge(gather([File(path.name, path.read_bytes()) for path in paths], exit_code=1))
    assert (verdict.failure, verdict.rank) == (Failure.COLLECTIVE_TIMEOUT, 2), verdict
    assert "rank 2 never came to all_reduce 5; 2 others wait there" in verdict.sentence
