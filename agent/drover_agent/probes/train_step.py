"""A small transformer that trains, sharded over the devices of the node: tokens per second, and an exact loss.

It uses what training uses together: products, attention, normalisation, softmax, an optimizer, and, with FSDP2
(`torch.distributed.fsdp.fully_shard`, a layer each), gathering weights and scattering gradients between devices. One
process a device; NCCL between GPUs, gloo between two processes on a CPU. A lone GPU trains by itself.

With deterministic algorithms and one seed the loss after STEPS steps is one number, so that a node must agree with
itself. Where it does not, each device trains alone: the one whose loss differs is named, or else what they share.
Strictly deterministic ones: with `warn_only` PyTorch leaves flash attention's backward pass unchanged, whose sums come
in any order (pytorch/pytorch#182551), and a healthy device would differ from itself. Nor may NVSwitches add up (NVLS),
whose sums differ from call to call (NVIDIA/nccl#1497): older torch lets them (pytorch/pytorch#156381). Where a build
has no such algorithm for a step, the tokens per second are measured and the loss is not judged.
"""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from drover_agent.probes.base import Context, Device, Group, Result
from drover_agent.probes.ranks import first_answer
from drover_agent.probes.rendezvous import Meeting, free_port
from drover_agent.probes.timing import variation

UNIT = "tokens/s"  # of each device
STEPS = 5
RUNS = 2  # from the start: the same devices must agree with themselves
JOIN_S = 30.0
CPU_RANKS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    width: int
    layers: int
    heads: int
    length: int
    batch: int
    words: int


GPU = Shape(2048, 8, 16, 2048, 4, 32_000)
CPU = Shape(32, 2, 2, 32, 2, 100)


@dataclass(frozen=True, slots=True)
class Trained:
    """The result: the loss of each run, and seconds of each step but the first of a run."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]


def run(context: Context, name: str) -> Iterator[Result]:
    """Sharded over all devices; a lone GPU by itself."""
    devices = list(context.devices)
    if not devices[0].is_cuda:
        devices = [Device(None, "cpu", "cpu", 0)] * CPU_RANKS
    if len(devices) < 2:
        yield from alone(context, name)
        return
    exact, found = _strictly(lambda exact: _sharded(context, name, devices, exact=exact))
    shape = GPU if devices[0].is_cuda else CPU
    step_s = statistics.median(found.seconds)
    same = len(set(found.losses)) == 1
    detail = f"loss {found.losses[0]:.9g} after {STEPS} steps, sharded over {len(devices)}"
    if exact and not same:
        odd = [result for result in alone(context, name) if result.ok is False]
        for result in odd:
            yield Result(name, result.gpu, None, UNIT, result.detail, ok=False)
        culprit = "" if odd else "; each alone gives the same: it is what they share"
        detail = f"the loss differs from run to run: {', '.join(f'{loss:.9g}' for loss in found.losses)}{culprit}"
    yield Result(
        name, None, shape.batch * shape.length / step_s, UNIT, detail if exact else NOT_EXACT,
        ok=same if exact else None, spread=variation(found.seconds), repeats=len(found.seconds),
    )  # fmt: skip


NOT_EXACT = "the loss is not judged: this build of torch has no deterministic algorithm for a step"


def _strictly(train: Callable[[bool], Any]) -> tuple[bool, Any]:
    """Return (whether the loss is exact, the result of `train`)."""
    try:
        return True, train(True)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        return False, train(False)


def _sharded(context: Context, name: str, devices: list[Device], *, exact: bool) -> Trained:
    """
    Raises:
        RankError: of any of them.
    """
    group = Group("127.0.0.1", free_port(), 0, 1, join_s=JOIN_S)
    given = [(device.name, k, len(devices), group, context.seed, exact) for k, device in enumerate(devices)]
    what = f"{name} over {len(devices)} devices"
    context.show_progress(what)
    found = first_answer(context, what, train_sharded, given, 2 * JOIN_S + 3 * context.seconds)
    assert isinstance(found, Trained)
    return found


def train_sharded(
    device: str, rank: int, world: int, group: Group, seed: int, exact: bool
) -> Trained | None:  # fmt: skip
    """Train as one of the processes; the first one answers."""
    import torch
    import torch.distributed as dist

    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device)
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # before NCCL's first call
    os.environ.pop("NCCL_ALGO", None)  # the site's may want nothing else
    torch.use_deterministic_algorithms(exact)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=Meeting(group, rank, {"devices": world}).join(), rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=JOIN_S),
    )  # fmt: skip
    shape = GPU if cuda else CPU
    losses: list[float] = []
    took: list[float] = []
    for _ in range(RUNS):
        loss, more = _train_shard(torch, dist, device, rank, shape, seed)
        losses.append(loss)
        took += more
    dist.barrier()
    return Trained(tuple(losses), tuple(took)) if rank == 0 else None


def _train_shard(
    torch: Any, dist: Any, device: str, rank: int, shape: Shape, seed: int
) -> tuple[float, list[float]]:  # fmt: skip
    """(mean loss of all after STEPS steps, seconds of each but the first)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kind = device.partition(":")[0]
    cuda = kind == "cuda"
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = bf16 if cuda else MixedPrecisionPolicy()
    model = _model(torch, shape, seed).to(device)
    for layer in model[1].layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    drawn = torch.Generator().manual_seed(seed + rank)  # each its own part of the batch
    words = torch.randint(0, shape.words, (shape.batch, shape.length + 1), generator=drawn).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds: list[float] = []
    loss: Any = None
    for _ in range(STEPS):
        began = time.perf_counter()
        predicted = model(words[:, :-1])
        loss = torch.nn.functional.cross_entropy(predicted.flatten(0, 1).float(), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    mean = loss.detach().double() / dist.get_world_size()
    dist.all_reduce(mean)
    return float(mean.item()), seconds[1:]


def _model(torch: Any, shape: Shape, seed: int) -> Any:
    """Drawn on the CPU: alike on every device."""
    torch.manual_seed(seed)
    layer = torch.nn.TransformerEncoderLayer(
        shape.width, shape.heads, 4 * shape.width, dropout=0.0, batch_first=True, norm_first=True
    )
    return torch.nn.Sequential(
        torch.nn.Embedding(shape.words, shape.width),
        torch.nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False),
        torch.nn.Linear(shape.width, shape.words),
    )


