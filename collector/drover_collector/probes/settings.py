"""The [probes] table of the collector's settings."""

from __future__ import annotations

from dataclasses import dataclass

from drover_proto.probes import LEVELS
from drover_proto.settings import between, one_of, setting


def _ports(value: str) -> str | None:
    first, _, last = value.partition("-")
    if first.isdigit() and last.isdigit() and 1024 <= int(first) <= int(last) < 65_536:
        return None
    return "must be two ports from 1024 to 65535, as in 29500-29599"


@dataclass(frozen=True, slots=True)
class ProbesConfig:
    confirm: bool = setting(False, "in observe mode too: probe what is suspected, where no process holds the GPU")
    baseline: bool = setting(False, "probe a node whose driver or firmware has changed, once nothing runs there")
    admit: bool = setting(False, "probe a node that was never probed, while nothing runs there")
    idle_share_per_day: float = setting(
        0.0, "share of the nodes that are probed each day while nothing runs there; 0: none", between(0, 1)
    )
    level: str = setting("quick", "level of all probes that Drover asks for by itself", one_of(*LEVELS))
    idle_for_s: float = setting(900.0, "a node is idle when nothing has run there for this long", between(60, 86_400))
    most_at_once: int = setting(8, "orders under way in the fleet at once", between(1, 10_000))
    most_per_rack: int = setting(2, "likewise in one rack", between(1, 1000))
    group_ports: str = setting(
        "29500-29599", "ports at which the first node of a group listens, FIRST-LAST, one for each group", _ports
    )
    group_join_s: float = setting(60.0, "how long the nodes of a group wait for each other", between(5, 600))
    wait_s: float = setting(900.0, "an order whose node has no stream for this long has failed", between(10, 86_400))

    @property
    def ports(self) -> range:
        first, _, last = self.group_ports.partition("-")
        return range(int(first), int(last) + 1)
