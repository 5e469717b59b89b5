"""The fleet's pages: each value under its name and labels, bounded, shared by the scrapes of an interval."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
import urllib3

from drover_collector.exporters.page import CUT, FleetPage
from drover_collector.exporters.settings import FleetPageConfig
from drover_collector.fleet.buckets import Bucket
from drover_collector.observability.metrics_server import MetricsServer
from drover_collector.store import Store, StoreError
from drover_core.metrics.catalog import BY_NAME, Scope, of_scope
from drover_core.metrics.dcgm_names import LAST_XID, LESS, NOT_GIVEN, ROWS
from drover_core.metrics.series import GPU_METRICS, series_of
from drover_core.model.events import Event, EventKind
from testbed.exported import NAN, Exported, silent
from testbed.monitoring import facts_of

LABEL = r'[A-Za-z_]+="(?:[^"\\\n]|\\["\\n])*"'
LINE = re.compile(rf"[A-Za-z_]+(\{{{LABEL}(,{LABEL})*\}})? (-?[0-9.e+-]+)")


@pytest.fixture
def fleet() -> Exported:
    return Exported()


def page_of(fleet: Exported, bucket: Bucket | None, naming: str = "drover", **settings: object) -> str:
    made = FleetPage(naming, replace(FleetPageConfig(), **settings), lambda: bucket, fleet.reader, fleet.xids).read()
    return b"".join(made.plain()).decode()


def values(page: str, name: str) -> dict[str, float]:
    """GPU as node/slot -> value."""
    found = {}
    for line in page.splitlines():
        if line.startswith(name + "{"):
            node = re.search(r'(?:node|Hostname)="([^"]*)"', line)
            gpu = re.search(r'[{,]gpu="([^"]*)"', line)
            assert node and gpu
            found[f"{node[1]}/{gpu[1]}"] = float(line.rpartition(" ")[2])
    return found


def test_each_gpu_has_its_values_and_its_labels(fleet: Exported) -> None:
    page = page_of(fleet, fleet.bucket(jobs=["train", "", "train", ""], power_w=[600, 601, NAN, 603.5]))
    assert values(page, "drover_gpu_power_w") == {"n0/0": 600, "n0/1": 601, "n1/1": 603.5}
    first = next(line for line in page.splitlines() if line.startswith("drover_gpu_power_w{"))
    assert first == (
        'drover_gpu_power_w{node="n0",gpu="0",uuid="GPU-n0-0",model="NVIDIA \\"H100\\"\\\\80GB",rack="r0",job="train"}'
        " 600.0"
    )
    assert [line for line in page.splitlines() if not line.startswith("#") and not LINE.fullmatch(line)] == []
    names = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_dcgm_has_its_names_units_and_labels(fleet: Exported) -> None:
    bucket = fleet.bucket(
        jobs=["train", "", "", ""], gpu_util_ratio=[0.93, 0, 1, NAN], energy_j=[1234.567, 1, 2, 3],
        framebuffer_used_bytes=[2**30, 0, 2**20, NAN], framebuffer_total_bytes=[2**31] * 4,
        throttle_power_us=[5.0, 0, 0, 0],
    )  # fmt: skip
    page = page_of(fleet, bucket, "dcgm", metrics=GPU_METRICS)
    assert values(page, "DCGM_FI_DEV_GPU_UTIL") == {"n0/0": 93, "n0/1": 0, "n1/0": 100}
    assert values(page, "DCGM_FI_DEV_FB_USED") == {"n0/0": 1024, "n0/1": 0, "n1/0": 1}
    assert values(page, "DCGM_FI_DEV_FB_FREE") == {"n0/0": 1024, "n0/1": 2048, "n1/0": 2047}
    assert values(page, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")["n0/0"] == 1234567
    assert values(page, "DCGM_FI_DEV_POWER_VIOLATION")["n0/0"] == 5000
    line = next(line for line in page.splitlines() if line.startswith("DCGM_FI_DEV_GPU_UTIL{"))
    assert line.startswith(
        'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-n0-0",pci_bus_id="00000000:1B:00.0",device="nvidia0",modelName='
    )
    assert ',Hostname="n0",hpc_job="train"}' in line
    assert "hpc_job" not in next(line for line in page.splitlines() if 'Hostname="n1"' in line)


def test_the_newest_xid_stands_there_as_dcgm_has_it(fleet: Exported) -> None:
    def xid(code: str, gpu: int, *, backlog: bool = False) -> Event:
        return Event(f"e{code}", 1, "n0", gpu, EventKind.XID, code, "", backlog=backlog)

    fleet.xids.take([xid("13", 1), xid("79", 1), xid("48", 0, backlog=True)])
    page = page_of(fleet, silent(fleet.bucket(), 3), "dcgm")
    assert values(page, "DCGM_FI_DEV_XID_ERRORS") == {"n0/0": 0, "n0/1": 79, "n1/0": 0}


def test_the_table_of_dcgm_agrees_with_the_catalog() -> None:
    for name, kind, _, metric, _, _ in ROWS:
        if metric == LAST_XID:
            continue
        known = BY_NAME[metric]
        assert known.scope is Scope.GPU
        assert name in LESS or known.sources["dcgm"].key == name
        assert (kind == "counter") == (known.kind == "counter")
    given = {row[0] for row in ROWS}
    assert {m.sources["dcgm"].key for m in of_scope(Scope.GPU) if "dcgm" in m.sources} <= given
    assert not given & NOT_GIVEN.keys()


def test_no_two_metrics_have_one_name() -> None:
    for naming in ("drover", "dcgm"):
        names = [series.name for series in series_of(naming, GPU_METRICS)]
        assert len(names) == len(set(names))


def test_a_silent_gpu_has_no_series_and_without_a_bucket_none_has(fleet: Exported) -> None:
    page = page_of(fleet, silent(fleet.bucket(), 0))
    assert set(values(page, "drover_gpu_temp_c")) == {"n0/1", "n1/0", "n1/1"}
    assert [line for line in page_of(fleet, None).splitlines() if line[0] != "#"] == [f"{CUT} 0"]


def test_what_is_past_the_bound_is_left_out_whole_and_said(fleet: Exported) -> None:
    page = page_of(fleet, fleet.bucket(), metrics=("power_w", "gpu_temp_c", "gpu_util_ratio"), max_series=9)
    assert len(values(page, "drover_gpu_power_w")) == len(values(page, "drover_gpu_temp_c")) == 4
    assert values(page, "drover_gpu_util_ratio") == {}
    assert f"{CUT} 4\n" in page


def test_scrapes_of_an_interval_share_a_page_and_a_job_that_ends_leaves_the_labels(fleet: Exported) -> None:
    now, buckets = [0.0], [fleet.bucket(jobs=["a", "", "", ""])]
    page = FleetPage("drover", FleetPageConfig(), lambda: buckets[-1], fleet.reader, fleet.xids,
                     monotonic=lambda: now[0])  # fmt: skip
    first = page.read()
    buckets.append(fleet.bucket(jobs=["", "b", "", ""]))
    assert page.read() is first
    now[0] = 15
    text = b"".join(page.read().plain()).decode()
    assert 'job="a"' not in text
    assert 'node="n0",gpu="1"' in next(line for line in text.splitlines() if 'job="b"' in line)


@pytest.fixture
def server(fleet: Exported, store: Store) -> Iterator[MetricsServer]:
    pages = {"/metrics/fleet": FleetPage("drover", FleetPageConfig(), fleet.bucket, fleet.reader, fleet.xids)}
    made = MetricsServer(facts_of(store), ("127.0.0.1", 0), pages=pages)
    yield made
    made.close()


def test_it_is_served_compressed_and_plain(server: MetricsServer) -> None:
    url = f"http://127.0.0.1:{server.port}/metrics/fleet"
    plain = urllib3.request("GET", url, timeout=120)
    packed = urllib3.request("GET", url, headers={"accept-encoding": "gzip"}, timeout=120)
    assert packed.headers["content-encoding"] == "gzip"
    assert plain.data == packed.data  # urllib3 has unpacked it
    assert plain.data.count(b"drover_gpu_power_w{") == 4
    assert urllib3.request("GET", url.replace("fleet", "dcgm"), timeout=120).status == 404


def test_a_plain_page_that_is_cut_cannot_pass_for_a_whole_one(server: MetricsServer) -> None:
    url = f"http://127.0.0.1:{server.port}/metrics/fleet"
    plain = urllib3.request("GET", url, headers={"accept-encoding": "gzip;q=0, identity"}, timeout=120)
    assert "content-encoding" not in plain.headers
    assert int(plain.headers["content-length"]) == len(plain.data)


def test_a_gpu_that_came_back_into_its_slot_has_its_own_uuid(fleet: Exported) -> None:
    own = next(row for row in fleet.registry.rows() if (row.node, row.gpu) == ("n0", 0))
    meanwhile = replace(own, entity_id=1, key="other", uuid="GPU-other", first_ms=50, last_ms=60)
    fleet.registry.add([own.during(10, 40), meanwhile, own.during(90, 90)])
    assert fleet.identities(fleet.bucket()).known[0].uuid == own.uuid


def test_a_standby_whose_store_does_not_answer_says_so(fleet: Exported, store: Store) -> None:
    def away() -> Bucket:
        raise StoreError("it is away")

    page = FleetPage("drover", FleetPageConfig(), away, fleet.reader, fleet.xids)
    server = MetricsServer(facts_of(store), ("127.0.0.1", 0), pages={"/metrics/fleet": page})
    try:
        answer = urllib3.request("GET", f"http://127.0.0.1:{server.port}/metrics/fleet", timeout=120)
        assert answer.status == 503
        assert b"it is away" in answer.data
    finally:
        server.close()


# promtool's remarks about style; it has a word of its own for a page that it cannot read.
STYLE = {
    "drover": {"metric names should not contain abbreviated units"},  # the catalog's names end in their unit
    "dcgm": {
        "label names should be written in 'snake_case' not 'camelCase'", 'counter metrics should have "_total" suffix',
        "metric name should not include type 'counter'",
    },
}  # fmt: skip


@pytest.mark.system
@pytest.mark.parametrize("naming", ["drover", "dcgm"])
def test_promtool_remarks_on_nothing_but_the_style_of_names(fleet: Exported, naming: str) -> None:
    bucket = fleet.bucket(**{name: [1.0, 0, 1, 0] for name in GPU_METRICS})
    page = page_of(fleet, bucket, naming, metrics=GPU_METRICS)
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True)
    assert checked.returncode == 3  # 1: it cannot be read
    assert {line.partition(" ")[2] for line in checked.stderr.splitlines() if line} <= STYLE[naming]
