"""What made the pods that hold GPUs is asked once, stored as events, and read as the owners of jobs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drover_collector.actions.base import ActError, AwayError
from drover_collector.api.owners import read_owners
from drover_collector.pipeline.pod_owners import AGAIN_MS, PodOwners
from drover_collector.store import Store
from drover_core.jobs.owner import KUBERNETES, JobOwner
from drover_core.model.events import Holding
from testbed.collected import small_index

T0 = 1_800_000_000_000
INDEX = small_index(2, 2)


class Api:
    """`made`: pod -> what made it."""

    def __init__(self, **made: tuple[str, str]) -> None:
        self.made, self.asked, self.away, self.refuses = made, list[str](), False, frozenset[str]()

    def pods(self, node: str) -> list[dict[str, Any]]:
        self.asked.append(node)
        if node in self.refuses:
            raise ActError("no such node")
        if self.away:
            raise AwayError("no answer")
        return [
            {
                "metadata": {
                    "namespace": "team", "name": name,
                    "ownerReferences": [{"apiVersion": "kubeflow.org/v1", "kind": k, "name": n, "controller": True}],
                }
            }
            for name, (k, n) in self.made.items()
        ]  # fmt: skip

    def read(self, path: str) -> dict[str, Any] | None:
        raise AssertionError(path)


def test_pods_are_asked_for_once_and_again_a_day_later(store_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store.open(f"chdb://{store_root}?database=pod_owners")
    try:
        store.jobs.write_holdings(
            [Holding("n0", 0, "team/a", T0), Holding("n0", 1, "team/gone", T0), Holding("n1", 0, "7", T0)]
        )
        now = [T0 + 1000]
        pipeline = cast(Any, SimpleNamespace(index=INDEX, store=store, leading=True, now_ms=lambda: now[0]))
        api = Api(a=("PyTorchJob", "bert"), other=("Job", "x"))
        owners = PodOwners(pipeline, api)
        api.away = True
        owners.ask()
        owners.ask()
        assert read_owners(store, T0) == {}
        assert [record.message for record in caplog.records] == ["what made some pods is not known: no answer"]
        api.away, api.asked = False, []
        owners.ask()
        known = {"team/a": JobOwner("team/a", KUBERNETES, account="team", controller="PyTorchJob/bert")}
        assert read_owners(store, T0) == known
        api.made["gone"] = ("PyTorchJob", "late")
        owners.ask()
        assert read_owners(store, T0)["team/gone"].controller == "PyTorchJob/late"
        owners.ask()
        assert api.asked == ["n0", "n0"]  # n1 has no pod
        assert store.events.unjudged(now[0], 10) == []  # nothing judges them, also after a restart
        restarted = PodOwners(pipeline, api)
        restarted.ask()
        assert api.asked == ["n0", "n0"]  # what is stored is not asked for again
        now[0] += AGAIN_MS
        owners.ask()
        assert len(api.asked) == 3
    finally:
        store.close()


def test_nodes_without_an_answer_keep_no_other_waiting(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """n0 is refused; with one node a round its pod must not be asked for again and again before those of n1."""
    store.jobs.write_holdings([Holding("n0", 0, "team/gone", T0), Holding("n1", 0, "team/a", T0)])
    now = [T0 + 1000]
    pipeline = cast(Any, SimpleNamespace(index=INDEX, store=store, leading=True, now_ms=lambda: now[0]))
    api = Api(a=("PyTorchJob", "bert"))
    api.refuses = frozenset({"n0"})
    owners = PodOwners(pipeline, api)
    owners.ask()
    assert (api.asked, list(read_owners(store, T0))) == (["n0", "n1"], ["team/a"])
    api.refuses, api.asked = frozenset({"n0", "n1"}), []
    monkeypatch.setattr("drover_collector.pipeline.pod_owners.NODES", 1)
    owners = PodOwners(pipeline, api)
    owners._asked_ms = {}
    for _ in range(2):
        now[0] += 1
        owners.ask()
    assert api.asked == ["n0", "n1"]
