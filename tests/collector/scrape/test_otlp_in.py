"""OTLP in: what a Collector or an SDK sends becomes what a page would give; what cannot be used is answered."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from drover_collector.config import CollectorConfig, RestConfig, validate
from drover_collector.scrape.blind import blindness
from drover_collector.scrape.forgeable import ForgeablePages
from drover_collector.scrape.gpu_ids import GpuId
from drover_collector.scrape.mapping import PageMapper
from drover_collector.scrape.otlp_in import DELTA, NO_NUMBER, Answer, Form, OtlpTaker
from drover_collector.scrape.precedence import ALIKE, SETTLES_S
from drover_collector.scrape.received import NAMELESS, OLD, STALE, Received, Round
from drover_collector.scrape.settings import OtlpInConfig
from drover_collector.scrape.tables import table
from drover_core.metrics.prometheus_text import parse
from drover_core.settings import SettingsError
from testbed.fleets import T0
from testbed.otlp_messages import DELTA as DELTA_TEMPORALITY
from testbed.otlp_messages import Points, Value, as_json, request

PAGES = Path(__file__).parent / "pages"
PROTOBUF, JSON = Form(), Form(is_json=True)
UUIDS = [f"GPU-0000000{n}-1111-2222-3333-444444444444" for n in range(2)]
TARGET = {"service.name": "gpus", "service.instance.id": "n0:9400", "server.address": "n0"}


class Otlp(Received):
    """Received, with the requests of OTLP that fill it."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self._taker = OtlpTaker(OtlpInConfig(True, **settings), self)  # type: ignore[arg-type]  # each is of its field's type

    def send(
        self, points: Iterable[Points], ts_ms: int = T0, now_s: float = 0.0, now_ms: int = 0, form: Form = PROTOBUF,
        resource: Mapping[str, Value] = TARGET,
    ) -> Answer:  # fmt: skip
        message = request(points, ts_ms, resource)
        body = as_json(message) if form.is_json else message.SerializeToString()
        return self.post(gzip.compress(body) if form.is_gzip else body, form, now_ms or ts_ms, now_s)

    def post(self, body: bytes, form: Form = PROTOBUF, now_ms: int = T0, now_s: float = 0.0) -> Answer:
        return self._taker.take(body, form, now_ms, now_s)

    def one_round(self, now_s: float) -> Round:
        (made,) = self.rounds(now_s, {})
        return made


def scraped(page: str, exporter: str) -> list[Points]:
    """Return what a Collector's prometheus receiver makes of a page: names as on it, labels as attributes."""
    samples = parse((PAGES / page).read_text("utf-8"), PageMapper(table(exporter)).wanted)
    return [
        Points(name, list(found), kind="sum" if name.endswith("_total") else "gauge") for name, found in samples.items()
    ]


def hw() -> list[Points]:
    """Return two GPUs by the conventions. Only hw.gpu.* points say more than hw.id, as the conventions have it."""

    def of(number: int, full: bool = False, **more: Value) -> Mapping[str, Value]:
        found: dict[str, Value] = {"hw.id": UUIDS[number], "hw.type": "gpu"}
        if full:
            found |= {"hw.model": "NVIDIA H100", "hw.vendor": "NVIDIA", "hw.name": f"gpu{number}"}
        return found | {name.replace("__", "."): value for name, value in more.items()}

    both = range(2)
    return [
        Points("hw.temperature", [(of(n, hw__sensor_location="gpu"), 60.0 + n) for n in both], "Cel"),
        Points("hw.power", [(of(n), (300.0, 688.0)[n]) for n in both], "W"),
        Points("hw.gpu.utilization", [(of(n, True, hw__gpu__task="general"), (0.5, 1.0)[n]) for n in both], "1"),
        Points("hw.gpu.utilization", [(of(n, True, hw__gpu__task="encoder"), 0.9) for n in both], "1"),
        Points("hw.gpu.memory.usage", [(of(n, True), (10, 20)[n]) for n in both], "By", "sum"),
        Points("hw.errors", [(of(n, error__type="uncorrected"), (0, 2)[n]) for n in both], "{error}", "sum"),
        Points("hw.power", [({"hw.id": "psu0", "hw.type": "power_supply"}, 900.0)], "W"),
    ]


