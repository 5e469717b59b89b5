"""remote_write: what is sent, to honest receivers and hostile ones."""

from __future__ import annotations

import logging
import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from drover_collector.config import load_config
from drover_collector.exporters import http_post, sending
from drover_collector.exporters.exports import Exports
from drover_collector.exporters.remote_write import STALE_BITS, RemoteWrite
from drover_collector.exporters.settings import ExportConfig, FleetPageConfig, RemoteWriteConfig, validate_export
from drover_core.settings import SettingsError
from testbed.exported import END_MS, NAN, Exported, silent
from testbed.prometheus_messages import Written, written
from testbed.receivers import HttpReceiver, Reply, http_receiver
from testbed.waiting import wait_until

METRICS = ("power_w", "gpu_temp_c")
SECRET = "s3cret-token-of-the-test"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "FIRST_S", 0.01)
    monkeypatch.setattr(sending, "MOST_S", 0.05)


@pytest.fixture
def fleet() -> Exported:
    return Exported()


@pytest.fixture
def receiver() -> Iterator[HttpReceiver]:
    with http_receiver() as made:
        made.usual = Reply(204)
        yield made


@contextmanager
def writing(url: str, **settings: object) -> Iterator[RemoteWrite]:
    config = RemoteWriteConfig("prom", url)
    made = RemoteWrite(replace(config, **{"metrics": METRICS, "timeout_s": 2.0, **settings}), "export.remote_write[0]")
    made.sender.start()
    try:
        yield made
    finally:
        made.close()


def take(writer: RemoteWrite, fleet: Exported, bucket: object = None) -> None:
    bucket = bucket or fleet.bucket()
    writer.take(bucket, fleet.identities(bucket), fleet.xids)  # type: ignore[arg-type]  # a bucket


def all_of(receiver: HttpReceiver, version: int = 1) -> list[Written]:
    return [sample for request in receiver.got for sample in written(request.body, version)]


def is_stale(value: float) -> bool:
    return struct.unpack("<Q", struct.pack("<d", value))[0] == int(STALE_BITS)


@pytest.mark.parametrize("version", [1, 2])
def test_each_value_arrives_with_its_labels_and_time(fleet: Exported, receiver: HttpReceiver, version: int) -> None:
    receiver.usual = Reply(204, headers={"X-Prometheus-Remote-Write-Samples-Written": "7"})
    with writing(receiver.url, version=version, labels=("cluster=alpha",)) as writer:
        take(writer, fleet, fleet.bucket(jobs=["train", "", "", ""], power_w=[600, 601.5, NAN, 603]))
        wait_until(lambda: writer.sender.status.sent == 7)
    found = all_of(receiver, version)
    assert {s.ts_ms for s in found} == {END_MS}
    power = {(s.labels["node"], s.labels["gpu"]): s.value for s in found if s.name == "drover_gpu_power_w"}
    assert power == {("n0", "0"): 600, ("n0", "1"): 601.5, ("n1", "1"): 603}
    assert next(s for s in found if "job" in s.labels).labels == {
        "__name__": "drover_gpu_power_w", "cluster": "alpha", "node": "n0", "gpu": "0", "uuid": "GPU-n0-0",
        "model": 'NVIDIA "H100"\\80GB', "rack": "r0", "job": "train",
    }  # fmt: skip
    assert sum("job" in s.labels for s in found) == len(METRICS)
    head = receiver.got[0].headers
    assert head["content-encoding"] == "snappy"
    assert head["x-prometheus-remote-write-version"] == ("0.1.0" if version == 1 else "2.0.0")
    if version == 2:
        assert {s.type for s in found} == {2}
        assert found[0].help == "board power now (W)"


def test_dcgm_names_have_labels_on_both_sides_of_the_name(fleet: Exported, receiver: HttpReceiver) -> None:
    with writing(receiver.url, naming="dcgm") as writer:
        take(writer, fleet)
        wait_until(lambda: writer.sender.status.sent == 12)
    found = all_of(receiver)
    assert {s.name for s in found} == {"DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_XID_ERRORS"}
    assert found[0].labels["Hostname"] == "n0"
    assert "modelName" in found[0].labels


def test_requests_are_of_the_size_that_is_set(fleet: Exported, receiver: HttpReceiver) -> None:
    with writing(receiver.url, batch=100) as writer:
        writer._rows = 3
        take(writer, fleet)
        wait_until(lambda: writer.sender.status.sent == 8)
    assert [len(written(request.body)) for request in receiver.got] == [6, 2]


