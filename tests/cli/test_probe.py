"""`drover probe` over real gRPC: asked, sent to the node, judged against the fleet, shown, and an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from drover_cli.commands import probe
from drover_cli.main import main
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import Store
from drover_core.model.events import ProbeResult
from drover_proto import telemetry_pb2 as pb
from testbed import probed
from testbed.collected import small_index
from testbed.probes_served import serving

NOW = 1_800_000_000_000
INDEX = small_index(16, 8)
NODES = [node.name for node in INDEX.nodes]
GOOD, SLOW, BUSY, SILENT = NODES[4], NODES[0], NODES[5], NODES[6]
PAIRED = NODES[8:14]  # with whom `--group` and `--fabric` are tried; the last one's network is slow

Say = Callable[..., tuple[int, str, str]]


def measured(node: str) -> Callable[[pb.ProbeRequest], list[ProbeResult]]:
    """What the node's hardware gives, as `testbed.probed` has it."""

    def answer(request: pb.ProbeRequest) -> list[ProbeResult]:
        found = list(probed.results(node, NODES.index(node), NOW, run=9))
        kept = [r for r in found if r.end or not request.gpus or r.gpu in request.gpus]
        return [replace(r, id=f"{request.id}/{r.id.rpartition('/')[2]}") for r in kept]

    return answer


def together(node: str) -> Callable[[pb.ProbeRequest], list[ProbeResult]]:
    """What a node measures together with others."""

    def answer(request: pb.ProbeRequest) -> list[ProbeResult]:
        value = 90.0 if PAIRED[-1] in request.group.names else 180.0
        base = ProbeResult("", node, None, "", NOW, None, None, "", request=request.id, level="quick", device="H200")
        figures = [
            replace(base, id=f"{request.id}/{k}", probe=probe, value=value, unit="GB/s")
            for k, probe in enumerate(request.probes)
        ]
        return [*figures, replace(base, id=f"{request.id}/end", end="done")]

    return answer


def refuses(request: pb.ProbeRequest) -> list[ProbeResult]:
    why = "GPU 2: held by process 4711 (python, ada)"
    return [ProbeResult(f"{request.id}/end", BUSY, None, "", NOW, None, None, "", why, request.id, end="refused")]


@pytest.fixture(scope="module")
def address(store_root: Path) -> Iterator[str]:
    """A collector's Fleet API in a thread with its own loop."""
    store = Store.open(f"chdb://{store_root}?database=cli_probe")
    probed.fill(store, NODES, NOW)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def wait(coroutine):  # type: ignore[no-untyped-def]  # of any kind
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(120)

    stack = contextlib.AsyncExitStack()
    answers = {GOOD: measured(GOOD), SLOW: measured(SLOW), BUSY: refuses} | {node: together(node) for node in PAIRED}
    served = wait(
        stack.enter_async_context(
            serving(store, INDEX, lambda: NOW, answers, ProbesConfig(most_at_once=100, most_per_rack=100))
        )
    )
    yield served.address
    wait(stack.aclose())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    store.close()


@pytest.fixture
def say(address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    monkeypatch.setattr(probe, "POLL_S", 0.05)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["probe", *words, "--collector", address])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_pairs_of_a_fabric_name_the_odd_node(say: Say) -> None:
    code, out, err = say("--fabric", *PAIRED, "--wait", "--only", "allreduce_group")
    assert code == 1
    failed = [line.partition(" with ")[0] for line in out.splitlines() if "FAILED: " in line]
    assert set(failed) == {PAIRED[-1]}, out
    assert "allreduce_group 180 GB/s" in out
    code, out, _ = say("--group", *PAIRED[:2], "--wait", "--only", "allreduce_group", "--json")
    assert code == 0, "held against those before"
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["node"], row["members"], row["passed"]) for row in rows] == [
        (node, PAIRED[:2], True) for node in PAIRED[:2]
    ]
    code, _, err = say("--group", PAIRED[0], "--gpu", "1")
    assert (code, "all GPUs of their nodes take part" in err) == (2, True)


def test_a_healthy_node_passes_with_its_figures_against_the_fleet(say: Say) -> None:
    code, out, err = say(GOOD, "--wait")
    assert code == 0, out
    assert err.splitlines()[-1] == f"{GOOD}: has ended"
    head, *lines = out.splitlines()
    assert head == f"{GOOD}: passed: {GOOD}: 8 GPUs give what their configuration gives"
    assert lines[0].split() == ["PROBE", "ON", "VALUE", "EXPECTED", "OFF", "BY", "JUDGED", "FROM", "VERDICT"]
    bf16 = [line.split() for line in lines if line.startswith("gemm_bf16")]
    assert [words[1:3] for words in bf16] == [["GPU", str(slot)] for slot in range(8)]
    assert all(words[4] == "TFLOP/s" and words[5].startswith("78") and words[7] == "%" for words in bf16)
    (pairs,) = [line.split() for line in lines if line.startswith("p2p")]
    assert pairs[:3] == ["p2p", "56", "pairs"]
    assert "FAIL" not in out


def test_a_slow_gpu_fails_the_command_and_is_named(say: Say) -> None:
    code, out, _ = say(SLOW, "--gpu", "5", "--gpu", "1", "--wait", "--why", "slow in job 812")
    assert code == 1
    assert out.startswith(f"{SLOW}: FAILED: GPU 5 of {SLOW}: gemm_bf16 749.5 TFLOP/s, ")
    (line,) = [line for line in out.splitlines() if line.startswith("gemm_bf16  GPU 5")]
    assert line.split()[-1] == "FAIL"
    assert "-5." in line
    assert not any(line.split()[-1] == "FAIL" for line in out.splitlines() if line.startswith("gemm_bf16  GPU 1"))


def test_a_probe_that_failed_is_no_pass(say: Say) -> None:
    code, out, err = say(BUSY, "--wait", "--json")
    assert code == 1
    (row,) = [json.loads(line) for line in out.splitlines()]
    assert (row["state"], row["passed"], row["by"], row["why"]) == ("failed", False, "a local user", "person")
    assert "held by process 4711 (python, ada)" in row["detail"]
    assert f"{BUSY}: failed: refused: GPU 2: held by process 4711" in err


def test_without_waiting_it_prints_the_order_and_the_list_shows_it(say: Say) -> None:
    code, out, _ = say(SILENT, "--only", "sdc,gemm_bf16", "--level", "standard")
    assert code == 0
    order, node, state = out.splitlines()[2].split()
    assert (node, state) == (SILENT, "asked")
    code, out, _ = say("--list", SILENT)
    assert code == 0
    (line,) = out.splitlines()[2:]
    assert line.split()[:5] == [order, SILENT, "sdc,gemm_bf16", "person", "a"]
    code, out, _ = say("--list", "--json", "--limit", "1")
    assert json.loads(out)["passed"] is None, "not known yet"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "name the nodes to probe, or --list to see orders"),
        (["zz"], "no node 'zz' in the fleet file; `drover nodes` lists them"),
        ([GOOD, "--gpu", "9"], f"{GOOD} has no GPU 9; its slots are 0 to 7"),
        ([GOOD, "--only", "rm"], "no probe is called 'rm'"),
    ],
)
def test_bad_input_is_one_line(say: Say, words: list[str], text: str) -> None:
    code, out, err = say(*words)
    assert (code, out) == (4 if words == ["zz"] else 2, "")
    assert err.startswith("drover: ")
    assert text in err
