"""The fleet of a benchmark: so many streams, each the agent of one node with so many GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from drover_core.model.fleet import FleetSpec, NodeSpec, dump_toml

GPUS_PER_RACK = 1_000


@dataclass(frozen=True, slots=True)
class Shape:
    """`streams` nodes of `gpus` GPUs each; up to 255, as slots have a byte."""

    streams: int
    gpus: int

    @property
    def total(self) -> int:
        return self.streams * self.gpus

    def spec(self) -> FleetSpec:
        return FleetSpec(tuple(self._node(n) for n in range(self.streams)), (), "benchmark")

    def toml(self) -> str:
        return dump_toml(self.spec())

    def _node(self, number: int) -> NodeSpec:
        rack = number * self.gpus // GPUS_PER_RACK
        return NodeSpec(name(number), f"rack{rack:04d}", f"leaf{rack // 4:03d}", "train", "H100-SXM", self.gpus)


def name(number: int) -> str:
    return f"node{number:05d}"


def shape_of(gpus: int, per_stream: int) -> Shape:
    """Raises ValueError when `gpus` cannot be parted so."""
    if gpus % per_stream or not 0 < per_stream <= 255:
        raise ValueError(f"{gpus} GPUs cannot be parted into streams of {per_stream}; give a divisor up to 255")
    return Shape(gpus // per_stream, per_stream)
