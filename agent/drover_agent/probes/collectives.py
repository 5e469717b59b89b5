"""Collectives over the devices of a node, or of several nodes that meet at one address: bus bandwidth in GB/s.

Bus bandwidth as nccl-tests defines it, so that it can be held against the hardware's whatever the number of ranks n,
with S bytes on each rank (all-gather, all-to-all: in all): all-reduce S/t x 2(n-1)/n, the others S/t x (n-1)/n.
One process a device; NCCL between GPUs, gloo between CPUs.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Iterator
from typing import Any

from drover_agent.probes.base import Context, Device, Group, Result
from drover_agent.probes.child import die_with_parent

UNIT = "GB/s"
BYTES = 256 << 20  # in all; a multiple of every number of ranks is taken
CPU_BYTES = 1 << 20
LEAST_REPEATS = 5
JOIN_S = 30.0
IMPORT_S = 60.0  # of torch, by a process for each device at once
TELL_S = 5.0  # between signs of life while ranks are awaited: who waits for another node does not hang
CUDA_CALLS = 10  # between two waits for the device, whose own microseconds would count else
CPU_RANKS = 2


def run(context: Context, name: str) -> Iterator[Result]:
    """`name`: allreduce, allgather or alltoall."""
    devices = list(context.devices)
    cuda = all(device.is_cuda for device in devices)
    if not cuda:
        devices = [Device(None, "cpu", "cpu", 0)] * CPU_RANKS
    group = context.group or Group("127.0.0.1", _free_port(), 0, 1)
    world = group.nodes * len(devices)
    if world < 2:
        yield Result(name, None, None, UNIT, "needs two devices, or another node")
        return
    context.tell(f"{name} over {world} ranks")
    spawned = context.torch.multiprocessing.get_context("spawn")
    answers = spawned.SimpleQueue()
    ranks = [
        spawned.Process(
            target=_rank,
            args=(name, device.name, group.node * len(devices) + k, world, group, context.seconds, answers),
            daemon=True,
        )
        for k, device in enumerate(devices)
    ]
    for rank in ranks:
        rank.start()
    try:
        yield _outcome(context, name, ranks, answers, world)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _outcome(context: Context, name: str, ranks: list[Any], answers: Any, world: int) -> Result:
    began = told = time.monotonic()
    until = began + IMPORT_S + JOIN_S + 3 * context.seconds + 10
    while answers.empty():
        if time.monotonic() > told + TELL_S:
            told = time.monotonic()
            context.tell(f"{name} over {world} ranks, since {told - began:.0f} s")
        if context.stopping():
            raise InterruptedError("told to stop")
        dead = [k for k, rank in enumerate(ranks) if rank.exitcode not in (None, 0)]
        if dead:
            return Result(name, None, None, UNIT, f"rank {dead[0]} of this node ended by itself")
        if time.monotonic() > until:
            return Result(name, None, None, UNIT, f"{world} ranks did not finish: one of them, or the network, hangs")
        time.sleep(0.05)
    error, value, size, repeats = answers.get()
    if error:
        return Result(name, None, None, UNIT, error)
    return Result(name, None, value, UNIT, f"{size >> 10} KiB over {world} ranks", repeats=repeats)


def bus_bandwidth(name: str, size: int, seconds: float, ranks: int) -> float:
    """GB/s out of `size` bytes a call (see the module's docstring)."""
    factor = {"allreduce": 2.0, "allgather": 1.0, "alltoall": 1.0}[name]
    return size / seconds * factor * (ranks - 1) / ranks / 1e9


def _rank(name: str, device: str, rank: int, world: int, group: Group, seconds: float, answers: Any) -> None:
    """One process. The first rank of each node tells."""
    die_with_parent()
    first = rank % (world // group.nodes) == 0
    try:
        size, took, repeats = _measure(name, device, rank, world, group, seconds)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is why there is no figure
        answers.put((f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", 0.0, 0, 0))
    else:
        if first:
            answers.put(("", bus_bandwidth(name, size, took, world), size, repeats))


def _measure(
    name: str, device: str, rank: int, world: int, group: Group, seconds: float
) -> tuple[int, float, int]:  # fmt: skip
    """(bytes, median seconds of a call, calls)."""
    import torch
    import torch.distributed as dist

    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"tcp://{group.address}:{group.port}", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=JOIN_S),
    )  # fmt: skip
    size = (BYTES if cuda else CPU_BYTES) // (4 * world) * 4 * world
    whole = torch.ones(size // 4, device=device)
    part = torch.ones(size // 4 // world, device=device)
    other = torch.empty_like(whole)

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its newer name

    def call() -> None:
        if name == "allreduce":
            dist.all_reduce(whole)
        elif name == "allgather":
            gather(whole, part)
        else:
            dist.all_to_all_single(other, whole)

    calls = CUDA_CALLS if cuda else 1
    times: list[float] = []
    go_on = torch.ones(1, device=device)
    until = time.monotonic() + seconds
    while True:
        began = time.perf_counter()
        for _ in range(calls):
            call()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / calls)
        if name == "allreduce":
            whole.fill_(1.0)  # else it would run out of range: each call multiplies by the number of ranks
        # All ranks must end after the same call: the first one decides.
        go_on.fill_(float(len(times) < LEAST_REPEATS or time.monotonic() < until))
        dist.broadcast(go_on, 0)
        if not go_on.item():
            break
    dist.destroy_process_group()
    ordered = sorted(times[1:])  # the first one builds the connections
    return size, ordered[len(ordered) // 2], len(ordered)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
