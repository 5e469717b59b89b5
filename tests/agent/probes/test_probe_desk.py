"""The agent's side of probes: every request ends in one closing result, whatever becomes of it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from drover_agent.config import AgentConfig, SpoolConfig
from drover_agent.probes import relay as desks
from drover_agent.probes.base import Device, Group, Result
from drover_agent.probes.exchange import ExchangeFolder, ProbeAnswer, ProbeAsk, read_ask
from drover_agent.probes.relay import (
    MAX_WAITING,
    NO_SERVICE,
    TAKEN_S,
    TOO_MANY,
    ProbeRelay,
)
from drover_agent.runtime.agent import MAX_PROBE_REQUESTS, Agent
from drover_core.model.events import ProbeResult, from_json
from drover_proto import telemetry_pb2 as pb
from testbed.loop import in_loop
from testbed.telemetry_server import TelemetryServer, play
from testbed.waiting import until

AGENT = [sys.executable, "-m", "drover_agent.main", "run"]
SERVE = [sys.executable, "-m", "drover_agent.main", "probe", "--serve"]
BOARDS = (Device(0, "cuda:0", "H200", 141 << 30), Device(3, "cuda:1", "H100", 80 << 30))
NOW_MS = 1_700_000_000_000


class Place:
    """A desk in a folder, with the test's clock; `spooled`: what reached the spool, `safe`: when that is on disk."""

    def __init__(self, root: Path) -> None:
        self.folder = ExchangeFolder(root)
        self.requests: asyncio.Queue[pb.ProbeRequest] = asyncio.Queue()
        self.spooled: list[tuple[int, pb.ProbeResult]] = []
        self.safe = asyncio.Event()
        self.safe.set()
        self.steady_s = 100.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        desk = ProbeRelay(
            self.folder.root, "n1", lambda ts_ms, record: self.spooled.append((ts_ms, record.probe_result)),
            self._kept, lambda: NOW_MS, lambda: self.steady_s,
        )  # fmt: skip
        task = asyncio.create_task(desk.run(self.requests))
        try:
            yield
            assert not task.done(), task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _kept(self) -> None:
        await self.safe.wait()

    def ask(self, id_: str, **fields: object) -> None:
        self.requests.put_nowait(pb.ProbeRequest(id=id_, **({"probes": ["launch"]} | fields)))  # type: ignore[arg-type]  # any

    def take(self, id_: str) -> None:
        """Take the request, as the probe service does."""
        (self.folder.requests / f"{id_}.json").rename(self.folder.taken / f"{id_}.json")

    def finish(self, answer: ProbeAnswer) -> None:
        """Answer a request that is taken, as the probe service does: the result first, then the request goes."""
        self.folder.put(self.folder.results, answer.id, answer)
        (self.folder.taken / f"{answer.id}.json").unlink(missing_ok=True)

    def results(self) -> list[ProbeResult]:
        return [from_json(ProbeResult, result.json) for _, result in self.spooled]

    def ends(self) -> list[tuple[str, str, str]]:
        return [(result.request, result.end, result.detail) for result in self.results() if result.end]

    async def asked(self, *ids: str) -> None:
        await until(lambda: set(self.folder.ids(self.folder.requests)) == set(ids), f"requests {ids}")

    async def closed(self, count: int) -> None:
        await until(lambda: len(self.ends()) >= count, f"{count} closing results")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(desks, "POLL_S", 0.02)
    return Place(tmp_path / "probes")


