"""What a GPU-hour is worth, by pool, as the operator sets it. No price is made up."""

from __future__ import annotations

from dataclasses import dataclass

from drover_core.settings import between, required, setting


@dataclass(frozen=True, slots=True)
class PoolPrice:
    pool: str = required("a pool of the fleet file")
    gpu_hour: float = required("price of one of its GPU-hours", between(0, 1e6))


@dataclass(frozen=True, slots=True)
class CostConfig:
    currency: str = setting(
        "", "what prices are in, such as EUR; empty: costs are told in GPU-hours alone",
        lambda v: None if len(v) <= 8 and v.isprintable() else "must be a word of at most 8 letters",
    )  # fmt: skip
    gpu_hour: float = setting(0.0, "price of a GPU-hour of pools not named below; 0: they have none", between(0, 1e6))
    pools: tuple[PoolPrice, ...] = setting((), "Prices by pool, one table each.")

    def price(self, pool: str) -> float | None:
        """Of a GPU-hour; None: not set."""
        own = next((entry.gpu_hour for entry in self.pools if entry.pool == pool), None)
        return own if own is not None else self.gpu_hour or None
