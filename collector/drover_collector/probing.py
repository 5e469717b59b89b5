"""Probes of one collector: its desk, who asks it, and how verdicts come to the engine and to who acts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from drover_collector.actions.settings import ActConfig, used
from drover_collector.pipeline.pipeline import Pipeline
from drover_collector.probes.scheduling.group_orders import address_of
from drover_collector.probes.scheduling.protection import Protection, Unprotected
from drover_collector.probes.scheduling.requests import Asking, held_nodes
from drover_collector.probes.scheduling.slurm_holds import SlurmHolds
from drover_collector.probes.service import ProbeOrderService, Stream
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import StoreError
from drover_core.model.events import ProbeVerdict


class Probing:
    """Made before the pipeline starts; set `stream` once there is an ingest, and run all of `works`."""

    def __init__(self, pipeline: Pipeline, config: ProbesConfig, act: ActConfig | None = None) -> None:
        """`act`: which schedulers there are; None: none."""
        self._pipeline = pipeline
        self.stream: Callable[[str], Stream | None] = lambda _: None
        self.desk = ProbeOrderService(
            pipeline.store, pipeline.index, config, stream=lambda node: self.stream(node),
            leading=lambda: pipeline.leading, now_ms=pipeline.now_ms, troubles=pipeline.ticks.troubles,
            held=lambda: held_nodes(pipeline.store, pipeline.index, pipeline.now_ms()), address=self._address,
            protection=_protection(pipeline, config, act or ActConfig()),
        )  # fmt: skip
        self.desk.maintained = lambda: pipeline.outbox.silences.held(pipeline.now_ms())
        self.asking = Asking(
            pipeline.store, pipeline.index, config, self.desk, lambda: pipeline.leading, lambda: pipeline.incidents,
            pipeline.now_ms, lambda: {risk.node: risk.chance for risk in pipeline.engine.risks},
            maintained=self.desk.maintained,
        )  # fmt: skip
        self.desk.on_verdicts.append(self._judge)
        pipeline.saving.takers.append(self.asking.take)
        if pipeline.dispatcher is not None:
            pipeline.dispatcher.returns.validator = self.desk
            self.desk.on_verdicts.append(pipeline.dispatcher.on_verdicts)

    @property
    def works(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        return self.desk.run, self.asking.run

    def _address(self, node: str) -> str:
        """Where other nodes reach this one. Raises StoreError."""
        return address_of(self._pipeline.store.inventories.newest(node), getattr(self.stream(node), "peer", ""))

    def _judge(self, verdicts: Sequence[ProbeVerdict]) -> None:
        """
        Raises:
            StoreError: what came of them is not stored; the same ones are told again.
        """
        if not self._pipeline.leading:
            raise StoreError("this collector is not the active one any more")
        try:
            stored = self._pipeline.judge_now(lambda engine: engine.on_verdicts(verdicts, verdicts[0].ts_ms))
        except RuntimeError:
            raise StoreError("this collector stops") from None
        if not stored:
            raise StoreError("what probes have shown waits for the store")


def _protection(pipeline: Pipeline, config: ProbesConfig, act: ActConfig) -> Protection:
    spec, pools, holds = pipeline.index.spec, used(act), config.slurm
    if not pools and not holds.on:
        return Unprotected()

    def of_scheduler(node: str) -> bool:
        return any(not its or spec.by_name[node].pool in its for its in pools.values())

    return Protection(
        pipeline.dispatcher.context.actuators.of if pipeline.dispatcher is not None else lambda _: None, of_scheduler,
        SlurmHolds(holds) if holds.on else None,
        lambda node: not holds.pools or spec.by_name[node].pool in holds.pools,
        holds, pipeline.store.fence, pipeline.now_ms,
    )  # fmt: skip