# ---- what a page would give


@pytest.mark.parametrize("form", [PROTOBUF, JSON, Form(is_gzip=True), Form(True, True)])
def test_points_of_a_scrape_are_the_page_that_a_scrape_would_have_read(form: Form) -> None:
    received = Otlp()
    points = scraped("dcgm.txt", "dcgm")
    for part in range(3):  # a batch may be cut
        assert received.send(points[part::3], now_ms=T0 + 1000, now_s=100.0 + part, form=form) == Answer(200)
    made = received.one_round(104.0)
    page = PageMapper(table("dcgm")).read((PAGES / "dcgm.txt").read_text("utf-8"), T0)
    assert (made.node, made.down, [t.name for t in made.tables]) == ("n0", 0, ["dcgm"])
    assert made.found.gpus == page.gpus
    assert made.found.node == page.node
    assert not received.left_out


@pytest.mark.parametrize(("page", "exporter"), [("amd.txt", "amd"), ("node.txt", "node")])
def test_pages_of_amd_and_of_a_node_are_understood_too(page: str, exporter: str) -> None:
    received, text = Otlp(), (PAGES / page).read_text("utf-8")
    assert received.send(scraped(page, exporter)) == Answer(200)
    found, read = received.one_round(3.0).found, PageMapper(table(exporter)).read(text, T0)
    assert (found.gpus, found.node, found.links) == (read.gpus, read.node, read.links)


@pytest.mark.parametrize(
    ("point", "resource", "node"),
    [
        ({"node": "p"}, {**TARGET, "host.name": "h"}, "p"),
        ({}, {**TARGET, "node": "r", "k8s.node.name": "k"}, "r"),
        ({}, {**TARGET, "k8s.node.name": "k", "host.name": "h"}, "k"),
        # A gateway's own name, which its processor resourcedetection writes, is not that of the nodes it scrapes.
        ({}, {**TARGET, "host.name": "gateway"}, "n0"),
        ({}, {"service.instance.id": "627cc493-f310-47de-96bd-71410b7dec09", "host.name": "h"}, "h"),
        ({}, {"service.instance.id": "[fd00::7]:9400"}, "fd00::7"),
        # Collectors on each node scrape localhost: that is no node.
        ({}, {"service.instance.id": "localhost:9400", "host.name": "h"}, "h"),
        ({}, {"service.instance.id": "127.0.0.1:9400"}, ""),
        ({}, {"service.instance.id": "627cc493"}, ""),
        ({}, {"host.name": "a b"}, ""),
    ],
)
def test_an_attribute_names_the_node(point: dict[str, Value], resource: dict[str, Value], node: str) -> None:
    received = Otlp()
    labels: dict[str, Value] = {"gpu": "0", "UUID": UUIDS[0], **point}
    answer = received.send([Points("DCGM_FI_DEV_GPU_TEMP", [(labels, 50.0)])], resource=resource)
    assert (list(received.nodes), answer.rejected) == ([node] if node else [], int(not node))
    assert NAMELESS in answer.text or node


def test_two_nodes_that_are_named_alike_are_not_mixed() -> None:
    received = Otlp()
    for number, address in enumerate(("10.0.0.1:9400", "10.0.0.2:9400")):
        labels = {"gpu": "0", "UUID": UUIDS[number]}
        point = Points("DCGM_FI_DEV_GPU_TEMP", [(labels, 50.0 + number)])
        received.send([point], resource={"service.instance.id": address, "node": "gateway"})
    made = received.one_round(3.0)
    assert [(gpu.uuid, values) for gpu, values in made.found.gpus.items()] == [(UUIDS[0], {"gpu_temp_c": 50.0})]
    assert made.down == 1  # so the missing values of the other are not taken for a loss
    assert received.left_out == {ALIKE: 1}


