"""Ask Kubernetes what made the pods that hold GPUs, and store it as events next to those of the agents.

Only the collector that detects asks, for the nodes with pods that are new, at most NODES in a round, and for each pod
again once a day. Without the right to read a kind the answer ends below it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from drover_collector.actions.base import ActError, AwayError
from drover_collector.actions.kubernetes.controllers import Controllers
from drover_collector.pipeline.pipeline import Pipeline
from drover_core.jobs.owner import KUBERNETES, JobOwner, OwnerError, clean, from_message, to_message
from drover_core.model.events import Event
from drover_core.model.kinds import OWNER, EventKind

log = logging.getLogger(__name__)

ROUND_S = 30.0
NODES = 50  # whose pods are listed in one round
AGAIN_MS = 86_400_000
READ = 100_000  # owners that are read at the start
SOURCE = "kubernetes"


class PodApi(Protocol):
    def pods(self, node: str) -> list[dict[str, Any]]: ...

    def read(self, path: str) -> dict[str, Any] | None: ...


class PodOwners:
    """All calls but `run` may block."""

    def __init__(self, pipeline: Pipeline, api: PodApi) -> None:
        self._pipeline, self._api = pipeline, api
        self._asked_ms: dict[str, int] | None = None  # pod -> when; None: the store was not read yet
        self._nodes_ms: dict[str, int] = {}  # node -> when its pods were listed: those that wait longest come first
        self._logged = ""

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                if self._pipeline.leading:
                    await asyncio.to_thread(self.ask)
            except Exception as error:  # noqa: BLE001  # a defect must neither end this task nor go unseen
                self._pipeline.ticks.failed(error, self._pipeline.now_ms())
            await asyncio.sleep(ROUND_S)

    def ask(self) -> None:
        """Ask for pods that are new, and store whose they are.

        Raises:
            StoreError: it does not answer; the same pods are asked for again.
        """
        now_ms, store = self._pipeline.now_ms(), self._pipeline.store
        asked = self._asked(now_ms)
        running = self._running(now_ms)
        pods = {pod for each in running.values() for pod in each}
        self._asked_ms = asked = {pod: at for pod, at in asked.items() if pod in pods and now_ms - at < AGAIN_MS}
        self._nodes_ms = {node: at for node, at in self._nodes_ms.items() if node in running}
        new = sorted(node for node, each in running.items() if any(pod not in asked for pod in each))
        wanted = sorted(new, key=lambda node: self._nodes_ms.get(node, 0))[:NODES]
        controllers = Controllers(self._api)
        owners: dict[str, JobOwner] = {}
        trouble = ""
        for node in wanted:
            self._nodes_ms[node] = now_ms
            try:
                owners |= self._of_node(controllers, node, running[node])
            except AwayError as error:
                trouble = str(error)
                break
            except ActError as error:  # of this node alone
                trouble = str(error)
        self._log(trouble or controllers.trouble)
        events = [
            Event(
                f"{pod}/{SOURCE}/{now_ms}", now_ms, node, None, EventKind.RANK, OWNER, to_message(owners[pod]), SOURCE,
                received_ms=now_ms, forgeable=True,
            )
            for node in wanted for pod in sorted(running[node]) if pod in owners and pod not in asked
        ]  # fmt: skip
        if events:
            store.events.write(events)
            store.events.write_judged(events)  # nothing judges them
            asked.update((from_message(event.message).job, now_ms) for event in events)

    def _of_node(self, controllers: Controllers, node: str, pods: Sequence[str]) -> dict[str, JobOwner]:
        """Return the owners of the pods of a node. A pod that Kubernetes no longer has is asked for again."""
        found = {}
        for pod in self._api.pods(node):
            meta = pod.get("metadata") or {}
            name = f"{meta.get('namespace')}/{meta.get('name')}"
            if name in pods:
                found[name] = JobOwner(
                    name, KUBERNETES, account=str(meta.get("namespace")), controller=clean(controllers.of(pod))
                )
        return found

    def _running(self, now_ms: int) -> Mapping[str, list[str]]:
        """Return node -> the pods that hold GPUs of it."""
        index = self._pipeline.index
        codes, names = self._pipeline.store.jobs.at(index, now_ms)
        found: dict[str, set[str]] = {}
        for gpu, code in enumerate(codes.tolist()):
            if code >= 0 and "/" in names[code]:
                found.setdefault(index.member(gpu)[0], set()).add(names[code])
        return {node: sorted(pods) for node, pods in found.items()}

    def _asked(self, now_ms: int) -> dict[str, int]:
        """Return when each pod was asked for; at the start by what is stored of the last half day."""
        if self._asked_ms is not None:
            return self._asked_ms
        since_ms = now_ms - AGAIN_MS // 2
        found = {}
        for message in self._pipeline.store.events.messages_of_code(EventKind.RANK, OWNER, since_ms, READ):
            try:
                owner = from_message(message)
            except OwnerError:
                continue
            if owner.by == KUBERNETES:
                found[owner.job] = since_ms
        return found

    def _log(self, trouble: str) -> None:
        if trouble and trouble != self._logged:
            log.warning("what made some pods is not known: %s", trouble)
        self._logged = trouble
