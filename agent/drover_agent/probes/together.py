"""Several nodes together, as a job uses them: pairs of nodes, a sharded training step, and a tensor-parallel one.

`drover validate` asks for these. All that a request has of them are measured by the same processes, one for each device
of each node, over NCCL, or gloo between CPUs. Each node gives the figures of its own devices:

    pairs_group, pairs_group_latency   GB/s and us between device K here and device K of node `peer`, half of a round
                                       trip; rounds in which no port is in two pairs (`pair_rounds`)
    fsdp_group, fsdp_group_slowest     tokens/s of each device over windows of the time: median, and the slowest window
    fsdp_group_solo                    the same of this device alone, without the network, between these windows: so
                                       that a slow device is distinguished from a slow network
    tp_group, tp_group_slowest         tokens/s of all devices, with each layer split over them (Megatron's columns
                                       and rows: torch.distributed.tensor.parallel)

A step that fails or stands still gives no figure, and names who stood still: its node's number is the `peer` of a
result without a value. That is no word against the hardware by itself, so the request still ends as done.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from drover_agent.probes import PROBES, Level
from drover_agent.probes.base import Context, Group, Result
from drover_agent.probes.collectives import begin
from drover_agent.probes.ranks import DiedError, MissedError, RankError, first_answer
from drover_agent.probes.signs import Odd, Signs
from drover_agent.probes.timing import variation
from drover_agent.probes.train_step import CPU, GPU, Shape, _model
from drover_core.model.pair_rounds import pair_rounds

STILL_S = 60.0  # without a new step: a window is much shorter, and so is the start of NCCL
OPERATION_S = 180.0  # of torch's own limit, which names nobody: later than ours
STORE_S = 20.0  # an answer of the store that takes longer: the node that holds it is gone
WINDOWS = 8  # of the time of a training step: a step's own jitter is averaged, minutes are seen
WARM_UP = 2  # steps
ROUND_TRIPS = 101  # for the latency; the shortest counts: others waited for a processor
LEAST_TRIPS, MOST_TRIPS = 4, 200
BYTES, CPU_BYTES = 64 << 20, 256 << 10
SOLO_LAYERS = 2
SOLO_SHARE, SOLO_LEAST_S = 0.25, 0.3  # of a window's time; longer than the periods in which processors are shared out
SOLO_TRIES = 10
TP_LAYERS = 4
UNITS = {"pairs_group_latency": "us"}

_met: dict[tuple[str, tuple[str, ...]], tuple[list[Result], Odd]] = {}  # group and names -> its results


def run(context: Context, name: str) -> Iterator[Result]:
    """`name`: pairs_group, fsdp_group or tp_group."""
    group, unit = context.group, PROBES[name].unit
    if group is None:
        yield Result(name, None, None, unit, "needs other nodes: `drover validate NODE NODE` asks for it")
        return
    names = tuple(other for other in context.names if PROBES[other].module == PROBES[name].module) or (name,)
    met = group.key, names
    if met not in _met:
        _met[met] = [], Odd((), "not run: those before it failed")  # none is tried alone where all failed together
        _met[met] = _measured(context, name, names, group)
    results, odd = _met[met]
    own = [result for result in results if result.probe.startswith(name)]
    yield from own or [Result(name, None, None, unit, odd.why, peer=node) for node in odd.ranks or (None,)]


def _measured(context: Context, name: str, names: tuple[str, ...], group: Group) -> tuple[list[Result], Odd]:
    """Return the results of this node, and why there are no others. `Odd.ranks`: numbers of nodes."""
    cuda = all(device.is_cuda for device in context.devices)
    devices = [device.name for device in context.devices] if cuda else ["cpu"]
    what = f"{', '.join(names)} over {group.nodes * len(devices)} ranks"
    context.show_progress(what)
    later = context.level is not Level.QUICK
    share = context.seconds / PROBES[name].seconds[later]  # below 1 where the level would take too long
    seconds = {other: PROBES[other].seconds[later] * share for other in names}
    slots = [device.slot if cuda else None for device in context.devices][: len(devices)]
    given = [(device, k, slots, group, seconds, context.seed) for k, device in enumerate(devices)]
    patience_s = 2 * group.join_s + len(names) * (STILL_S + OPERATION_S) + 3 * sum(seconds.values())
    try:
        found = first_answer(context, what, work, given, patience_s)
    except MissedError as missed:
        return [], Odd((), str(missed))
    except DiedError as died:
        return [], Odd((group.node,), f"{group.name(group.node)}: {died}")
    except RankError as failed:  # perhaps of another node's doing
        return [], Odd((), f"{group.name(group.node)}: {failed}")
    return [Result(**one) for one in found], Odd((), "it gave no figure")


@dataclass(slots=True)
class Rank:
    """One process: what its stages need. `results`: those of the stages that have ended."""

    torch: Any
    dist: Any
    device: str
    local: int
    slots: list[int | None]
    group: Group
    signs: Signs
    seed: int
    results: list[Result] = dataclasses.field(default_factory=list)

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def here(self) -> int:
        return len(self.slots)

    @property
    def slot(self) -> int | None:
        return self.slots[self.local]

    @property
    def rank(self) -> int:
        return self.group.node * self.here + self.local

    @property
    def world(self) -> int:
        return self.group.nodes * self.here

    def synchronize(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize(self.device)

    def agreed(self, value: float) -> float:
        """Return the first process's value, on all of them."""
        given = self.torch.tensor([value], dtype=self.torch.float64, device=self.device)
        self.dist.broadcast(given, 0)
        return float(given.item())

    def add(self, probe: str, value: float, text: str, **more: Any) -> None:
        name = next(name for name in PROBES if probe.startswith(name))
        self.results.append(Result(probe, value=value, unit=UNITS.get(probe, PROBES[name].unit), detail=text, **more))