# ---- OpenTelemetry's own names


def test_the_conventions_for_hardware_are_mapped_and_what_one_point_says_of_a_gpu_holds_for_all() -> None:
    received = Otlp()
    sender = {"host.name": "n7", "service.instance.id": "c0ffee"}
    assert received.send(hw(), resource=sender) == Answer(200)
    assert "ecc_dram_uncorrected" not in next(iter(received.one_round(3.0).found.gpus.values()))  # a page may come
    assert received.send(hw(), T0 + 60_000, SETTLES_S + 3, resource=sender) == Answer(200)
    made = received.one_round(SETTLES_S + 6)
    first, second = (GpuId(n, UUIDS[n], UUIDS[n], "", "", "NVIDIA H100") for n in range(2))
    assert made.node == "n7"
    assert made.found.gpus == {
        first: {
            "gpu_temp_c": 60.0, "power_w": 300.0, "gpu_util_ratio": 0.5, "framebuffer_used_bytes": 10.0,
            "ecc_dram_uncorrected": 0.0,
        },
        second: {
            "gpu_temp_c": 61.0, "power_w": 688.0, "gpu_util_ratio": 1.0, "framebuffer_used_bytes": 20.0,
            "ecc_dram_uncorrected": 2.0,
        },
    }  # fmt: skip
    assert made.found.vendors == {"nvidia"}
    assert not received.left_out


def test_another_unit_is_refused_and_a_share_in_percent_is_none() -> None:
    received = Otlp()
    percent = [Points(p.name, p.values, "%" if p.name == "hw.gpu.utilization" else p.unit, p.kind) for p in hw()]
    answer = received.send(percent)
    assert (answer.status, answer.rejected) == (200, 4)
    assert "hw.gpu.utilization" in answer.text
    gpus = received.one_round(3.0).found.gpus
    assert {gpu.slot: "gpu_util_ratio" in values for gpu, values in gpus.items()} == {0: False, 1: False}


def test_a_gpu_without_a_slot_is_not_guessed_by_its_order() -> None:
    received = Otlp()
    name = "NVIDIA H100 80GB HBM3"
    plain: list[tuple[dict[str, Value], float]] = [
        ({"hw.id": uuid, "hw.type": "gpu", "hw.name": name}, 50.0) for uuid in UUIDS
    ]
    received.send([Points("hw.power", plain, "W")])
    assert not list(received.rounds(3.0, {}))
    (why,) = received.left_out
    assert "gpu.index" in why
    indexed = [({**labels, "gpu.index": 5 - n}, value) for n, (labels, value) in enumerate(plain)]
    received.send([Points("hw.power", indexed, "W")], T0 + 5000, 5.0)
    made = received.one_round(8.0)
    assert {(gpu.slot, gpu.uuid, gpu.model) for gpu in made.found.gpus} == {
        (5, UUIDS[0], name), (4, UUIDS[1], name)
    }  # fmt: skip


def test_an_id_that_is_unique_in_its_host_alone_names_no_gpu_of_another() -> None:
    received = Otlp()
    for node in ("a", "b"):
        points = [Points("hw.gpu.utilization", [({"hw.id": "0", "hw.model": "AMD Instinct MI300X"}, 0.5)], "1")]
        received.send(points, resource={"host.name": node})
    found = {made.node: list(made.found.gpus) for made in received.rounds(3.0, {})}
    assert {node: [gpu.key for gpu in gpus] for node, gpus in found.items()} == {"a": ["a:0"], "b": ["b:0"]}


def test_parts_of_a_gpu_are_not_taken_for_it() -> None:
    received = Otlp()
    whole: dict[str, Value] = {"hw.id": UUIDS[0], "gpu.index": 0}
    part: dict[str, Value] = {"hw.id": "MIG-1", "gpu.index": 0, "gpu.mig.device_id": "MIG-1"}
    received.send([Points("hw.gpu.utilization", [(part, 0.9), (whole, 0.2)], "1")])
    (values,) = received.one_round(3.0).found.gpus.values()
    assert values == {"gpu_util_ratio": 0.2}


