"""dcgm-exporter's pages of several versions, served over HTTP, and what becomes of them and of NVML's profiling."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.dcgm import AUTO_URL, GRACE_MS, METRICS, RETRY_MS, DcgmSource
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.http_page import Page, PageError
from drover_agent.sources.listeners import SYSTEM_USERS, user_listening
from drover_agent.sources.nvml.source import NvmlSource
from drover_agent.urls import url_error
from drover_core.metrics.catalog import Absent, Scope
from drover_core.model.events import EventKind
from testbed.nvml import FakeNvml
from testbed.pages import Served, serving

CASES = sorted((Path(__file__).parents[2] / "cases/agent/dcgm").iterdir())
T = 1_800_000_000_000
UUID = "GPU-c89b14a3-ce7c-6725-8424-b55d37d9c332"
PAGE = f'DCGM_FI_PROF_SM_ACTIVE{{gpu="0",UUID="{UUID}"}} 0.5\nDCGM_FI_DEV_SM_CLOCK{{gpu="0",UUID="{UUID}"}} 1410\n'


@pytest.fixture
def page() -> Iterator[Served]:
    with serving() as served:
        served.body = PAGE.encode()
        yield served


def known(*rows: dict[str, object]) -> Gpus:
    gpus = Gpus()
    for row in rows:
        if number := row.get("place"):
            uuid, slot = str(row["uuid"]), int(str(row["gpu"]))
            instance = Entity(Scope.GPU, uuid, slot, uuid=uuid, mig=uuid)
            gpus.set_instances(slot, (instance,), {int(str(number)): instance})
            continue
        texts = {key: str(row.get(key, "")) for key in ("uuid", "serial", "pci")}
        key = str(row.get("key") or texts["serial"] or texts["uuid"])
        gpus.set_entity(Entity(Scope.GPU, key, int(str(row["gpu"])), **texts))
    return gpus


def source(page: Served, gpus: Gpus, kmsg: Path | None = None) -> DcgmSource:
    return DcgmSource("n1", page.url, gpus, kmsg)


def with_nvml() -> Gpus:
    return known({"gpu": 0, "uuid": UUID, "serial": "1320"})


def absences(reading: Reading) -> dict[str, Absent]:
    return {name: why for _, name, why in reading.absent}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pages_of_several_versions(case: Path, page: Served) -> None:
    page.body = (case / "metrics.txt").read_bytes()
    gpus = known(*json.loads((case / "gpus.json").read_text())["gpus"])
    expected = json.loads((case / "expected.json").read_text())
    dcgm = source(page, gpus)
    dcgm.read(T)
    reading = dcgm.read(T + GRACE_MS)
    found = {entity: dict(values) for entity, values in reading.rows}
    for row in expected["rows"]:
        [entity] = [e for e in found if e.gpu == row["gpu"]]
        assert {"key": entity.key, "uuid": entity.uuid, "model": entity.model, "pci": entity.pci}.items() >= {
            key: value for key, value in row.items() if key in ("key", "uuid", "model", "pci")
        }.items()
        assert found.pop(entity) == pytest.approx(row["values"])
        assert {n: why.value for e, n, why in reading.absent if e == entity} == row["absent"]
    assert not found
    assert gpus.profiled_elsewhere is expected["profiled"]
    assert {what: count for what, count in dcgm.skipped.items() if count} == expected["skipped"]
    assert not reading.events


def test_a_case_gives_every_metric_of_the_catalog_a_value_of_its_own() -> None:
    """So that no two of them can be mixed up in `test_pages_of_several_versions`."""
    [case] = [c for c in CASES if c.name.endswith("every_field")]
    [row] = json.loads((case / "expected.json").read_text())["rows"]
    assert row["values"].keys() == {metric.name for metric in METRICS.values()}
    assert len(set(row["values"].values())) >= len(row["values"]) - 3, "flags are alike"


def test_a_gpu_that_nvml_does_not_report_in_time_is_taken_from_the_page(page: Served) -> None:
    gpus = Gpus()
    dcgm = source(page, gpus)
    assert not dcgm.read(T).rows, "NVML may be about to open"
    assert gpus.profiled_elsewhere, "so that it does not begin to profile"
    [(entity, values)] = dcgm.read(T + GRACE_MS).rows
    assert (entity.key, entity.gpu, values["sm_clock_mhz"]) == (UUID, 0, 1410)
    gpus.set_entity(Entity(Scope.GPU, "1320", 0, uuid=UUID, serial="1320"))
    [(entity, values)] = dcgm.read(T + GRACE_MS + 10_000).rows
    assert entity.key == "1320"
    assert values == {"sm_active_ratio": 0.5}, "the rest is NVML's again"


def test_nvml_may_profile_again_after_two_failed_reads(page: Served, caplog: pytest.LogCaptureFixture) -> None:
    gpus = with_nvml()
    dcgm = source(page, gpus)
    with caplog.at_level(logging.INFO, "drover_agent.sources.dcgm"):
        assert dcgm.read(T).rows
        assert dcgm.read(T + 10_000).inventory == {"dcgm.page": page.url}
        page.status = 500
        missing = absences(dcgm.read(T + 20_000))
        assert missing["sm_active_ratio"] is Absent.ERROR, "for this moment nobody reports it"
        assert gpus.profiled_elsewhere
        lost = dcgm.read(T + 30_000)
        assert not gpus.profiled_elsewhere
        assert not lost.absent, "NVML reports them now"
        assert lost.inventory == {"dcgm.page": ""}
        page.status = 200
        dcgm.read(T + 40_000)
        assert gpus.profiled_elsewhere
        page.body = b'DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="x"} 1\n'
        dcgm.read(T + 50_000)
        assert not gpus.profiled_elsewhere, "a page without profiling is none to wait for"
    switches = [r.getMessage() for r in caplog.records if r.getMessage().startswith("profiling metrics")]
    assert len(switches) == 4, "each switch is reported once"


def test_where_nvml_is_not_open_a_lost_page_is_absence_until_it_is_back(page: Served) -> None:
    dcgm = source(page, Gpus())
    dcgm.read(T)
    dcgm.read(T + GRACE_MS)
    page.body = b"<html>gateway</html>"
    for tick in range(1, 5):
        missing = absences(dcgm.read(T + GRACE_MS + tick * 10_000))
        assert missing == {metric.name: Absent.ERROR for metric in METRICS.values()}, "also between two looks"
    page.body = PAGE.encode()
    assert dcgm.read(T + GRACE_MS + 40_000 + RETRY_MS).rows


def test_a_page_that_is_not_there_is_looked_for_each_minute(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as gone:
        pass
    gpus = with_nvml()
    dcgm = DcgmSource("n1", gone.url, gpus)
    with serving(gone.port) as page:
        page.body = PAGE.encode()
        assert dcgm.read(T).rows
    for tick in range(1, 9):
        assert not dcgm.read(T + tick * 10_000).rows
    assert not gpus.profiled_elsewhere
    assert len([r for r in caplog.records if "is lost" in r.getMessage()]) == 1
    with serving(gone.port) as page:
        page.body = PAGE.encode()
        asked = [bool(dcgm.read(T + 90_000 + tick * 10_000).rows) for tick in range(7)]
        assert any(asked)
        assert len(page.requests) == len([one for one in asked if one])


def test_auto_is_quiet_where_nothing_listens(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Page) -> str:
        raise PageError(Absent.LOST, "Connection refused")

    monkeypatch.setattr(Page, "read", refuse)
    dcgm = DcgmSource("n1", "auto", Gpus())
    for tick in range(20):
        assert dcgm.read(T + tick * 10_000) == Reading()
    assert not caplog.records
    assert url_error(AUTO_URL) is None


@pytest.mark.parametrize(
    ("status", "reported"), [(0, 0.0), (3, 3.0), (4, 4.0), (5, "unsupported"), (6, "unsupported"), (-1, "out-of-range")]
)
def test_a_fabric_state_that_dcgm_does_not_know_is_none(page: Served, status: int, reported: float | str) -> None:
    page.body += f'DCGM_FI_DEV_FABRIC_MANAGER_STATUS{{gpu="0",UUID="{UUID}"}} {status}\n'.encode()
    dcgm = source(page, Gpus())
    dcgm.read(T)
    reading = dcgm.read(T + GRACE_MS)
    [(_, values)] = reading.rows
    assert values.get("fabric_state", absences(reading).get("fabric_state")) == reported


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def listens(proc: Path, port: int, user: int, name: str = "tcp") -> None:
    """Somebody else listens too, and the user; then come connections; a user has one of them to that port."""
    (proc / "net").mkdir(parents=True, exist_ok=True)
    row = "{at:4}: 0100007F:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 {user:5} 0 1 1\n"
    rows = [(22, "0A", 1001), (port, "0A", user), (port, "01", 1001)]
    text = "".join(row.format(at=n, port=p, state=state, user=u) for n, (p, state, u) in enumerate(rows))
    (proc / "net" / name).write_text(HEAD + text)


def test_a_page_that_began_since_it_was_looked_for_is_not_asked_unseen(
    page: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drover_agent.sources.dcgm.AUTO_PORT", page.port)
    monkeypatch.setattr("drover_agent.sources.dcgm.AUTO_URL", page.url)
    listens(tmp_path, page.port, 1001)
    with monkeypatch.context() as before:
        before.setattr("drover_agent.sources.dcgm._somebody_listens", lambda: False)
        dcgm = DcgmSource("n1", "auto", with_nvml(), proc=tmp_path)
        assert dcgm.read(T) == Reading()
    assert not page.requests
    listens(tmp_path, page.port, 0)
    assert dcgm.read(T + RETRY_MS).rows


@pytest.mark.parametrize("name", ["tcp", "tcp6"])
def test_a_page_that_an_ordinary_user_serves_unasked_is_not_believed(
    page: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setattr("drover_agent.sources.dcgm.AUTO_PORT", page.port)
    monkeypatch.setattr("drover_agent.sources.dcgm.AUTO_URL", page.url)
    listens(tmp_path, 1, 0)
    listens(tmp_path, page.port, 1001, name)
    gpus = with_nvml()
    dcgm = DcgmSource("n1", "auto", gpus, proc=tmp_path)
    for tick in range(20):
        assert dcgm.read(T + tick * 10_000) == Reading()
    assert not page.requests
    assert not gpus.profiled_elsewhere
    [record] = caplog.records
    assert "served by user 1001" in record.getMessage()
    listens(tmp_path, page.port, 0, name)  # the real one
    assert dcgm.read(T + 300_000).rows
    assert gpus.profiled_elsewhere
    listens(tmp_path, page.port, 1001, name)  # it ended, and the user took its place
    for tick in range(31, 33):
        assert dcgm.read(T + tick * 10_000).rows == []
    assert not gpus.profiled_elsewhere, "NVML profiles again"


def test_the_process_that_listens_is_known_by_the_kernel(tmp_path: Path) -> None:
    user = 1001 if os.geteuid() == 0 else os.geteuid()
    with socket.create_server(("127.0.0.1", 0)) as own:
        ours = own.getsockname()[1]
        before = os.geteuid()
        os.seteuid(user)
        try:
            users = socket.create_server(("127.0.0.1", 0))
        finally:
            os.seteuid(before)
        with users:
            assert user_listening(Path("/proc"), users.getsockname()[1]) == (user if user >= SYSTEM_USERS else None)
        assert user_listening(Path("/proc"), ours) == (before if before >= SYSTEM_USERS else None)
    with pytest.raises(FileNotFoundError):
        user_listening(tmp_path, 9400)


def test_a_page_named_in_the_settings_that_is_no_exporter_is_reported_once(
    page: Served, caplog: pytest.LogCaptureFixture
) -> None:
    page.body = b"go_threads 7\n"
    dcgm = source(page, with_nvml())
    for tick in range(20):
        assert not dcgm.read(T + tick * 10_000).rows
    [record] = caplog.records
    assert "none of dcgm-exporter's metrics" in record.getMessage()


def xid_page(code: int) -> bytes:
    return f'{PAGE}DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="{UUID}"}} {code}\n'.encode()


def test_an_xid_is_an_event_only_where_nobody_else_reports_it(page: Served, tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    for gpus, kmsg, reported in ((with_nvml(), None, False), (Gpus(), log, False), (Gpus(), None, True)):
        log.write_text("")
        page.body = xid_page(31)
        dcgm = source(page, gpus, kmsg)
        dcgm.read(T)
        assert not dcgm.read(T + GRACE_MS).events, "an XID of before the agent's start has no time"
        page.body = xid_page(79)
        events = dcgm.read(T + GRACE_MS + 10_000).events
        assert [(e.kind, e.code, e.gpu) for e in events] == ([(EventKind.XID, "79", 0)] if reported else [])
        assert not dcgm.read(T + GRACE_MS + 20_000).events
    log.unlink()
    page.body = xid_page(48)
    dcgm = source(page, Gpus(), log)
    dcgm.read(T)
    dcgm.read(T + GRACE_MS)
    page.body = xid_page(94)
    assert dcgm.read(T + GRACE_MS + 10_000).events, "a kernel log that cannot be read reports nothing"


def test_with_nvml_each_metric_of_a_gpu_and_of_an_instance_comes_from_one_of_the_two(
    fake_nvml: FakeNvml, page: Served
) -> None:
    fake_nvml.mig(0, [0])
    gpus = Gpus()
    nvml = NvmlSource("n1", gpus)
    dcgm = source(page, gpus)
    nvml.read(T)
    whole, instance = gpus.all()[1], gpus.instance(0, 7)
    assert instance is not None
    lines = (
        f'DCGM_FI_PROF_SM_ACTIVE{{gpu="0",UUID="{gpus.all()[0].uuid}",GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"}} 0.25\n'
        f'DCGM_FI_PROF_SM_ACTIVE{{gpu="1",UUID="{whole.uuid}"}} 0.75\n'
    )
    page.body = lines.encode()
    given = {entity: dict(values) for entity, values in dcgm.read(T + 1000).rows}
    assert given == {instance: {"sm_active_ratio": 0.25}, whole: {"sm_active_ratio": 0.75}}
    nvml.read(T + 1000)
    reading = nvml.read(T + 10_000)
    reported = {entity: set(values) for entity, values in reading.rows}
    assert reported[whole] >= {"power_w", "gpu_temp_c"}
    profiling = {metric.name for key, metric in METRICS.items() if key.startswith("DCGM_FI_PROF_")}
    for entity in (whole, instance):
        assert not reported[entity] & profiling
        assert not {name for e, name, _ in reading.absent if e == entity} & profiling, "reported by DCGM, not missing"
    dcgm.close()
    nvml.read(T + 11_000)
    assert "sm_active_ratio" in {name for e, v in nvml.read(T + 12_000).rows if e == whole for name in v}
    nvml.close()