def test_a_gpu_that_falls_silent_ends_its_series_once(fleet: Exported, receiver: HttpReceiver) -> None:
    with writing(receiver.url) as writer:
        for number in range(3):
            bucket = fleet.bucket(END_MS + number * 30_000)
            take(writer, fleet, silent(bucket, 2) if number else bucket)
        wait_until(lambda: not writer.sender.status.waiting)
    own = [s for s in all_of(receiver) if (s.labels["node"], s.labels["gpu"]) == ("n1", "0")]
    assert [(s.ts_ms, is_stale(s.value)) for s in own if s.name == "drover_gpu_power_w"] == [
        (END_MS, False), (END_MS + 30_000, True),
    ]  # fmt: skip
    assert {(s.labels["node"], s.labels["gpu"]) for s in all_of(receiver) if math.isnan(s.value)} == {("n1", "0")}


def test_a_job_that_ends_ends_the_series_with_its_name(fleet: Exported, receiver: HttpReceiver) -> None:
    with writing(receiver.url) as writer:
        take(writer, fleet, fleet.bucket(END_MS, ["train", "", "", ""]))
        take(writer, fleet, fleet.bucket(END_MS + 30_000, ["", "", "", ""]))
        wait_until(lambda: not writer.sender.status.waiting)
    ended = [s for s in all_of(receiver) if is_stale(s.value)]
    assert {(s.name, s.labels["job"], s.ts_ms) for s in ended} == {
        (f"drover_gpu_{name}", "train", END_MS + 30_000) for name in ("power_w", "temp_c")
    }
    fresh = [s for s in all_of(receiver) if s.ts_ms > END_MS and "job" not in s.labels]
    assert len(fresh) == 8


@pytest.mark.parametrize(
    "reply",
    [Reply(500), Reply(429), Reply(401), Reply(how="close"), Reply(302, headers={"Location": "http://elsewhere/"})],
    ids=["500", "429", "401", "cut", "redirect"],
)
def test_what_fails_is_sent_again_from_where_it_failed(fleet: Exported, receiver: HttpReceiver, reply: Reply) -> None:
    receiver.replies = [Reply(204), reply, reply]
    with writing(receiver.url) as writer:
        writer._rows = 2
        take(writer, fleet)
        wait_until(lambda: writer.sender.status.sent == 8)
    bodies = [request.body for request in receiver.got]
    assert len(bodies) >= 4
    assert bodies[1] == bodies[2] == bodies[-1] != bodies[0]
    status = writer.sender.status
    assert (status.waiting, status.waiting_bytes, status.dropped, status.refused) == (0, 0, 0, 0)