def alone(context: Context, name: str) -> Iterator[Result]:
    """Each device by itself."""
    torch = context.torch

    def train(exact: bool) -> list[Result]:
        torch.use_deterministic_algorithms(exact)
        return list(_results(context, name, exact=exact))

    try:
        yield from _strictly(train)[1]
    finally:
        torch.use_deterministic_algorithms(False)


def _results(context: Context, name: str, *, exact: bool) -> Iterator[Result]:
    """All are made before the first is given."""
    losses: dict[Device, float] = {}
    found: dict[Device, list[float]] = defaultdict(list)
    for device in context.devices:
        context.show_progress(f"{device.name}: training steps")
        shape = GPU if device.is_cuda else CPU
        until = time.monotonic() + context.seconds
        for _ in range(RUNS):
            loss, seconds = _train(context, device, shape)
            found[device] += seconds
            if losses.setdefault(device, loss) != loss:
                losses[device] = float("nan")
            if time.monotonic() > until:
                break
    usual = {d.model: Counter(v for o, v in losses.items() if o.model == d.model).most_common(1)[0] for d in losses}
    for device in context.devices:
        shape = GPU if device.is_cuda else CPU
        tokens = shape.batch * shape.length
        step_s = statistics.median(found[device])
        loss, (most, votes) = losses[device], usual[device.model]
        alike = sum(other.model == device.model for other in losses)
        wrong = loss != loss or (loss != most and votes * 2 > alike)
        detail = f"loss {loss:.9g} after {STEPS} steps"
        if loss != loss:
            detail = "the loss differs from run to run on this device"
        elif wrong:
            detail += f"; {votes} devices of its model have {most:.9g}"
        if not exact:
            detail, wrong = NOT_EXACT, False
        yield Result(
            name, device.slot, tokens / step_s, UNIT, detail, ok=not wrong if exact else None,
            spread=variation(found[device]), repeats=len(found[device]),
        )  # fmt: skip


def _train(context: Context, device: Device, shape: Shape) -> tuple[float, list[float]]:
    """(loss after STEPS steps, seconds of each but the first)."""
    torch = context.torch
    model = _model(torch, shape, context.seed).to(device.name)
    words = torch.randint(0, shape.words, (shape.batch, shape.length + 1)).to(device.name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    kind = torch.bfloat16 if device.is_cuda else torch.float32
    seconds: list[float] = []
    loss: Any = None
    for _ in range(STEPS):
        if context.stopping():
            raise InterruptedError("asked to stop")
        began = time.perf_counter()
        with torch.autocast(device.name.partition(":")[0], dtype=kind, enabled=device.is_cuda):
            predicted = model(words[:, :-1])
            loss = torch.nn.functional.cross_entropy(predicted.flatten(0, 1).float(), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device.is_cuda:
            torch.cuda.synchronize(device.name)
        seconds.append(time.perf_counter() - began)
    return float(loss.item()), seconds[1:]
