"""What befalls small fleets before and after a collector of release 0.1 is replaced. Pure; both releases can run it.

`make.py` plays the first part of each scene to the engine of 0.1, stores what came of it, and notes what the engine of
0.1 finds in the second part after a restart. tests/collector/store/test_release_0_1.py plays the second part to the
engine of today, which knows of the first one only what the store says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    from testbed.release_names import (
        BUCKET_MS,
        LAG_MS,
        START_MS,
        Bucket,
        Decision,
        Engine,
        Event,
        EventKind,
        Finding,
        FleetIndex,
        FleetSpec,
        Incident,
        LinkSpec,
        NodeSpec,
        Outcome,
        Policy,
        Silence,
        Silences,
        training_bucket,
    )
except ModuleNotFoundError:  # release 0.1, in which make.py runs
    from drover_collector.buckets import BUCKET_MS, Bucket  # type: ignore[import-not-found, no-redef]
    from drover_collector.detectors.example import LAG_MS, START_MS, training_bucket  # type: ignore[import-not-found, no-redef]
    from drover_collector.fleet_index import FleetIndex  # type: ignore[import-not-found, no-redef]
    from drover_proto.events import Decision, Event, EventKind, Finding, Incident, Silence  # type: ignore[import-not-found, no-redef]
    from drover_proto.fleet import FleetSpec, LinkSpec, NodeSpec  # type: ignore[import-not-found, no-redef]

    from drover_collector.engine import Engine, Outcome  # type: ignore[import-not-found, no-redef]
    from drover_collector.notify.silences import Silences  # type: ignore[import-not-found, no-redef]
    from drover_collector.policy import Policy  # type: ignore[import-not-found, no-redef]

Columns = dict[str, npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Scene:
    """Buckets [0, cut) are of before the restart, [cut, end) of after it.

    Attributes:
        detector: the one that the scene is about.
        change, links: alter the columns of a bucket, as `example.training_bucket` takes them.
        silent, lost: numbers of the nodes, and GPUs, of which nothing comes, by bucket.
        events: by the bucket after which they come.
        inventories: (node, what it is made of), also by bucket.
        kept: what the store has of those at the restart.
    """

    detector: str
    index: FleetIndex
    cut: int
    end: int
    change: Callable[[int, Columns, Columns], None] | None = None
    links: Callable[[int, Columns], None] | None = None
    silent: Callable[[int], Sequence[int]] = lambda _: ()
    lost: Callable[[int], Sequence[int]] = lambda _: ()
    events: Mapping[int, Sequence[Event]] = field(default_factory=dict)
    inventories: Mapping[int, Sequence[tuple[str, Mapping[str, str]]]] = field(default_factory=dict)
    kept: Sequence[tuple[str, Mapping[str, str]]] = ()

    def bucket(self, number: int) -> Bucket:
        bucket = training_bucket(self.index, number, self.change, self.silent(number), links=self.links)
        for g in self.lost(number):
            bucket.gpu_rows[g] = 0
            for column in bucket.gpu.values():
                column[g] = np.nan
        return bucket

    def play(self, engine: Engine, numbers: range) -> Iterator[tuple[int, Sequence[Event], Outcome]]:
        """Give the engine each of these buckets and what comes with it: bucket number, events, what came of them."""
        for number in numbers:
            bucket, events = self.bucket(number), self.events.get(number, ())
            now_ms = bucket.end_ms + LAG_MS
            for node, facts in self.inventories.get(number, ()):
                engine.on_inventory(node, facts, now_ms)
            yield number, (), engine.on_bucket(bucket, now_ms)
            if events:
                yield number, events, engine.on_events(events, now_ms + 1)

    def restart(self, engine: Engine, incidents: Sequence[Incident], decisions: Sequence[Decision]) -> None:
        """What an engine gets at its start: no bucket, as after a stop that was longer than what a start reads."""
        for node, facts in self.kept:
            engine.on_inventory(node, facts, at(0) + LAG_MS)
        engine.restore(incidents, [], [], decisions)


def fleet(prefix: str, nodes: int = 8, gpus: int = 8, ports: int = 0, per_rack: int = 4) -> FleetIndex:
    links = tuple(LinkSpec(f"mlx5_{port}", port) for port in range(ports))
    specs = (
        NodeSpec(
            f"{prefix}{n:02d}", f"{prefix}-r{n // per_rack}", f"{prefix}-l{n // per_rack}", "train", "H100", gpus, links
        )
        for n in range(nodes)
    )
    return FleetIndex(FleetSpec(tuple(specs)))


def at(number: int) -> int:
    """The end of a bucket, ms."""
    return START_MS + (number + 1) * BUCKET_MS


def line(code: int, number: int, node: str, gpu: int | None) -> Event:
    """An XID that the agent reads at the end of a bucket."""
    at_ms = at(number)
    id_ = f"{node}/spool/{gpu}-{code}-{number}"
    return Event(id_, at_ms, node, gpu, EventKind.XID, str(code), f"Xid {code}", "kmsg", received_ms=at_ms + 100)


def compared(finding: Finding) -> list[object]:
    """What of a finding must be alike in both releases: not its words, and of ports alone since when."""
    return [
        finding.kind.value, finding.cause, finding.scope, finding.node, finding.gpu, finding.severity.value,
        finding.since_ms if finding.cause.startswith("port_") else None, finding.cleared, finding.job,
        sorted([node, gpu] for node, gpu in finding.members),
    ]  # fmt: skip


# ---- a job that crashes: more of its ranks report it after the restart


def _crash() -> Scene:
    index = fleet("crash")
    first = [line(31, 3, f"crash{n:02d}", 1) for n in range(8)]
    return Scene("xid", index, 6, 14, events={3: first, 8: [line(31, 8, f"crash{n:02d}", 1) for n in range(6)]})


# ---- a job that hangs on one rank


def _stand_still(number: int, gpu: Columns, _node: Columns) -> None:
    if number >= 6:
        gpu["tensor_active_ratio"][:], gpu["dram_active_ratio"][:] = 0.0, 0.01
        gpu["power_w"][:], gpu["gpu_util_ratio"][:] = 210.0, 1.0
        if number < 20:  # later it shows no difference: only what was found before names it
            gpu["gpu_util_ratio"][21], gpu["power_w"][21] = 0.0, 110.0


# ---- a GPU that is much warmer than it was itself, and no warmer than its peers may be


def _warmer(number: int, gpu: Columns, _node: Columns) -> None:
    if number >= 40:
        gpu["gpu_temp_c"][21] = 26 + 0.055 * 1.28 * gpu["power_w"][21]
        gpu["thermal_margin_c"][21] = 87 - gpu["gpu_temp_c"][21]


# ---- nodes that are set up otherwise: two of them are mended after the restart


def _facts(**odd: str) -> dict[str, str]:
    facts = {"driver_version": "570.172.08", "host.kernel": "5.15.0-1071", "nic.mlx5_0.firmware": "28.39.1002"}
    facts["nic.mlx5_0.board"] = "MT_0000000838"
    for slot in range(8):
        mine = {"model": "H100", "vbios": "96.00.A5.00.01", "power_limit_set_w": "700", "ecc_mode": "on"}
        facts |= {f"gpu{slot}.{key}": value for key, value in mine.items()}
    return facts | odd


ODD = {
    "drift02": {"gpu3.ecc_mode": "off", "gpu3.power_limit_set_w": "500"},
    "drift05": {"gpu3.ecc_mode": "off"},
    "drift07": {"driver_version": "535.54.03", "nic.mlx5_0.firmware": "26.36.1010"},
}
MENDED = {"drift02": {"gpu3.ecc_mode": "off"}, "drift05": {}, "drift07": {"driver_version": "535.54.03"}}


def _drift() -> Scene:
    """ECC that is off on one GPU alone is a setting that was meant, unless it was reported before."""
    index = fleet("drift", 16)
    before = [(node.name, _facts(**ODD.get(node.name, {}))) for node in index.nodes]
    after = [(name, _facts(**odd)) for name, odd in MENDED.items()]
    return Scene("drift", index, 45, 90, inventories={0: before, 45: after}, kept=before)


# ---- a GPU that slows by little: only its own past shows it


def _slower(number: int, gpu: Columns, _node: Columns) -> None:
    if number >= 60:
        others = np.arange(len(gpu["power_w"])) != 13
        for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
            gpu[metric][others] /= 1.05
        gpu["sm_clock_mhz"][13] /= 1.05


# ---- ports


def _ports(number: int, link: Columns) -> None:
    if number >= 5:
        link["link_up"][20] = 0.0  # mlx5_4 of port02
        link["rate_gbps"][50] = 200.0  # mlx5_2 of port06
    link["link_downed"][33] += sum(number >= when for when in (5, 10, 52))  # mlx5_1 of port04: flaps


def _leaf(number: int, link: Columns) -> None:
    if number >= 5:
        link["link_up"][:32] = 0.0


def _resets(number: int, link: Columns) -> None:
    link["link_downed"][:32] += sum(number >= when for when in (5, 10, 52))


# ---- incidents with a life


def _life() -> Scene:
    """A rack whose air gets hot right after one of its GPUs; heat that goes and comes; rows that wait for a reset and
    then two GPUs that are lost, one of which comes back; an XID that comes again after a while."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        def heat(which: slice, ratio: float) -> None:
            gpu["gpu_temp_c"][which] = 26 + 0.055 * ratio * gpu["power_w"][which]
            gpu["thermal_margin_c"][which] = 87 - gpu["gpu_temp_c"][which]

        if number >= 5:
            heat(slice(3, 4), 1.6)  # GPU 3 of life00
            gpu["row_remap_pending"][[40, 56]] = 1.0  # GPU 0 of life05, and of life07
        if 5 <= number < 12 or 50 <= number < 56:
            heat(slice(75, 76), 1.6)  # GPU 3 of life09
        if number >= 9:
            node["inlet_temp_c"][:4] += 8
            gpu["gpu_temp_c"][:32] += 8

    def lost(number: int) -> Sequence[int]:
        return (40, 56) if 12 <= number < 50 else (56,) if number >= 50 else ()

    events = {10: [line(48, 10, "life06", 2)], 55: [line(48, 55, "life06", 2)]}
    return Scene("", fleet("life", 12), 70, 70, change, lost=lost, events=events)