def work(
    device: str, local: int, slots: list[int | None], group: Group, seconds: dict[str, float], seed: int
) -> list[dict[str, Any]] | None:  # fmt: skip
    """Be one process, the `local`-th of its node. The first one of each node answers, with the figures of all of them.

    Raises:
        MissedError: a node of the group did not come.
    """
    import torch
    import torch.distributed as dist

    if not device.startswith("cuda"):
        torch.set_num_threads(1)  # nodes of one machine would take each other's processors
    _import_all()
    meeting = begin(device, local, len(slots), group, OPERATION_S)
    here = len(slots)
    signs = Signs(meeting.second_store(STORE_S), group.node * here + local, group.nodes * here, here)
    rank = Rank(torch, dist, device, local, slots, group, signs, seed)
    names = tuple(seconds)
    for number, name in enumerate(names):
        if why := _supervised(rank, lambda name=name: STAGES[name](rank, seconds[name])):  # type: ignore[misc]  # bound now
            _without(rank, names[number:], why)
            break
    found = _of_node(rank)
    signs.leave()
    return found


def _import_all() -> None:
    """Import what the stages use, so that the nodes wait for it before they meet, and in no step."""
    import torch.distributed.device_mesh
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401  # for the stages


def _supervised(rank: Rank, stage: Callable[[], None]) -> Odd | None:
    """Run a stage in a thread, which may stand still in a call for ever. Return who stood still; None: it ended."""
    failed: list[Exception] = []

    def measure() -> None:
        try:
            stage()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is why there is no figure
            failed.append(error)

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    while thread.is_alive() and rank.signs.still_s < STILL_S:
        thread.join(0.05)
    if not failed and not thread.is_alive():
        return None
    odd = rank.signs.odd()
    how = f"{type(failed[0]).__name__}: {(str(failed[0]).splitlines() or [''])[0]}" if failed else "it stands still"
    nodes = tuple(sorted({number // rank.here for number in odd.ranks}))
    who = ", ".join(map(rank.group.name, nodes))
    text = f"{who}: {odd.why}" if who else odd.why
    return Odd(nodes, f"stopped in {rank.signs.place} ({how[:200]}): {text}")


def _without(rank: Rank, names: tuple[str, ...], odd: Odd) -> None:
    """Note that the first of these stages failed, and that the others were not run."""
    for node in odd.ranks or (None,):
        rank.results.append(Result(names[0], None, None, PROBES[names[0]].unit, odd.why, peer=node))
    for name in names[1:]:
        rank.results.append(Result(name, None, None, PROBES[name].unit, f"not run: {names[0]} failed before it"))


def _of_node(rank: Rank) -> list[dict[str, Any]] | None:
    """Return the results of all processes of this node, on its first one; None on the others.

    Of a figure of the whole group, and of why there is none, the first process's are enough.
    """
    mine = [dataclasses.asdict(result) for result in rank.results]
    if rank.local:
        rank.signs.hand_over(json.dumps(mine))
        return None
    found = mine
    for other in range(rank.rank + 1, rank.rank + rank.here):
        text = rank.signs.handed_over(other)
        if text:  # else it no longer answers: its own figures are missing
            more = json.loads(text)
            found += [result for result in more if result["gpu"] is not None and result["value"] is not None]
    return found


# ---- pairs


def _pairs(rank: Rank, seconds: float) -> None:
    rounds = pair_rounds(rank.group.nodes)
    size = BYTES if rank.cuda else CPU_BYTES
    for number, pairs in enumerate(rounds):
        rank.signs.at(f"round {number + 1} of {len(rounds)} of pairs")
        rank.dist.barrier()
        partner = next((a + b - rank.group.node for a, b in pairs if rank.group.node in (a, b)), None)
        if partner is None:
            continue
        latency_us, gbs, spread, trips = _pair(rank, partner, size, seconds / len(rounds))
        text = f"{size >> 10} KiB to {rank.group.name(partner)} and back"
        rank.add("pairs_group", gbs, text, gpu=rank.slot, peer=partner, spread=spread, repeats=trips)
        text = f"8 B to {rank.group.name(partner)}, half of the shortest of {ROUND_TRIPS} round trips"
        rank.add("pairs_group_latency", latency_us, text, gpu=rank.slot, peer=partner, repeats=ROUND_TRIPS)


def _pair(rank: Rank, partner: int, size: int, seconds: float) -> tuple[float, float, float, int]:
    """Return (us, GB/s, their variation, round trips), the same on both sides: the lower number measures."""
    torch, dist = rank.torch, rank.dist
    leads, other = rank.group.node < partner, partner * rank.here + rank.local
    small = torch.zeros(1, dtype=torch.float64, device=rank.device)
    large = torch.rand(size // 4, generator=torch.Generator().manual_seed(rank.seed)).to(rank.device)

    def trip(data: Any) -> float:
        began = time.perf_counter()
        if leads:
            dist.send(data, other)
            dist.recv(data, other)
        else:
            dist.recv(data, other)
            dist.send(data, other)
        rank.synchronize()
        return time.perf_counter() - began

    for _ in range(WARM_UP):  # the first one makes the connection
        trip(small)
    shortest = min(trip(small) for _ in range(ROUND_TRIPS))
    trip(large)
    once = trip(large)
    said = torch.tensor(
        [min(MOST_TRIPS, max(LEAST_TRIPS, 0.7 * seconds / once)), 0, 0, 0], dtype=torch.float64, device=rank.device
    )
    (dist.send if leads else dist.recv)(said, other)
    trips = int(said[0].item())
    times = [trip(large) for _ in range(trips)]
    usual = statistics.median(times) if rank.cuda else min(times)  # processors of a CPU are shared with others
    figures = [shortest / 2 * 1e6, size / (usual / 2) / 1e9, variation(times), trips]
    said.copy_(torch.tensor(figures, dtype=torch.float64))
    (dist.send if leads else dist.recv)(said, other)
    latency_us, gbs, spread, _ = said.tolist()
    return latency_us, gbs, spread, trips


# ---- training


def _windows(
    rank: Rank, name: str, step: Callable[[], float], tokens: float, seconds: float, between: Callable[[], None]
) -> float:
    """Measure windows of steps, add the figures, and return the last loss. `between`: called after each window."""
    rank.signs.at(f"the first steps of {name}")
    for _ in range(WARM_UP):
        step()
    rank.synchronize()
    began = time.perf_counter()
    loss = step()
    rank.synchronize()
    steps = int(rank.agreed(max(1, round(seconds / WINDOWS / (time.perf_counter() - began)))))
    until = time.monotonic() + seconds
    rates: list[float] = []
    while True:
        rank.signs.at(f"window {len(rates) + 1} of {name}")
        began = time.perf_counter()
        for _ in range(steps):
            loss = step()
        rank.synchronize()
        rates.append(steps * tokens / (time.perf_counter() - began))
        between()
        if not rank.agreed(float(len(rates) < 3 or time.monotonic() < until)):
            break
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss is {loss}")
    text = f"median of {len(rates)} windows of {steps} steps, over {rank.world} ranks; loss {loss:.6g}"
    lasting = {"spread": variation(rates), "repeats": len(rates)}
    rank.add(name, statistics.median(rates), text, gpu=None, **lasting)
    rank.add(f"{name}_slowest", min(rates), f"the slowest of {len(rates)} windows", gpu=None)
    return loss


def _fsdp(rank: Rank, seconds: float) -> None:
    """Train as `train_step` does within a node, over all of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch = rank.torch
    shape = GPU if rank.cuda else CPU
    mesh = init_device_mesh("cuda" if rank.cuda else "cpu", (rank.world,))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = bf16 if rank.cuda else MixedPrecisionPolicy()
    model = _model(torch, shape, rank.seed).to(rank.device)
    for layer in model[1].layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    train = _trainer(rank, model, shape, rank.seed + rank.rank)
    small = dataclasses.replace(shape, layers=min(SOLO_LAYERS, shape.layers))
    alone = _trainer(rank, _model(torch, small, rank.seed).to(rank.device), small, rank.seed)
    for _ in range(WARM_UP):
        alone()
    rank.synchronize()
    began = time.perf_counter()
    for _ in range(SOLO_TRIES):
        alone()
    rank.synchronize()
    once = (time.perf_counter() - began) / SOLO_TRIES
    count = int(rank.agreed(max(2, round(max(SOLO_LEAST_S, SOLO_SHARE * seconds / WINDOWS) / once))))
    rates: list[float] = []

    def between() -> None:
        rank.signs.at("steps of each device alone")
        began = time.perf_counter()
        for _ in range(count):
            alone()
        rank.synchronize()
        rates.append(count * small.batch * small.length / (time.perf_counter() - began))

    _windows(rank, "fsdp_group", train, shape.batch * shape.length, seconds, between)
    text = f"{small.layers} layers on this device alone, {len(rates)} times {count} steps"
    rank.add(
        "fsdp_group_solo", statistics.median(rates), text, gpu=rank.slot, spread=variation(rates), repeats=len(rates)
    )


def _trainer(rank: Rank, model: Any, shape: Shape, seed: int) -> Callable[[], float]:
    """Return a call that makes one training step and returns its loss."""
    torch = rank.torch
    drawn = torch.Generator().manual_seed(seed)
    words = torch.randint(0, shape.words, (shape.batch, shape.length + 1), generator=drawn).to(rank.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        with torch.autocast(rank.device.partition(":")[0], dtype=torch.bfloat16, enabled=rank.cuda):
            predicted = model(words[:, :-1])
            loss = torch.nn.functional.cross_entropy(predicted.flatten(0, 1).float(), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach().item())

    return step


def _tensor_parallel(rank: Rank, seconds: float) -> None:
    """Split each layer over all devices: the first product by columns, the second by rows, sums between them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch = rank.torch
    shape = GPU if rank.cuda else CPU
    hidden = -(-4 * shape.width // (16 * rank.world)) * 16 * rank.world  # a multiple of the number of ranks
    mesh = init_device_mesh("cuda" if rank.cuda else "cpu", (rank.world,))
    torch.manual_seed(rank.seed)
    layers = [
        torch.nn.Sequential(
            torch.nn.LayerNorm(shape.width), torch.nn.Linear(shape.width, hidden), torch.nn.GELU(),
            torch.nn.Linear(hidden, shape.width),
        )
        for _ in range(TP_LAYERS)
    ]  # fmt: skip
    kind = torch.bfloat16 if rank.cuda else torch.float32
    model = torch.nn.Sequential(*layers).to(device=rank.device, dtype=kind)
    for layer in model:
        parallelize_module(layer, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    drawn = torch.Generator().manual_seed(rank.seed)
    given = torch.randn(shape.batch * shape.length, shape.width, generator=drawn).to(device=rank.device, dtype=kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        loss = (model(given) - given).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach().item())

    _windows(rank, "tp_group", step, shape.batch * shape.length, seconds, lambda: None)


STAGES: dict[str, Callable[[Rank, float], None]] = {
    "pairs_group": _pairs, "fsdp_group": _fsdp, "tp_group": _tensor_parallel,
}  # fmt: skip