def test_what_the_receiver_will_never_take_is_counted_and_the_next_goes_on(
    fleet: Exported, receiver: HttpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.replies = [Reply(400, b"out of order " + SECRET.encode())]
    with writing(receiver.url) as writer:
        take(writer, fleet)
        take(writer, fleet, fleet.bucket(END_MS + 30_000))
        wait_until(lambda: writer.sender.status.sent == 8)
    assert writer.sender.status.refused == 8
    assert "answered 400" in caplog.text
    assert SECRET not in caplog.text


def test_a_receiver_that_asks_for_a_year_gets_five_minutes(fleet: Exported, receiver: HttpReceiver) -> None:
    receiver.replies = [Reply(429, headers={"Retry-After": "31536000"})]
    waits: list[float] = []
    with writing(receiver.url) as writer:
        waited = writer.sender._stopping.wait
        # The test stands in for the clock.
        writer.sender._stopping.wait = lambda s=None: bool(waits.append(s or 0)) or waited(0.01)  # type: ignore[method-assign]
        take(writer, fleet)
        wait_until(lambda: writer.sender.status.sent == 8)
    assert waits == [sending.RETRY_AFTER_MOST_S]


@pytest.mark.parametrize("how", ["hang", "trickle"])
def test_an_answer_without_end_is_cut_and_sent_again(fleet: Exported, receiver: HttpReceiver, how: str) -> None:
    receiver.replies = [Reply(how=how)]
    with writing(receiver.url, timeout_s=0.3) as writer:
        take(writer, fleet)
        wait_until(lambda: writer.sender.status.sent == 8)
    assert writer.sender.status.failures == 1


def test_a_body_without_end_is_not_kept(
    fleet: Exported, receiver: HttpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_post, "MAX_ANSWER_BYTES", 1000)
    receiver.usual = Reply(200, b"x" * 2_000_000)
    with writing(receiver.url) as writer:
        for number in range(3):
            take(writer, fleet, fleet.bucket(END_MS + number * 30_000))
        wait_until(lambda: writer.sender.status.sent == 24)
    assert len(receiver.got) == 3


def test_a_receiver_that_reads_nothing_holds_up_nobody_and_what_waits_is_bounded(
    fleet: Exported, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        with writing(f"http://127.0.0.1:{deaf.getsockname()[1]}", timeout_s=0.3, spool_bytes=200) as writer:
            began = time.monotonic()
            for number in range(20):
                take(writer, fleet, fleet.bucket(END_MS + number * 30_000))
            assert time.monotonic() - began < 4, "each that waited would take 0.3 s"
            status = writer.sender.status
            assert status.waiting_bytes <= 200
            assert status.dropped == 8 * 20 - status.waiting
            wait_until(lambda: status.failures)
        assert status.sent == 0
    assert "its queue of 200 bytes is full" in caplog.text


def test_nothing_within_the_bound_is_lost_when_a_receiver_comes_back(fleet: Exported, receiver: HttpReceiver) -> None:
    receiver.usual = Reply(503)
    with writing(receiver.url) as writer:
        for number in range(20):
            take(writer, fleet, fleet.bucket(END_MS + number * 30_000))
        wait_until(lambda: writer.sender.status.failures > 2)
        receiver.got.clear()
        receiver.usual = Reply(204)
        wait_until(lambda: writer.sender.status.sent == 160)
    times = [s.ts_ms for s in all_of(receiver) if s.name == "drover_gpu_power_w" and s.labels["gpu"] == "0"]
    accepted = sorted(set(times))
    assert accepted == [END_MS + number * 30_000 for number in range(20)]
    assert times == sorted(times)


def test_a_certificate_that_is_not_trusted_is_refused(fleet: Exported, tls_files: tuple[Path, Path]) -> None:
    with http_receiver(tls_files) as secure, writing(secure.url.replace("127.0.0.1", "localhost")) as writer:
        take(writer, fleet)
        wait_until(lambda: writer.sender.status.failures)
        assert writer.sender.status.trouble.startswith("TLS failed: its certificate is not trusted")
        assert secure.got == []


@pytest.fixture
def tls_files(tmp_path: Path) -> tuple[Path, Path]:
    from drover_cli.pki import authority as certs
    from testbed.certificates import Fleet

    files = Fleet(tmp_path).issue(certs.COLLECTOR, "collector")
    return Path(files.paths[1]), Path(files.paths[2])


def test_an_older_receiver_that_takes_2_0_for_an_empty_message_is_noticed(
    fleet: Exported, receiver: HttpReceiver
) -> None:
    with writing(receiver.url, version=2) as writer:
        take(writer, fleet)
        wait_until(lambda: "set version = 1" in writer.sender.status.trouble)
        assert writer.sender.status.sent == 0


def test_a_token_is_read_again_when_it_is_refused_and_never_logged(
    fleet: Exported, receiver: HttpReceiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("old-token-of-the-test\n")
    token.chmod(0o600)
    receiver.usual = Reply(401, f"Bearer {SECRET}".encode())
    with caplog.at_level(logging.DEBUG), writing(receiver.url, token_file=str(token)) as writer:
        take(writer, fleet)
        wait_until(lambda: receiver.got)
        token.write_text(SECRET)
        receiver.usual = Reply(204)
        wait_until(lambda: receiver.got[-1].headers["authorization"] == f"Bearer {SECRET}")
        wait_until(lambda: writer.sender.status.sent == 8)
    assert receiver.got[0].headers["authorization"] == "Bearer old-token-of-the-test"
    assert SECRET not in caplog.text
    assert "old-token" not in caplog.text


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"url": "http://user:hunter2@prom/"}, "must not hold a user or password"),
        ({"username": "u"}, "give username and password_file"),
        ({"token_file": "/nowhere/token"}, "No such file"),
        ({"ca_file": "/nowhere/ca.pem"}, "no such file"),
    ],
)
def test_settings_that_cannot_work_are_refused_without_their_secrets(settings: dict[str, str], said: str) -> None:
    entry = replace(RemoteWriteConfig("a", "http://prom/"), **settings)
    with pytest.raises(SettingsError, match=said) as raised:
        validate_export(ExportConfig(remote_write=(entry,)))
    assert "hunter2" not in str(raised.value)
    with pytest.raises(SettingsError, match="twice"):
        good = RemoteWriteConfig("a", "http://prom/")
        validate_export(ExportConfig(FleetPageConfig(), (good, good)))