@in_loop
async def test_a_request_becomes_a_file_and_its_results_records(place: Place) -> None:
    async with place.running():
        group = pb.ProbeGroup(
            address="10.0.0.7", port=29_500, node=1, nodes=2, names=["n0", "n1"], addresses=["10.0.0.7", "10.0.0.8"],
            key="k", join_s=30,
        )  # fmt: skip
        place.ask("r1", probes=["allreduce_group"], level="deep", gpus=[0, 3], timeout_s=60, inlet_c=21.5, group=group)
        await place.asked("r1")
        asked = read_ask(place.folder.requests / "r1.json")
        assert asked == ProbeAsk(
            "r1", ("allreduce_group",), "deep", (0, 3), 60.0, NOW_MS, 21.5,
            Group("10.0.0.7", 29_500, 1, 2, ("n0", "n1"), ("10.0.0.7", "10.0.0.8"), "k", 30.0),
        )  # fmt: skip
        results = (
            Result("p2p", 0, 412.5, "GB/s", "direct", peer=3, spread=0.01, repeats=9),
            Result("gemm_fp8", 3, None, "TFLOP/s", "this device has no fp8"),
        )
        place.take("r1")
        answer = ProbeAnswer(
            "r1", "hung", "probe hung: sdc", "deep", NOW_MS + 5, "sdc", 3, 1.5, results, ("GPU 1: MIG",), BOARDS
        )
        place.finish(answer)
        await place.closed(1)
        await until(lambda: not place.folder.ids(place.folder.results), "the file's end")
    first, second, end = place.results()
    assert first == ProbeResult(
        "r1/0", "n1", 0, "p2p", NOW_MS + 5, None, 412.5, "GB/s", "direct", "r1", 3, 0.01, 9, "deep",
        device="H200",
    )  # fmt: skip
    assert (second.id, second.value, second.detail) == ("r1/1", None, "this device has no fp8")
    assert end == ProbeResult(
        "r1/end", "n1", 3, "sdc", NOW_MS + 5, None, None, "", "probe hung: sdc; left out: GPU 1: MIG", "r1",
        level="deep", end="hung", seconds=1.5, device="H100",
    )  # fmt: skip
    assert {result.request_id for _, result in place.spooled} == {"r1"}


@pytest.mark.parametrize(("taken_after", "finished_after"), [(n, m) for n in range(7) for m in range(n, 7)])
def test_a_result_is_handed_on_though_the_service_moves_the_request_while_the_desk_lists_the_folders(
    place: Place, monkeypatch: pytest.MonkeyPatch, taken_after: int, finished_after: int
) -> None:
    """The service takes the request after so many of the desk's listings, and answers it after so many: two looks."""
    listed, list_ids = 0, ExchangeFolder.ids

    def move() -> None:
        if listed == taken_after:
            place.take("r1")
        if listed == finished_after:
            place.finish(ProbeAnswer("r1", "done"))

    def put(folder: ExchangeFolder, where: Path, id_: str, value: ProbeAsk | ProbeAnswer) -> None:
        write(folder, where, id_, value)
        if where == folder.requests:
            monkeypatch.setattr(ExchangeFolder, "ids", staticmethod(ids))
            move()

    def ids(folder: Path) -> list[str]:
        nonlocal listed
        found = list_ids(folder)
        listed += 1
        move()
        return found

    write = ExchangeFolder.put
    monkeypatch.setattr(ExchangeFolder, "put", put)

    @in_loop
    async def scenario() -> None:
        async with place.running():
            place.ask("r1")
            await until(lambda: listed > finished_after or place.ends(), "the service's answer", 2)
            await until(place.ends, "a closing result", 2)

    scenario()
    assert place.ends() == [("r1", "done", "")]


@in_loop
async def test_a_request_that_is_known_already_is_ignored(place: Place) -> None:
    async with place.running():
        place.ask("r1")
        place.ask("r1", level="deep")
        place.ask("r2")
        await place.asked("r1", "r2")
        assert read_ask(place.folder.requests / "r1.json").level == "quick"
        for id_ in ("r1", "r2"):
            place.take(id_)
        place.ask("r1")
        place.folder.put(place.folder.results, "r1", ProbeAnswer("r1", "done"))
        await place.closed(1)
        place.ask("r1")  # done
        place.ask("r3")
        await place.asked("r3")
    assert place.ends() == [("r1", "done", "")]
    again = Place(place.folder.root)
    async with again.running():  # another run of the agent
        again.ask("r1")
        again.ask("r4")
        await again.asked("r3", "r4")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"probes": ["launch", "reboot"]}, "no probe is called 'reboot'; there are launch, "),
        ({"level": "worst"}, "no level is called 'worst'"),
        ({"gpus": [4_000_000_000]}, "GPU slots are 0 to 255"),
        ({"timeout_s": 4_000_000_000}, "must be at most 14400 s"),
        ({"group": pb.ProbeGroup(address="n", port=1, nodes=1)}, "groups have 2 to 256 nodes"),
        ({"group": pb.ProbeGroup(address="", port=1, nodes=2)}, "a group meets at an address with a port"),
        ({"group": pb.ProbeGroup(address="n", port=1, nodes=2, join_s=1e9)}, "wait for each other for up to 600 s"),
        ({"group": pb.ProbeGroup(address="n", port=1, nodes=2)}, "launch is measured on each node by itself"),
    ],
)
def test_what_is_not_in_the_table_never_reaches_the_service(place: Place, fields: dict[str, object], text: str) -> None:
    @in_loop
    async def scenario() -> None:
        async with place.running():
            place.ask("r1", **fields)
            await place.closed(1)
        [(request, end, detail)] = place.ends()
        assert (request, end) == ("r1", "refused")
        assert text in detail
        assert place.folder.ids(place.folder.requests) == []

    scenario()