# ---- what the policy makes of it


def _mass() -> Scene:
    """Six nodes fall silent, and come back; then six lose a GPU, another of which is in maintenance; then a seventh."""
    lost = [line(79, 70, f"mass{n:02d}", 0) for n in (10, 11, 12, 13, 14, 15)]
    events = {70: [*lost, line(79, 70, MAINTAINED, 0)], 84: [line(79, 84, "mass17", 0)]}
    return Scene(
        "guard", fleet("mass", 40, 1), 80, 95, silent=lambda n: (1, 5, 21, 25, 29, 33) if 3 <= n < 45 else (),
        events=events,
    )  # fmt: skip


MAINTAINED = "mass20"


SCENES: Mapping[str, Scene] = {
    "crash": _crash(),
    "hang": Scene("hang", fleet("hang"), 18, 30, _stand_still),
    "warm": Scene("thermal", fleet("warm"), 50, 60, _warmer),
    "drift": _drift(),
    "slow": Scene("straggler", fleet("slow"), 90, 110, _slower),
    "port": Scene("links", fleet("port", ports=8), 40, 60, links=_ports),
    "leaf": Scene("links", fleet("leaf", ports=8), 40, 60, links=_leaf),
    "reset": Scene("links", fleet("reset", ports=8), 40, 60, links=_resets),
    "life": _life(),
    "mass": _mass(),
    "ask": Scene("", fleet("ask"), 16, 16, events={4: [line(79, 4, "ask01", 2)]}),
}
MODES: Mapping[str, str] = {"mass": "enforce", "ask": "approve"}  # of policies that do more than observe


