"""Collectives over the devices of a node, or of several nodes that meet at one address: bus bandwidth in GB/s.

Bus bandwidth as nccl-tests defines it, so that it can be held against the hardware's whatever the number of ranks n,
with S bytes on each rank (all-gather, all-to-all: in all): all-reduce S/t x 2(n-1)/n, the others S/t x (n-1)/n.
One process a device; NCCL between GPUs, gloo between CPUs.

All that a request has of them are measured by the same processes: to import torch and to start NCCL takes longer. A
node of a group (NAME_group) that does not come is a result without a figure, and no fault of anybody.
"""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

from drover_agent.probes import GROUP
from drover_agent.probes.base import Context, Device, Group, Result
from drover_agent.probes.ranks import MissedError, RankError, first_answer
from drover_agent.probes.rendezvous import Meeting, free_port, interface_to
from drover_agent.probes.timing import variation

UNIT = "GB/s"
BYTES = 256 << 20  # in all; a multiple of every number of ranks is taken
CPU_BYTES = 1 << 20
LEAST_REPEATS = 5
JOIN_S = 30.0  # for the ranks of one node, and for one operation
CUDA_CALLS = 10  # between two waits for the device, whose own microseconds would count else
CPU_RANKS = 2
KINDS = ("allreduce", "allgather", "alltoall")

Figures = dict[str, tuple[float, int, int, float]]  # name -> bus bandwidth, bytes, calls, their variation
_met: dict[tuple[str, tuple[str, ...]], tuple[str, Figures]] = {}  # group and names -> their result, in this process


def run(context: Context, name: str) -> Iterator[Result]:
    """`name`: allreduce, allgather or alltoall, or one of these with GROUP at its end.

    Raises:
        RankError: all nodes of a group had come, and then one of them, or the network, failed.
    """
    together = name.endswith(GROUP)
    group, devices = context.group, _devices(context, 1 if together else CPU_RANKS)
    if not together:
        group = Group("127.0.0.1", free_port(), 0, 1, join_s=JOIN_S)
    if group is None:
        yield Result(name, None, None, UNIT, "needs other nodes: `drover probe --group NODE NODE` asks for it")
        return
    world = group.nodes * len(devices)
    if world < 2:
        yield Result(name, None, None, UNIT, "needs two devices")
        return
    names = tuple(n for n in context.names if n.removesuffix(GROUP) in KINDS and n.endswith(GROUP) == together)
    met = group.key, names or (name,)
    if met not in _met:
        _met[met] = "not run: those before it failed", {}  # none is tried alone where all failed together
        try:
            _met[met] = "", _measured(context, met[1], group, devices)
        except MissedError as missed:
            _met[met] = str(missed), {}
        except RankError as failed:
            if together:
                raise
            _met[met] = f"{world} ranks: {failed}", {}
    yield _result(name, *_met[met], world)


def _devices(context: Context, cpus: int) -> list[Device]:
    cuda = all(device.is_cuda for device in context.devices)
    return list(context.devices) if cuda else [Device(None, "cpu", "cpu", 0)] * cpus


def _measured(context: Context, names: tuple[str, ...], group: Group, devices: list[Device]) -> Figures:
    """
    Raises:
        MissedError, RankError.
    """
    what = f"{', '.join(names)} over {group.nodes * len(devices)} ranks"
    context.show_progress(what)
    given = [(names, device.name, k, len(devices), group, context.seconds) for k, device in enumerate(devices)]
    patience_s = 2 * group.join_s + JOIN_S + len(names) * 3 * context.seconds + 10
    figures: Figures = first_answer(context, what, measure, given, patience_s)
    return figures


def _result(name: str, error: str, figures: Figures, world: int) -> Result:
    if error:
        return Result(name, None, None, UNIT, error)
    value, size, repeats, spread = figures[name]
    text = f"{size >> 10} KiB over {world} ranks"
    return Result(name, None, value, UNIT, text, spread=spread, repeats=repeats)


def bus_bandwidth(name: str, size: int, seconds: float, ranks: int) -> float:
    """GB/s out of `size` bytes a call (see the module's docstring)."""
    factor = {"allreduce": 2.0, "allgather": 1.0, "alltoall": 1.0}[name]
    return size / seconds * factor * (ranks - 1) / ranks / 1e9


def measure(
    names: tuple[str, ...], device: str, local: int, here: int, group: Group, seconds: float
) -> Figures | None:  # fmt: skip
    """One process, the `local`-th of `here` on its node. The first one of each node gives the figures.

    Raises:
        MissedError: a node of the group did not come.
    """
    import torch
    import torch.distributed as dist

    rank, world = group.node * here + local, group.nodes * here
    meeting = begin(device, local, here, group)
    figures: Figures = {}
    for name in names:
        size, times = _time(torch, dist, name.removesuffix(GROUP), device, world, seconds)
        value = bus_bandwidth(name.removesuffix(GROUP), size, statistics.median(times), world)
        figures[name] = value, size, len(times), variation(times)
    dist.destroy_process_group()
    meeting.leave(rank, world)
    return figures if local == 0 else None


def begin(device: str, local: int, here: int, group: Group, operation_s: float = JOIN_S) -> Meeting:
    """Meet the group's other processes and start torch's process group with them.

    Args:
        operation_s: an operation that takes longer fails.
    Raises:
        MissedError: a node of the group did not come.
    """
    import torch
    import torch.distributed as dist

    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device)
    if group.nodes > 1 and (interface := interface_to(group.address, group.port)):
        # Else gloo takes what the host's name stands for, which may be loopback. What the site has set stays.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    meeting = Meeting(group, local, {"devices": here, "on": "GPUs" if cuda else "CPU"})
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=meeting.join(), rank=group.node * here + local,
        world_size=group.nodes * here, timeout=datetime.timedelta(seconds=operation_s),
    )  # fmt: skip
    return meeting


def _time(
    torch: Any, dist: Any, name: str, device: str, world: int, seconds: float
) -> tuple[int, list[float]]:  # fmt: skip
    """(bytes, seconds of each call)."""
    cuda = device.startswith("cuda")
    size = (BYTES if cuda else CPU_BYTES) // (4 * world) * 4 * world
    drawn = torch.rand(size // 4, generator=torch.Generator().manual_seed(1)).to(
        device
    )  # below 1: it grows by n a call
    whole, part, other = drawn.clone(), drawn[: size // 4 // world].clone(), torch.empty_like(drawn)

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
            whole.copy_(drawn)  # else it would run out of range: each call multiplies by the number of ranks
        # All ranks must end after the same call: the first one decides.
        go_on.fill_(float(len(times) < LEAST_REPEATS or time.monotonic() < until))
        dist.broadcast(go_on, 0)
        if not go_on.item():
            break
    return size, times[1:]  # the first one builds the connections