@pytest.mark.parametrize("id_", ["", "..", "../../etc/x", "a/b", "a\x00b", "x" * 101, ".hidden", "ö"])
def test_an_id_that_would_be_a_path_is_refused(place: Place, id_: str) -> None:
    @in_loop
    async def scenario() -> None:
        async with place.running():
            place.ask(id_)
            await place.closed(1)
        [(_, end, detail)] = place.ends()
        assert (end, detail.partition(" ")[0]) == ("refused", "its")
        assert not place.folder.root.exists()

    scenario()


@in_loop
async def test_more_than_so_many_do_not_wait(place: Place) -> None:
    async with place.running():
        for number in range(MAX_WAITING + 1):
            place.ask(f"r{number}")
        await place.closed(1)
    assert place.ends() == [(f"r{MAX_WAITING}", "refused", TOO_MANY)]


@in_loop
async def test_where_no_service_is_the_request_is_answered_so(place: Place) -> None:
    async with place.running():
        place.ask("r1")
        await place.asked("r1")
        await looked(place)
        place.steady_s += TAKEN_S - 1
        place.ask("r2")
        await place.asked("r1", "r2")
        assert place.ends() == []
        place.steady_s += 2
        await place.closed(1)
        await place.asked("r2")
    assert place.ends() == [("r1", "not_taken", NO_SERVICE)]


@in_loop
async def test_a_service_that_is_busy_is_waited_for(place: Place) -> None:
    async with place.running():
        place.ask("r1", timeout_s=600)
        place.ask("r2")
        await place.asked("r1", "r2")
        place.take("r1")
        for _ in range(5):
            await looked(place)
            place.steady_s += TAKEN_S - 1
        place.ask("r3")
        await place.asked("r2", "r3")
        assert place.ends() == []
        place.steady_s += 600 + desks.OVERDUE_S
        await place.closed(1)
        assert place.ends() == [("r1", "crashed", "no result of it came from the probe service")]
        await until(lambda: not place.folder.ids(place.folder.taken), "the file's end")
        await asyncio.gather(looked(place))
        place.steady_s += TAKEN_S + 1
        await place.closed(3)
    assert {end for _, end, _ in place.ends()[1:]} == {"not_taken"}


async def looked(place: Place) -> None:
    """Returns when the desk has looked into the folder twice more: a result that it must remove is gone."""
    for turn in range(2):
        junk = place.folder.results / f"-{turn}.json"
        junk.write_text("{}")
        await until(lambda junk=junk: not junk.exists(), "a look")


@in_loop
async def test_a_result_that_cannot_be_read_is_one_of_a_crash(place: Place) -> None:
    place.folder.make()
    for id_, text in (
        ("r1", "{"),
        ("r2", '{"id": "r9", "end": "done"}'),
        ("r3", '{"id": "r3", "end": "done", "ts_ms": "x"}'),
    ):
        (place.folder.results / f"{id_}.json").write_text(text)
    async with place.running():
        await place.closed(3)
    assert {(request, end) for request, end, _ in place.ends()} == {(f"r{n}", "crashed") for n in (1, 2, 3)}


@in_loop
async def test_a_result_leaves_the_folder_only_when_the_spool_has_it(place: Place) -> None:
    place.folder.make()
    place.folder.put(place.folder.results, "r1", ProbeAnswer("r1", "done"))
    place.safe.clear()
    async with place.running():
        await place.closed(1)
        assert place.folder.ids(place.folder.results) == ["r1"]
    again = Place(place.folder.root)  # killed in between
    async with again.running():
        await again.closed(1)
        await until(lambda: not again.folder.ids(again.folder.results), "the file's end")
    assert [result.json for _, result in again.spooled] == [result.json for _, result in place.spooled], (
        "the same id and text"
    )
    again.folder.put(again.folder.results, "r1", ProbeAnswer("r1", "done"))  # killed between writing down and removing
    third = Place(place.folder.root)
    async with third.running():
        await until(lambda: not third.folder.ids(third.folder.results), "the file's end")
    assert third.spooled == []


