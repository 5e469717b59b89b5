"""Inference servers' pages of several kinds and versions, read twice over HTTP, and servers that come and go."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover_agent.config import load_config
from drover_agent.sources.base import Reading
from drover_agent.sources.workloads.inference import MAX_MODELS, NAMES, SIT_OUT, InferenceSource, quantile
from drover_agent.telemetry.absences import Absences
from drover_agent.telemetry.batcher import Batcher
from drover_agent.telemetry.schema_registry import SchemaRegistry
from drover_agent.urls import urls_error
from drover_core.metrics.catalog import Scope
from drover_core.settings import SettingsError
from testbed.pages import Served, serving

ROOT = Path(__file__).parents[2] / "cases/agent"
CASES = sorted(case for kind in ("vllm", "sglang", "triton", "tgi") for case in (ROOT / kind).iterdir())
T = 1_800_000_000_000
PAGE = 'vllm:num_requests_running{model_name="m"} 1\nvllm:generation_tokens_total{model_name="m"} %d\n'


@pytest.fixture
def page() -> Iterator[Served]:
    with serving() as served:
        served.body = (PAGE % 0).encode()
        yield served


class Ticks:
    """Ten seconds from one reading to the next, unless set otherwise."""

    def __init__(self) -> None:
        self.now_s, self.step_s = 1000.0, 10.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def source(page: Served, ticks: Ticks | None = None) -> InferenceSource:
    return InferenceSource("n1", [f"chat={page.url}"], ticks or Ticks())


def rows(reading: Reading) -> dict[str, dict[str, float]]:
    return {entity.key: dict(values) for entity, values in reading.rows}


def absences(reading: Reading) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for entity, name, why in reading.absent:
        found.setdefault(entity.key, {})[name] = why.value
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_pages_of_several_servers(case: Path, page: Served) -> None:
    inference = source(page)
    page.body = (case / "first.txt").read_bytes()
    first = inference.read(T)
    assert not {"ttft_p50_s", "ttft_p95_s", "tokens_per_s"} & {n for v in rows(first).values() for n in v}
    page.body = (case / "second.txt").read_bytes()
    reading = inference.read(T + 10_000)
    expected = json.loads((case / "expected.json").read_text())["rows"]
    assert rows(reading) == {row["key"]: pytest.approx(row["values"]) for row in expected}
    assert absences(reading) == {row["key"]: row["absent"] for row in expected if row["absent"]}
    for entity, _ in reading.rows:
        assert entity.scope is Scope.WORKLOAD
        assert entity.key == f"n1/{entity.link}", "as the collector takes it, and distinguished in absences"


def test_a_server_that_goes_is_lost_and_noticed_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    ticks = Ticks()
    with serving() as page:
        page.body = (PAGE % 100).encode()
        inference = source(page, ticks)
        inference.read(T)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            gone = inference.read(T)
            assert rows(gone) == {}
            assert absences(gone) == {"n1/chat": dict.fromkeys(NAMES, "lost")}
        with serving(page.port) as again:
            again.body = (PAGE % 7).encode()
            assert rows(inference.read(T)) == {"n1/chat": {"requests_running": 1}}, (
                "it was away for too long to compare"
            )
            again.body = (PAGE % 27).encode()
            assert rows(inference.read(T))["n1/chat"]["tokens_per_s"] == 2
    assert len(caplog.records) == 2, "once when it went, once when it was back"


def kept(tmp_path: Path) -> tuple[Batcher, Absences]:
    absences = Absences(tmp_path / "absences.json")
    return Batcher(SchemaRegistry.load(tmp_path / "dictionary.json", None), absences, 10_000), absences


def test_a_server_that_is_back_and_idle_is_no_longer_lost(tmp_path: Path) -> None:
    idle = (
        PAGE % 7
        + 'vllm:time_to_first_token_seconds_bucket{le="1",model_name="m"} 4\n'
        + 'vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 4\n'
    )
    packer, absences = kept(tmp_path)
    with serving() as page:
        pass
    inference, changes, later = source(page), [], ExitStack()
    for tick in range(3):
        packer.add(T + tick * 10_000, inference.read(T))
        packer.take(T + tick * 10_000)
        changes += [(a.metric, a.reason, a.HasField("to_ms")) for a in absences.take_changes(tick * 10.0)]
        if tick == 0:
            assert sorted(changes) == sorted((name, "lost", False) for name in NAMES)
            later.enter_context(serving(page.port)).body = idle.encode()
    later.close()
    assert {metric for metric, reason, ended in changes if reason == "lost" and ended} == set(NAMES)


def test_two_servers_of_one_model_are_lost_each_for_itself(tmp_path: Path, page: Served) -> None:
    packer, absences = kept(tmp_path)
    page.body = b'nv_inference_pending_request_count{model="org/llama",version="1"} 1\n'
    with serving() as other:
        other.body = page.body
        inference = InferenceSource("n1", [f"chat={page.url}", f"code={other.url}"], Ticks())
        packer.add(T, inference.read(T))
    packer.add(T + 10_000, inference.read(T))
    packer.take(T + 10_000)
    lost = {a.link for a in absences.take_changes(10.0) if (a.metric, a.reason) == ("requests_waiting", "lost")}
    assert lost == {"code:org/llama"}


def test_what_was_lost_of_a_server_ends_when_its_models_are_known(tmp_path: Path) -> None:
    packer, absences = kept(tmp_path)
    with serving() as page:
        pass
    inference = source(page)
    packer.add(T, inference.read(T))
    packer.take(T)
    assert {a.link for a in absences.take_changes(0.0)} == {"chat"}
    with serving(page.port) as again:
        again.body = b'nv_inference_pending_request_count{model="a",version="1"} 1\n'
        packer.add(T + 10_000, inference.read(T))
    packer.take(T + 10_000)
    ended = {a.metric for a in absences.take_changes(10.0) if a.link == "chat" and a.HasField("to_ms")}
    assert ended == set(NAMES)


def test_a_server_that_was_never_there_is_said_to_be_lost() -> None:
    with serving() as gone:
        pass
    assert absences(source(gone).read(T)) == {"n1/chat": dict.fromkeys(NAMES, "lost")}


def test_a_server_that_does_not_answer_costs_the_others_no_time(page: Served) -> None:
    with serving() as hung:
        hung.hang = True
        inference = InferenceSource("n1", [f"slow={hung.url}", f"chat={page.url}"], Ticks())
        inference.servers[0].page.limit_s = 0.05  # of the one that hangs alone: the other may be slow on a busy machine
        for _ in range(SIT_OUT + 1):
            reading = inference.read(T)
            assert absences(reading)["n1/slow"] == dict.fromkeys(NAMES, "timeout")
            assert "n1/chat" in rows(reading)
        assert len(hung.requests) == 1
        inference.read(T)
        assert len(hung.requests) == 2, "then it is asked again"


def test_a_page_of_something_else_is_an_error(page: Served, caplog: pytest.LogCaptureFixture) -> None:
    inference = source(page)
    for body in (b"go_threads 7\n", b"<html>", b"vllm:num_requests_running{ 1\n", b""):
        page.body = body
        assert absences(inference.read(T)) == {"n1/chat": dict.fromkeys(NAMES, "error")}
    assert len(caplog.records) == 1


def test_a_number_that_cannot_be_is_out_of_range(page: Served) -> None:
    page.body = b"vllm:num_requests_running -1\nvllm:num_requests_waiting NaN\n"
    reading = source(page).read(T)
    assert rows(reading) == {"n1/chat": {}}
    assert (
        absences(reading)["n1/chat"] | {"requests_running": "out-of-range", "requests_waiting": "out-of-range"}
        == (absences(reading)["n1/chat"])
    )


def test_a_model_that_is_unloaded_is_lost_and_its_neighbour_is_not(page: Served) -> None:
    inference = source(page)
    line = 'nv_inference_pending_request_count{model="%s",version="1"} 1\n'
    page.body = (line % "a" + line % "b").encode()
    assert rows(inference.read(T)).keys() == {"n1/chat:a", "n1/chat:b"}
    page.body = (line % "b").encode()
    reading = inference.read(T)
    assert rows(reading).keys() == {"n1/chat:b"}
    assert absences(reading)["n1/chat:a"] == dict.fromkeys(NAMES, "lost")
    assert "n1/chat:a" not in absences(inference.read(T))


def test_a_second_model_stays_distinguished_when_it_is_gone_again(page: Served) -> None:
    inference = source(page)
    one, two = (f'vllm:num_requests_running{{model_name="{name}"}} 1\n' for name in ("one", "two"))
    keys = []
    for body in (one, one + two, one):
        page.body = body.encode()
        keys.append(sorted(rows(inference.read(T))))
    assert keys == [["n1/chat"], ["n1/chat:one", "n1/chat:two"], ["n1/chat:one"]]


def test_models_are_bounded_and_their_names_too(page: Served, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"{number:03d}" + "x" * 300 for number in range(MAX_MODELS + 5)]
    page.body = "".join(f'nv_inference_pending_request_count{{model="{n[::-1]}"}} 1\n' for n in names).encode()
    inference = source(page)
    for _ in range(3):
        found = rows(inference.read(T))
        assert len(found) == MAX_MODELS
        assert max(map(len, found)) <= 200
    assert len(caplog.records) == 1


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=10, unique=True).map(sorted),
    st.data(),
    st.floats(0, 1),
)
def test_a_quantile_is_the_line_between_the_bounds(bounds: list[float], data: st.DataObject, share: float) -> None:
    within = data.draw(st.lists(st.integers(1, 1000), min_size=len(bounds), max_size=len(bounds)))
    above = data.draw(st.integers(0, 5))
    counts = list(itertools.accumulate([*within, above]))
    found = quantile(share, dict(zip([*bounds, math.inf], map(float, counts), strict=True)))
    line = np.interp(share * counts[-1], [0, *counts[:-1]], [0, *bounds])  # above the highest bound: that bound
    assert found == pytest.approx(float(line))


@pytest.mark.parametrize(
    "buckets",
    [{}, {math.inf: 5.0}, {1.0: 5.0}, {1.0: 0.0, math.inf: 0.0}, {1.0: math.nan, math.inf: 3.0}, {math.nan: 1.0}],
)
def test_no_quantile_of_nothing(buckets: dict[float, float]) -> None:
    assert quantile(0.5, buckets) is None


def test_counts_that_changed_while_they_were_written_give_a_quantile_still() -> None:
    assert quantile(0.5, {1.0: 4.0, 2.0: 3.0, math.inf: 4.0}) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (("http://h/",), "must be names and addresses"),
        (("a b=http://h/",), "must be names and addresses"),
        (("a/b=http://h/",), "must be names and addresses"),
        (("a=h:8000",), "must be an address such as http://"),
        (("a=http://h/", "a=http://i/"), "a is used twice"),
    ],
)
def test_settings_that_are_wrong(urls: tuple[str, ...], message: str) -> None:
    assert message in str(urls_error(urls))


def test_settings_that_are_right() -> None:
    assert urls_error(("chat=http://127.0.0.1:8000/metrics", "embed.2=http://[::1]:8002/metrics?a=b")) is None
    assert InferenceSource("n1", []).read(T) == Reading()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('inference_urls=["chat"]', "inference_urls: must be names and addresses"),
        ("dcgm_url=localhost:9400", "dcgm_url: 'localhost:9400' must be an address"),
    ],
)
def test_the_settings_file_is_refused_with_the_key(setting: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_config(None, [setting])


def test_a_model_whose_name_is_not_for_a_terminal(page: Served) -> None:
    page.body = b'nv_inference_pending_request_count{model="a\\n\x1b[31mb"} 1\n'
    assert rows(source(page).read(T)).keys() == {"n1/chat:a??[31mb"}
