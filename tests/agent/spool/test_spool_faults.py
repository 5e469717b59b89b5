"""The spool when disks fail, fill up or hang under a running agent."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from drover_agent import atomic_file as files
from drover_agent.config import SpoolConfig
from drover_agent.sources.base import Entity
from drover_agent.spool import record_format as frames
from drover_agent.spool import segment_log as segments
from drover_agent.spool.segment_log import SegmentLog
from drover_agent.spool.spool import Spool
from drover_agent.telemetry.schema_registry import SchemaRegistry
from drover_core.metrics.catalog import Scope
from drover_proto import telemetry_pb2 as pb

NOW = 1_800_000_000_000
HOUR = 3_600_000


def open_spool(folder: Path, now_ms: int = NOW) -> Spool:
    return Spool(SpoolConfig(dir=str(folder)), now_ms)


def batch(spool: Spool, ts_ms: int = NOW, size: int = 10) -> None:
    spool.add_batch(ts_ms, [pb.Block(schema=1, rows=1, body=b"x" * size)])


def event(spool: Spool, code: str) -> None:
    spool.add_record(NOW, pb.Record(event=pb.Event(ts_ms=NOW, kind="xid", code=code)))


def payloads(log: SegmentLog, after: int = 0) -> list[bytes]:
    found = []
    while record := log.after(after):
        after = record.seq
        found.append(record.payload)
    return found


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that takes no data while this is set; names can still be made and removed."""
    refuses = threading.Event()
    write = os.write

    def maybe(descriptor: int, data: bytes) -> int:
        if refuses.is_set():
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(segments.os, "write", maybe)
    return refuses


def test_what_a_collector_holds_is_not_reported_as_lost_when_memory_is_full(
    tmp_path: Path, refusing: threading.Event
) -> None:
    spool = open_spool(tmp_path)
    refusing.set()
    for _ in range(12):  # three times what memory takes
        batch(spool, size=2**20)
        spool.ack(pb.LIVE, spool.telemetry.next_seq - 1)
    spool.tidy(NOW)
    assert spool.take_losses() is None
    for _ in range(12):
        batch(spool, size=2**20)
    spool.tidy(NOW)
    losses = spool.take_losses()
    assert losses and losses.telemetry == 12 - len(spool.telemetry.refused.records)
    refusing.clear()
    spool.close()