@in_loop
async def test_a_folder_that_cannot_be_written_for_a_while_repeats_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place.folder.make()
    tries = 0
    write = desks.write_whole

    def fails(path: Path, data: bytes) -> None:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(desks, "write_whole", fails)
    place.folder.put(place.folder.results, "r1", ProbeAnswer("r1", "done"))
    async with place.running():
        await until(lambda: not place.folder.ids(place.folder.results), "the file's end")
    assert (tries, place.ends()) == (4, [("r1", "done", "")])
    assert sum("No space left" in message for message in caplog.messages) == 1


@in_loop
async def test_the_streams_reader_never_waits_and_keeps_so_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody reads the agent's queue here, as when its disk hangs."""
    whole = Agent(AgentConfig(spool=SpoolConfig(dir=str(tmp_path / "spool"))), "n1")
    for number in range(MAX_PROBE_REQUESTS + 2):
        whole.add_probe_request(pb.ProbeRequest(id=f"r{number}"))
    whole.spool.close()
    assert sum("is dropped" in message for message in caplog.messages) == 2


def agent(folder: Path, address: str) -> subprocess.Popen[str]:
    settings = {
        "node": "n1", "collectors": f'["{address}"]', "spool.dir": str(folder / "spool"), "kmsg_enabled": "false",
        "hardware": "none", "steps_socket": "", "batch_s": "1",
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return subprocess.Popen([*AGENT, *words], stderr=subprocess.PIPE, text=True)


def serve(folder: ExchangeFolder) -> subprocess.Popen[str]:
    return subprocess.Popen([*SERVE, str(folder.root)], stderr=subprocess.PIPE, text=True)


def test_a_request_over_the_stream_is_probed_and_reported_once_though_the_agent_is_killed(tmp_path: Path) -> None:
    """The real agent, service and probe; the collector stands in. It asks on each stream again, with the same id."""
    pytest.importorskip("torch", reason="probes need torch: pip install 'drover[probe]'")
    folder = ExchangeFolder(tmp_path / "spool/probes")
    request = pb.ProbeRequest(id="r1", probes=["launch"], level="quick")

    async def scenario() -> None:
        server = TelemetryServer(after_welcome=[pb.CollectorMessage(probe_request=request)])
        address = await server.start()
        first = agent(tmp_path, address)
        try:
            await until(lambda: folder.ids(folder.requests), "the request's file")
        finally:
            first.send_signal(signal.SIGKILL)
            first.communicate()
        service = serve(folder)
        try:
            await until(lambda: folder.ids(folder.results), "the result's file", 60)
        finally:
            service.terminate()
            _, errors = await asyncio.to_thread(service.communicate)
        assert service.returncode == 0, errors
        second = agent(tmp_path, address)
        try:
            await until(lambda: len(server.probe_results) >= 2, "the results")
            await until(lambda: not folder.ids(folder.results), "the file's end")
        finally:
            second.terminate()
            await asyncio.to_thread(second.communicate)
        third = agent(tmp_path, address)
        try:
            await until(lambda: server.streams >= 3 and server.codes().count("agent_started") == 3)
        finally:
            third.terminate()
            _, errors = await asyncio.to_thread(third.communicate)
        assert "probe request r1 is known already" in errors
        assert folder.ids(folder.requests) == []
        figure, end = (from_json(ProbeResult, result.json) for result in server.probe_results.values())
        assert (figure.node, figure.probe, figure.unit, figure.request) == ("n1", "launch", "us", "r1")
        assert figure.value and figure.value > 0
        assert (end.id, end.end) == ("r1/end", "done")
        assert figure.device == end.device == "cpu", "nobody takes it for a GPU's"
        assert server.broken == []

    play(scenario())


def test_a_result_waits_for_a_collector_that_is_away(tmp_path: Path) -> None:
    folder = ExchangeFolder(tmp_path / "spool/probes")
    (tmp_path / "spool").mkdir(mode=0o700)
    folder.make()
    folder.put(folder.results, "r1", ProbeAnswer("r1", "stopped", "job 7 came", ts_ms=NOW_MS))

    async def scenario() -> None:
        alone = agent(tmp_path, "127.0.0.1:1")
        try:
            await until(lambda: not folder.ids(folder.results), "the spool to have it")
        finally:
            alone.send_signal(signal.SIGKILL)
            alone.communicate()
        server = TelemetryServer()
        later = agent(tmp_path, await server.start())
        try:
            await until(lambda: server.probe_results, "the result")
        finally:
            later.terminate()
            await asyncio.to_thread(later.communicate)
        [result] = server.probe_results.values()
        assert json.loads(result.json)["detail"] == "job 7 came"

    play(scenario())
    assert folder.ids(folder.results) == []