@pytest.mark.parametrize("url", ["ftp://user:hunter2@prom/", "user:hunter2@prom", "http://user:hunter2@prom:99999"])
def test_a_wrong_address_is_refused_without_the_password_in_it(url: str, tmp_path: Path) -> None:
    path = tmp_path / "collector.toml"
    path.write_text(f'[[export.remote_write]]\nname = "a"\nurl = "{url}"\n')
    with pytest.raises(SettingsError, match="@prom") as raised:
        load_config(path)
    assert "hunter2" not in str(raised.value)


def test_an_exporter_that_cannot_take_a_bucket_does_not_keep_it_from_the_others(
    fleet: Exported, receiver: HttpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drover_collector.exporters.exports.LOOK_S", 0.005)
    entries = (RemoteWriteConfig("first", receiver.url, metrics=METRICS),
               RemoteWriteConfig("second", receiver.url, metrics=METRICS))  # fmt: skip
    exports = Exports(ExportConfig(remote_write=entries), fleet.index, fleet.registry)
    tries: list[object] = []

    def fails(*bucket: object) -> None:
        tries.append(bucket)
        raise RuntimeError("a defect")

    monkeypatch.setattr(exports._takers[0], "take", fails)
    exports.start(fleet.bucket)
    wait_until(lambda: exports.statuses()["second"].sent == 8)
    exports.close()
    assert len(tries) == 1  # and the next bucket at its time, not the same one each second


def test_a_snapshot_that_is_larger_than_the_queue_is_sent_all_the_same(fleet: Exported, receiver: HttpReceiver) -> None:
    config = RemoteWriteConfig("prom", receiver.url, metrics=METRICS, spool_bytes=10)
    made = RemoteWrite(config, "export.remote_write[0]")
    bucket = fleet.bucket()
    made.take(bucket, fleet.identities(bucket), fleet.xids)
    made.sender.start()
    wait_until(lambda: made.sender.status.sent or made.sender.status.dropped)
    made.close()
    assert (made.sender.status.sent, made.sender.status.dropped) == (8, 0)


def test_buckets_are_sent_at_their_interval_and_only_while_this_collector_judges(
    fleet: Exported, receiver: HttpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drover_collector.exporters.exports.LOOK_S", 0.005)
    config = ExportConfig(remote_write=(RemoteWriteConfig("prom", receiver.url, metrics=METRICS, interval_s=30),))
    exports = Exports(config, fleet.index, fleet.registry)
    buckets = iter([None, *(fleet.bucket(END_MS + number * 10_000) for number in range(7))])
    done = threading.Event()

    def newest() -> object:
        found = next(buckets, None)
        if found is None and exports.statuses()["prom"].sent:
            done.set()
        return found

    exports.start(newest)  # type: ignore[arg-type]  # buckets
    assert done.wait(120)
    wait_until(lambda: exports.statuses()["prom"].sent == 24)
    exports.close()
    assert sorted({s.ts_ms - END_MS for s in all_of(receiver)}) == [0, 30_000, 60_000]


def test_a_bucket_that_cannot_be_read_ends_nothing(fleet: Exported, receiver: HttpReceiver,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("drover_collector.exporters.exports.LOOK_S", 0.005)
    config = ExportConfig(remote_write=(RemoteWriteConfig("prom", receiver.url, metrics=METRICS),))
    exports = Exports(config, fleet.index, fleet.registry)
    calls = iter(range(100))

    def newest() -> object:
        if next(calls, 9) == 0:
            raise RuntimeError("a defect")
        return fleet.bucket()

    exports.start(newest)  # type: ignore[arg-type]  # buckets
    wait_until(lambda: exports.statuses()["prom"].sent == 8)
    exports.close()


def test_the_marker_survives_numpy() -> None:
    from drover_collector.exporters.remote_write import STALE, is_sample

    column = np.where(np.array([True, False]), STALE, np.array([1.0, np.nan]))
    assert is_sample(column).tolist() == [True, False]
