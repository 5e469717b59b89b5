"""Search: what a text names, the best match first, in a bounded answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from drover_collector.api import search
from drover_collector.api.search import EXACT, PART, PREFIX, chosen, find_gpus, gpu_texts
from drover_collector.store import EntityRow, Store
from drover_core.metrics.catalog import Scope
from drover_proto import fleet_pb2 as pb
from testbed.fleet_served import Against, Served, served


@pytest.fixture(scope="module")
def against(store_root: Path) -> Iterator[Against]:
    """Runs checks against one served fleet; they leave it unchanged."""
    store = Store.open(f"chdb://{store_root}?database=api_search")
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        fleet = runner.run(stack.enter_async_context(served(store)))
        yield lambda check: runner.run(check(fleet))
        runner.run(stack.aclose())
    store.close()


ALL = ("node", "job", "gpu", "incident", "rack")


def gpu(node: str, slot: int, uuid: str, serial: str = "") -> EntityRow:
    return EntityRow(hash((node, slot)) % 2**63, Scope.GPU, serial or uuid, node, slot, uuid=uuid, serial=serial)


def test_what_each_kind_of_text_finds(against: Against) -> None:
    async def check(fleet: Served) -> None:
        async def kinds(text: str) -> list[tuple[str, str]]:
            reply = await fleet.stub.Search(pb.SearchRequest(text=text))
            return [(hit.kind, hit.name) for hit in reply.hits]

        assert (await kinds("N1"))[0] == ("node", "n1")
        assert (await kinds("gpu-serial-n2-1"))[0] == ("gpu", "GPU-serial-n2-1")
        assert (await kinds("serial-n2-1"))[0] == ("gpu", "GPU-serial-n2-1"), "the serial number is in the UUID here"
        assert (await kinds("n2 gpu 1"))[0] == (await kinds("n2:1"))[0] == ("gpu", "n2 GPU 1")
        assert (await kinds("trai"))[0] == ("job", "train")
        assert (await kinds(fleet.incident.id[:8]))[0] == ("incident", fleet.incident.summary)
        assert [kind for kind, _ in await kinds("xid 79")] == ["xid", "incident"]
        assert (await kinds("r1"))[0] == ("rack", "r1")
        assert (await kinds("leaf0"))[0] == ("leaf", "leaf0")
        assert await kinds("nothing has this") == await kinds("  ") == []
        assert await kinds("²") == await kinds("xid ²") == [], "a digit, but no number"
        code, said = await fleet.refused(fleet.stub.Search(pb.SearchRequest(text="x" * 201)))
        assert (code, "at most 200" in said) == (grpc.StatusCode.INVALID_ARGUMENT, True)

        (xid, *_) = (await fleet.stub.Search(pb.SearchRequest(text="79"))).hits
        assert (xid.incident, xid.state) == (fleet.incident.id, "critical")
        (silent, *_) = (await fleet.stub.Search(pb.SearchRequest(text="n3"))).hits
        assert silent.state == "unknown", "a node that never reported is not healthy"

    against(check)


def test_gpus_come_exact_then_prefix_then_any_part_each_once() -> None:
    exact, prefix = gpu("a", 0, "GPU-12ab", "12ab"), gpu("b", 0, "GPU-99", "12ABCD")
    part, both = gpu("c", 0, "GPU-x12ab"), gpu("d", 0, "GPU-12abz", "z12abz")
    found = list(find_gpus(gpu_texts([part, both, prefix, exact]), "12ab"))
    assert [(how, row.node) for how, row in found] == [(EXACT, "a"), (PREFIX, "b"), (PART, "c"), (PART, "d")]
    assert list(find_gpus(gpu_texts([]), "12ab")) == []


@pytest.mark.parametrize(
    ("counts", "limit", "given", "more"),
    [
        ({"node": 30}, 20, {"node": 20}, True),
        ({"node": 3, "job": 30}, 20, {"node": 3, "job": 17}, True),
        (dict.fromkeys(ALL, 30), 20, dict.fromkeys(ALL, 4), True),
        ({"node": 2, "rack": 1}, 20, {"node": 2, "rack": 1}, False),
    ],
)  # fmt: skip
def test_no_kind_takes_the_place_of_another(
    counts: dict[str, int], limit: int, given: dict[str, int], more: bool
) -> None:
    kinds = [[(PART, pb.SearchHit(kind=kind))] * count for kind, count in counts.items()]
    hits, is_more = chosen(kinds, limit)
    assert {kind: sum(hit.kind == kind for hit in hits) for kind in counts} == given
    assert is_more == more


def test_the_kind_with_the_best_match_comes_first() -> None:
    kinds = [[(PART, pb.SearchHit(kind="node"))], [], [(EXACT, pb.SearchHit(kind="rack"))]]
    assert [hit.kind for hit in chosen(kinds, search.LIMIT)[0]] == ["rack", "node"]