def test_instruments_that_are_read_one_after_the_other_are_of_one_page() -> None:
    received = Otlp()
    points = [Points(p.name, p.values, p.unit, p.kind, ts_ms=T0 + 20 * n) for n, p in enumerate(hw())]
    received.send(points, now_ms=T0 + 1000)
    (source,) = received.nodes["n0"].sources.values()
    assert len(source.pages) == 1
    assert len(received.one_round(3.0).found.gpus) == 2


def test_what_the_conventions_lack_is_said_with_what_would_help() -> None:
    seen = {"gpu_util_ratio", "power_w", "gpu_temp_c"}
    by_hw = blindness(seen, {"nvidia"}, {"hw"})
    assert "row_remap_pending missing; hw.* has no name for it" in by_hw["memory"]
    assert "send hw.errors" in by_hw["memory"]
    assert "collect DCGM_FI_DEV_ROW_REMAP_PENDING" in blindness(seen, {"nvidia"}, {"hw", "dcgm"})["memory"]


# ---- sums, ends and times


def test_a_sum_that_was_reset_has_no_rate_across_it() -> None:
    def disk(ts_ms: int, value: float, start_ns: int) -> list[Points]:
        read = Points("node_disk_read_bytes_total", [({"device": "sda"}, value)], "", "sum", start_ns=start_ns)
        return [read, Points("node_load1", [({}, 1.0)])]

    received, rates = Otlp(), []
    # Counted from 1: 1000 in 5 s. Then from 2, where 4000 is above the last value, and is no growth of it.
    for number, (value, start_ns) in enumerate([(1000.0, 1), (2000.0, 1), (4000.0, 2), (6000.0, 2), (7000.0, 0)]):
        received.send(disk(T0, value, start_ns), T0 + number * 5000, number * 5.0)
        rates.append(received.one_round(number * 5.0 + 3).found.node.get("disk_read_bytes_per_s"))
    assert rates == [None, 200.0, None, 400.0, 200.0]


def test_a_delta_sum_and_a_histogram_are_rejected_and_the_rest_is_used() -> None:
    received = Otlp()
    labels = {"gpu": "0", "UUID": UUIDS[0]}
    answer = received.send(
        [
            Points("DCGM_FI_DEV_GPU_TEMP", [(labels, 50.0)]),
            Points("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", [(labels, 1)] * 3, "", "sum", DELTA_TEMPORALITY),
            Points("DCGM_FI_DEV_POWER_USAGE", [(labels, 1)] * 2, "", "histogram"),
            Points("http.server.request.duration", [({}, 1)], "s", "histogram"),  # nobody wants it
        ]
    )
    assert (answer.status, answer.rejected) == (200, 5)
    assert f"3 points {DELTA}" in answer.text and f"2 points {NO_NUMBER}" in answer.text
    assert received.left_out == {DELTA: 3, NO_NUMBER: 2}
    (values,) = received.one_round(3.0).found.gpus.values()
    assert values == {"gpu_temp_c": 50.0}


def test_a_request_that_has_nothing_of_use_is_taken_with_a_warning() -> None:
    received = Otlp()
    answer = received.send([Points("http.server.active_requests", [({}, 1)])])
    assert (answer.status, answer.rejected) == (200, 0)
    assert "without-agents" in answer.text
    assert received.post(b"") == Answer(200)  # without any data it is a success