def policy(name: str) -> Policy:
    return dataclasses.replace(Policy.named("nvidia"), mode=MODES.get(name, "observe"), approval_expires_s=60.0)


def engine(name: str) -> Engine:
    made = Engine(SCENES[name].index, policy(name), START_MS, ceiling=MODES.get(name, "observe"))
    if name == "mass":
        held = Silences(made.index.spec.by_name)
        until_ms = START_MS + 10 * 3_600_000
        held.take(Silence("s1", START_MS, START_MS, until_ms, "anna", "new cables", (MAINTAINED,), maintenance=True))
        made.decider.maintenance = held.held(START_MS + 1)
    return made


def after(scene: Scene, engine: Engine) -> dict[str, Any]:
    """What an engine does with the second part of a scene: what its detector finds, what is decided, what is left."""
    findings: list[Any] = []
    decided: list[Any] = []
    for number, _, outcome in scene.play(engine, range(scene.cut, scene.end)):
        found = [compared(finding) for finding in outcome.findings if finding.detector == scene.detector]
        findings += [[number, *one] for one in found]
        decided += [[number, d.node, d.wanted.value, d.outcome] for d in outcome.decisions]
    left = sorted(
        [i.kind.value, i.cause, i.scope, i.node, i.gpu, len(i.members), i.closed_ms is None]
        for i in engine.incidents.values()
    )
    return {"findings": findings, "decisions": decided, "incidents": left}