def test_a_folder_that_cannot_be_synced_does_not_break_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SegmentLog(tmp_path, "events", 2**20, 2**20)
    log.append(NOW, b"one")

    def failing(_: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(segments, "sync_folder", failing)
    log.rotate()
    log.append(NOW, b"two")
    log.append(NOW, b"three")
    assert log.trouble
    monkeypatch.setattr(segments, "sync_folder", files.sync_folder)
    log.retry()
    assert (log.trouble, len(log.refused.records)) == (None, 0)
    log.close()
    assert payloads(SegmentLog(tmp_path, "events", 2**20, 2**20)) == [b"one", b"two", b"three"]


def test_a_record_damaged_under_a_running_agent_costs_itself_alone_and_is_reported(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for code in ("1", "2", "3", "4"):
        event(spool, code)
    path = max(tmp_path.glob("events-*.seg"))
    whole = bytearray(path.read_bytes())
    whole[spool.events.segments[-1].offsets[1] + frames.FRAME.size] ^= 0x5A
    path.write_bytes(whole)
    for _ in range(2):
        found = payloads(spool.events)
        assert [pb.Record.FromString(payload).event.code for payload in found] == ["1", "3", "4"]
    losses = spool.take_losses()
    assert losses and len(losses.damage) == 1 and path.name in losses.damage[0]
    assert spool.take_losses() is None
    spool.close()


def test_records_damaged_in_a_closed_file_are_reported(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    event(spool, "1")
    event(spool, "2")
    spool.events.rotate()
    path = min(tmp_path.glob("events-*.seg"))
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 0x5A
    path.write_bytes(whole)
    assert len(payloads(spool.events)) == 1
    losses = spool.take_losses()
    assert losses and path.name in losses.damage[0]
    assert spool.pending()[0] == 1
    spool.close()


def test_a_file_that_cannot_be_read_does_not_keep_the_agent_from_starting(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    event(spool, "1")
    given = spool.events.next_seq
    spool.events.rotate()
    event(spool, "2")
    spool.close()
    first, second = sorted(tmp_path.glob("events-*.seg"))
    for unreadable in (first, second):
        unreadable.unlink()
        unreadable.mkdir()  # reading it fails, as it does on a bad sector
    again = open_spool(tmp_path)
    losses = again.take_losses()
    assert losses and [first.name in losses.damage[0], second.name in losses.damage[1]] == [True, True]
    assert again.events.next_seq > given
    again.close()


def test_batches_that_cannot_be_read_now_keep_the_meaning_of_their_numbers(tmp_path: Path) -> None:
    """They may be read after the next start; reused numbers would give them another meaning."""
    spool = open_spool(tmp_path)
    batch(spool)
    dictionary = SchemaRegistry(tmp_path / "dictionary.json")
    dictionary.index_of(Entity(Scope.GPU, "SN0", 0), NOW)
    (tmp_path / "dictionary.json").write_bytes(dictionary.dump())
    spool.close()
    file = min(tmp_path.glob("telemetry-*.seg"))
    whole = file.read_bytes()
    file.unlink()
    file.mkdir()
    meanwhile = open_spool(tmp_path, NOW + 10 * HOUR)
    dictionary = SchemaRegistry.load(tmp_path / "dictionary.json", meanwhile.oldest_batch_ms())
    assert dictionary.index_of(Entity(Scope.GPU, "SN1", 0), NOW + 10 * HOUR) == 1
    meanwhile.close()
    file.rmdir()
    file.write_bytes(whole)
    assert open_spool(tmp_path).oldest_batch_ms() == NOW


def test_sequences_given_out_without_a_file_are_not_given_out_again_under_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no file can be made, nothing on disk says which sequences were used."""
    spool = open_spool(tmp_path)
    first_id = spool.id
    spool.close()
    used: set[tuple[str, int]] = set()
    opening = os.open

    def read_only(path: object, flags: int, *mode: int) -> int:
        if flags & os.O_EXCL:
            raise OSError(28, "No space left on device")
        return opening(path, flags, *mode)  # type: ignore[arg-type]  # handed on as it came

    for _ in range(2):
        monkeypatch.setattr(segments.os, "open", read_only)
        spool = open_spool(tmp_path)
        batch(spool)
        spool.sync_events()
        found = spool.next(pb.LIVE, 0)
        assert found
        assert (spool.id, found[0]) not in used
        used.add((spool.id, found[0]))
        monkeypatch.setattr(segments.os, "open", opening)
        os.close(spool._lock)  # killed
    assert first_id not in {id_ for id_, _ in used}


def test_only_the_agents_user_can_look_into_the_spool(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "spool")
    event(spool, "79")
    spool.close()
    assert stat.S_IMODE((tmp_path / "spool").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "spool").iterdir()} == {0o600}


def test_entities_in_use_for_days_keep_their_numbers_over_a_restart(tmp_path: Path) -> None:
    """The dictionary's file is written when it changes, which may be long before the oldest batch that waits."""
    path, gpu = tmp_path / "dictionary.json", Entity(Scope.GPU, "SN0", 0)
    dictionary = SchemaRegistry.load(path, None)
    for hour in range(100):
        dictionary.index_of(gpu, NOW + hour * HOUR)
        dictionary.schema_of(Scope.GPU, ["power_w"], NOW + hour * HOUR)
        if dictionary.due:
            path.write_bytes(dictionary.dump())
    again = SchemaRegistry.load(path, NOW + 99 * HOUR - 1)
    assert again.entities == {gpu: 0}
    assert list(again.schemas) == [1]
    assert SchemaRegistry.load(path, NOW + 200 * HOUR).entities == {}


def test_an_id_is_kept_only_once_a_file_says_which_sequences_were_given_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that refuses new files at the start, and takes them again later, or at the next start."""
    opening = os.open

    def no_new_log(path: object, flags: int, *mode: int) -> int:
        if flags & os.O_EXCL:
            raise OSError(28, "No space left on device")
        return opening(path, flags, *mode)  # type: ignore[arg-type]  # handed on as it came

    open_spool(tmp_path).close()
    monkeypatch.setattr(segments.os, "open", no_new_log)
    spool = open_spool(tmp_path)
    batch(spool)
    used = {(spool.id, found[0]) for after in (0, 1) if (found := spool.next(pb.LIVE, after))}
    os.close(spool._lock)  # killed
    monkeypatch.setattr(segments.os, "open", opening)
    spool = open_spool(tmp_path)
    batch(spool)
    assert used
    assert (spool.id, spool.telemetry.next_seq - 1) not in used
    spool.close()

    monkeypatch.setattr(segments.os, "open", no_new_log)
    spool = open_spool(tmp_path)
    monkeypatch.setattr(segments.os, "open", opening)
    spool.tidy(NOW)
    assert spool.trouble is None
    kept = spool.id
    spool.close()
    assert open_spool(tmp_path).id == kept


def test_where_no_file_can_be_begun_those_that_say_what_was_given_out_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest is empty, because a power cut took what was in it."""
    log = SegmentLog(tmp_path, "events", 2**20, 2**20)
    log.append(NOW, b"kept")
    log.close()
    log = SegmentLog(tmp_path, "events", 2**20, 2**20)
    log.append(NOW, b"taken by the power cut")
    given = log.next_seq
    log.close()
    max(tmp_path.glob("events-*")).write_bytes(b"")

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segments, "sync_folder", full)
    SegmentLog(tmp_path, "events", 2**20, 2**20)
    monkeypatch.setattr(segments, "sync_folder", files.sync_folder)
    assert SegmentLog(tmp_path, "events", 2**20, 2**20).next_seq > given


def test_a_file_that_cannot_be_closed_is_not_written_to_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS reports failed writes at the close; then the descriptor may belong to another file."""
    log = SegmentLog(tmp_path, "events", 2**20, 2**20)
    log.append(NOW, b"one")
    closing = os.close

    def refusing(descriptor: int) -> None:
        closing(descriptor)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(segments.os, "close", refusing)
    log._seal()
    monkeypatch.setattr(segments.os, "close", closing)
    assert log.trouble
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    log.append(NOW, b"two")
    log.close()
    os.close(other)
    assert (tmp_path / "other").read_bytes() == b""
    assert payloads(SegmentLog(tmp_path, "events", 2**20, 2**20)) == [b"one", b"two"]


def test_events_that_cannot_be_synced_are_a_trouble_that_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = open_spool(tmp_path)
    syncing = os.fdatasync

    def failing(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(segments.os, "fdatasync", failing)
    event(spool, "79")
    spool.sync_events()
    spool.tidy(NOW)
    assert "Input/output error" in str(spool.trouble)
    monkeypatch.setattr(segments.os, "fdatasync", syncing)
    spool.tidy(NOW)
    assert spool.trouble is None
    spool.close()


def test_a_clock_that_was_ahead_at_the_start_makes_nothing_too_old(tmp_path: Path) -> None:
    """It is set right under way: rows have times of long before the start, as the spool counts."""
    ahead_ms = NOW + 365 * 24 * HOUR
    spool = open_spool(tmp_path, ahead_ms)
    batch(spool, NOW)
    for minutes in (0, 11, 22):
        spool.tidy(ahead_ms + minutes * 60_000)
    assert spool.telemetry.closed()
    assert spool.take_losses() is None
    spool.ack(pb.LIVE, spool.telemetry.next_seq - 1)
    spool.tidy(ahead_ms + 8 * 24 * HOUR)
    assert not [segment for segment in spool.telemetry.closed() if segment.count]
    spool.close()