def test_ends_of_series_and_nan_are_no_values_and_a_silent_exporter_is_said() -> None:
    received = Otlp()
    labels = {"gpu": "0", "UUID": UUIDS[0]}
    values = [Points("DCGM_FI_DEV_GPU_TEMP", [(labels, 50.0)]), Points("DCGM_FI_DEV_POWER_USAGE", [(labels, math.nan)])]
    assert received.send(values) == Answer(200)
    assert list(received.one_round(3.0).found.gpus.values()) == [{"gpu_temp_c": 50.0}]
    ended = [Points(p.name, [(labels, None)]) for p in values]
    for form in (PROTOBUF, JSON):
        assert received.send(ended, T0 + 10_000, 10.0, form=form) == Answer(200)
    assert not list(received.rounds(30.0, {}))  # nothing is made up
    assert received.silent(70.0) == [("n0", "dcgm-exporter", 70.0)]


@pytest.mark.parametrize("off_ms", [365 * 86_400_000, -365 * 86_400_000, -61_000])
def test_points_of_another_time_are_rejected(off_ms: int) -> None:
    received = Otlp()
    points = scraped("dcgm.txt", "dcgm")
    answer = received.send(points, T0 + off_ms, now_ms=T0)
    count = sum(len(p.values) for p in points)
    assert (answer.status, answer.rejected) == (200, count)
    assert answer.text == f"{count} points {STALE}"
    assert received.left_out == {STALE: count}
    assert not list(received.rounds(30.0, {}))


def test_what_is_sent_twice_counts_once_and_a_full_house_is_to_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    received, points = Otlp(), scraped("dcgm.txt", "dcgm")
    monkeypatch.setattr("drover_collector.scrape.received.MAX_WAITING", 5)
    assert received.send(points).status == 200
    assert received.send(points).status == 503
    assert received.one_round(5.0).found.gpus
    assert received.send(points, now_ms=T0 + 5000, now_s=5.0).text.endswith(OLD)


def test_a_series_is_found_again_after_its_node_was_forgotten() -> None:
    received, points = Otlp(), scraped("dcgm.txt", "dcgm")
    received.send(points)
    received.one_round(3.0)
    assert received.forget(3600.0) == ["n0"]
    received.send(points, T0 + 3_700_000, 3700.0)
    assert received.one_round(3703.0).found.gpus


@pytest.mark.parametrize("form", [PROTOBUF, JSON])
def test_what_stands_in_no_table_is_named_now_and_then(form: Form) -> None:
    received, points = Otlp(), scraped("dcgm.txt", "dcgm")
    others = [Points(f"app.queue.{number}", [({}, 1.0)]) for number in range(10)]
    first = received.send([*points, *others], form=form)
    assert (first.status, first.rejected) == (200, 0)
    assert first.text == (
        "Drover does not use these metrics: app.queue.0, app.queue.1, app.queue.2, app.queue.3, app.queue.4,"
        " app.queue.5, app.queue.6, app.queue.7; see docs/how-to/without-agents.md"
    )
    second = received.send([*points, *others], T0 + 15_000, 15.0, form=form)
    assert "these metrics: app.queue.8, app.queue.9;" in second.text
    assert received.send([*points, *others], T0 + 30_000, 30.0, form=form).text == ""
    assert "app.queue.0, " in received.send([*points, *others], T0 + 601_000, 601.0, form=form).text
    alone = received.send(others, T0 + 602_000, 602.0, form=form)
    assert alone.text.startswith("Drover uses none of these 10 metrics: app.queue.0, ")
    assert "app.queue.7 and more;" in alone.text


def test_http_needs_the_listener_of_rest_and_grpc_does_not() -> None:
    with pytest.raises(SettingsError, match=r"rest.otlp.enabled: it is served at rest.listen"):
        validate(CollectorConfig(rest=RestConfig(otlp=OtlpInConfig(True))), {})
    validate(CollectorConfig(rest=RestConfig(otlp=OtlpInConfig(grpc=True))), {})


def test_what_comes_over_grpc_alone_is_as_forgeable_as_over_http() -> None:
    assert "n0" in ForgeablePages([], OtlpInConfig(grpc=True))
    assert "n0" not in ForgeablePages([], OtlpInConfig(grpc=True, ask_first=False))
    assert "n0" not in ForgeablePages([], OtlpInConfig())
