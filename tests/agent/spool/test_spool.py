"""The spool on a real disk: cut, damaged, full, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from drover_agent.config import SpoolConfig
from drover_agent.spool.backfill import BackfillPlan
from drover_agent.spool.messages import agent_message
from drover_agent.spool.record_format import frame
from drover_agent.spool.segment_log import SegmentLog
from drover_agent.spool.spool import Spool, SpoolError
from drover_proto import telemetry_pb2 as pb

NOW = 1_800_000_000_000
MINUTE = 60_000


def config(folder: Path, **settings: object) -> SpoolConfig:
    return SpoolConfig(dir=str(folder), **settings)  # type: ignore[arg-type]  # settings of several types


def open_spool(folder: Path, now_ms: int = NOW, **settings: object) -> Spool:
    return Spool(config(folder, **settings), now_ms)


def batch(spool: Spool, number: int, ts_ms: int = NOW, size: int = 10) -> None:
    spool.add_batch(ts_ms, [pb.Block(schema=number, rows=1, body=b"x" * size)])


def event(spool: Spool, code: str, ts_ms: int = NOW) -> None:
    spool.add_record(ts_ms, pb.Record(event=pb.Event(ts_ms=ts_ms, kind="xid", code=code)))


def drain(spool: Spool, lane: int) -> list[tuple[int, str]]:
    """(sequence, schema number or event code) of all that a lane has to send, in order."""
    found, after = [], 0
    while sent := spool.next(lane, after):
        after, message = sent.seq, pb.AgentMessage.FromString(agent_message(lane, [sent.body]))
        if lane == pb.EVENTS:
            assert message.record.seq == after
            found.append((after, message.record.event.code))
        else:
            assert (message.batch.lane, message.batch.seq) == (lane, after)
            found.append((after, str(message.batch.blocks[0].schema)))
    return found


def names(found: list[tuple[int, str]]) -> list[str]:
    return [name for _, name in found]


def test_what_goes_in_comes_out_in_order_and_is_forgotten_when_held(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for number in range(5):
        batch(spool, number)
        event(spool, f"e{number}")
    assert names(drain(spool, pb.LIVE)) == ["0", "1", "2", "3", "4"]
    assert names(drain(spool, pb.EVENTS)) == ["e0", "e1", "e2", "e3", "e4"]
    assert spool.pending()[0] == 10
    spool.ack(pb.LIVE, drain(spool, pb.LIVE)[2][0])
    spool.ack(pb.EVENTS, drain(spool, pb.EVENTS)[4][0])
    assert names(drain(spool, pb.LIVE)) == ["3", "4"]
    assert drain(spool, pb.EVENTS) == []
    assert spool.pending()[0] == 2
    spool.close()


def test_a_restart_keeps_everything_and_never_uses_a_sequence_twice(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    batch(spool, 1)
    event(spool, "79")
    given = spool.telemetry.next_seq
    spool.close()
    again = open_spool(tmp_path)
    assert again.id == spool.id
    batch(again, 2)
    sent = drain(again, pb.LIVE)
    assert names(sent) == ["1", "2"]
    assert sent[1][0] >= given
    assert names(drain(again, pb.EVENTS)) == ["79"]
    again.close()


def test_a_sequence_that_a_power_cut_took_from_the_disk_is_not_given_out_again(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for number in range(20):
        batch(spool, number)
    reported = drain(spool, pb.LIVE)[-1][0]
    spool.close()
    newest = max(tmp_path.glob("telemetry-*.seg"))
    os.truncate(newest, 0)  # nothing of it had reached the disk
    again = open_spool(tmp_path)
    batch(again, 99)
    assert drain(again, pb.LIVE)[0][0] > reported
    again.close()


def test_a_tail_cut_at_any_byte_costs_only_the_record_it_cuts(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, "events", 2**20, 2**20)
    ends = []
    for number in range(4):
        log.append(NOW, b"payload %d" % number)
        ends.append(log.segments[-1].bytes)
    log.close()
    path = max(tmp_path.glob("events-*.seg"))
    whole = path.read_bytes()
    for length in range(len(whole)):
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / path.name).write_bytes(whole[:length])
        cut = SegmentLog(folder, "events", 2**20, 2**20)
        kept = sum(end <= length for end in ends)
        after, found = 0, []
        while record := cut.after(after):
            after = record.seq
            found.append(record.payload)
        assert found == [b"payload %d" % n for n in range(kept)], length
        assert bool(cut.damaged) == (length not in (0, *ends)), length
        cut.close()


def test_a_corrupt_byte_anywhere_costs_at_most_the_record_it_is_in(tmp_path: Path) -> None:
    frames = [frame(number, NOW, b"payload %d" % number) for number in range(1, 4)]
    whole = b"".join(frames)
    bounds = [0, len(frames[0]), len(frames[0]) * 2, len(whole)]
    for at in range(len(whole)):
        folder = tmp_path / str(at)
        folder.mkdir()
        damaged = bytearray(whole)
        damaged[at] ^= 0x5A
        (folder / "events-00000000000000000001.seg").write_bytes(damaged)
        log = SegmentLog(folder, "events", 2**20, 2**20)
        hit = next(n for n in range(3) if bounds[n] <= at < bounds[n + 1]) + 1
        after, found = 0, []
        while record := log.after(after):
            after = record.seq
            found.append(record.seq)
        assert found == [n for n in (1, 2, 3) if n != hit], at
        assert log.damaged, at
        log.close()


def test_damage_is_reported(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    batch(spool, 1)
    batch(spool, 2)
    spool.close()
    path = max(p for p in tmp_path.glob("telemetry-*.seg") if p.stat().st_size)
    os.truncate(path, path.stat().st_size - 3)
    again = open_spool(tmp_path)
    losses = again.take_losses()
    assert losses is not None
    assert path.name in losses.damage[0]
    assert again.take_losses() is None
    assert names(drain(again, pb.LIVE)) == ["1"]
    again.close()


def test_over_its_size_the_oldest_telemetry_goes_before_any_event(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, max_bytes=2**20)
    for number in range(50):
        event(spool, str(number))
    for number in range(400):
        batch(spool, number, NOW + number, size=8_000)
        spool.tidy(NOW + number)
    files = sum(path.stat().st_size for path in tmp_path.glob("*.seg"))
    assert files <= 2**20 + 70_000
    left = names(drain(spool, pb.LIVE))
    assert left == [str(number) for number in range(400 - len(left), 400)]
    assert 50 < len(left) < 400
    assert len(drain(spool, pb.EVENTS)) == 50
    losses = spool.take_losses()
    assert losses is not None
    assert (losses.telemetry, losses.events) == (400 - len(left), 0)
    assert "max_bytes" in losses.reason
    spool.close()


def test_when_only_events_are_left_the_oldest_of_them_go(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, max_bytes=2**20)
    for number in range(3_000):
        spool.add_record(NOW, pb.Record(event=pb.Event(ts_ms=NOW, kind="xid", code=str(number), message="m" * 1000)))
        if number % 100 == 0:
            spool.tidy(NOW)
    spool.tidy(NOW)
    left = names(drain(spool, pb.EVENTS))
    losses = spool.take_losses()
    assert losses is not None
    assert losses.events == 3_000 - len(left) > 0
    assert left[-1] == "2999"
    spool.close()


def test_old_telemetry_goes_and_old_events_stay(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, max_age_s=3600.0)
    batch(spool, 1)
    event(spool, "79")
    later = NOW + 2 * 3_600_000
    batch(spool, 2, later)
    spool.tidy(later)  # closes the files by their age
    batch(spool, 3, later + 20 * MINUTE)
    spool.tidy(later + 70 * MINUTE)
    assert names(drain(spool, pb.LIVE)) == ["3"]
    assert names(drain(spool, pb.EVENTS)) == ["79"]
    spool.close()


def test_what_is_held_leaves_the_disk_after_its_time(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    batch(spool, 1)
    event(spool, "79")
    spool.ack(pb.LIVE, drain(spool, pb.LIVE)[-1][0])
    spool.ack(pb.EVENTS, drain(spool, pb.EVENTS)[-1][0])
    spool.tidy(NOW + 11 * MINUTE)
    spool.tidy(NOW + 22 * MINUTE)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.seg")) == 0
    assert spool.take_losses() is None
    spool.close()


def test_a_collector_that_forgot_gets_it_again(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for number in range(3):
        batch(spool, number)
    spool.welcome({}, NOW)
    spool.ack(pb.LIVE, 3)
    assert drain(spool, pb.LIVE) == []
    spool.welcome({pb.LIVE: 1}, NOW)
    assert names(drain(spool, pb.LIVE)) == ["1", "2"]
    spool.close()


def test_a_new_identity_is_kept_and_sends_all_again(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    batch(spool, 1)
    before = spool.id
    spool.new_identity()
    assert spool.id != before
    spool.welcome({}, NOW)
    assert names(drain(spool, pb.LIVE)) == ["1"]
    spool.close()
    again = open_spool(tmp_path)
    assert again.id == spool.id
    again.close()


def test_after_an_outage_the_backlog_goes_newest_first_on_its_own_lane(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for number in range(10):
        batch(spool, number, NOW - (10 - number) * MINUTE)
    batch(spool, 100, NOW - 2_000)
    spool.welcome({}, NOW)
    assert names(drain(spool, pb.LIVE)) == ["100"]
    sent = drain(spool, pb.BACKFILL)
    assert names(sent) == [str(number) for number in range(9, -1, -1)]
    assert [seq for seq, _ in sent] == sorted(seq for seq, _ in sent)
    spool.ack(pb.BACKFILL, sent[3][0])
    assert names(drain(spool, pb.BACKFILL)) == ["5", "4", "3", "2", "1", "0"]
    assert spool.pending()[0] == 7
    spool.close()


def test_the_backfill_plan_outlives_a_restart_and_a_second_outage(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for number in range(6):
        batch(spool, number, NOW - (30 - number) * MINUTE)
    spool.welcome({}, NOW)
    first = drain(spool, pb.BACKFILL)
    spool.close()
    held = first[1][0]  # 5 and 4 arrived
    again = open_spool(tmp_path)
    batch(again, 50, NOW + MINUTE)
    batch(again, 60, NOW + 20 * MINUTE)
    again.welcome({pb.BACKFILL: held}, NOW + 20 * MINUTE)
    second = drain(again, pb.BACKFILL)
    assert names(second) == ["50", "3", "2", "1", "0"]
    assert second[0][0] > first[-1][0]
    assert names(drain(again, pb.LIVE)) == ["60"]
    again.close()


def test_a_collector_that_forgot_what_was_before_the_plan_gets_it_too(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for number in range(4):
        batch(spool, number, NOW)
    spool.welcome({}, NOW)
    spool.ack(pb.LIVE, drain(spool, pb.LIVE)[1][0])
    spool.welcome(spool.held, NOW + 5 * MINUTE)
    assert names(drain(spool, pb.BACKFILL)) == ["3", "2"]
    spool.ack(pb.BACKFILL, drain(spool, pb.BACKFILL)[-1][0])
    spool.welcome({}, NOW + 5 * MINUTE)
    assert names(drain(spool, pb.BACKFILL)) == ["3", "2", "1", "0"]
    spool.close()


def test_a_short_backlog_goes_on_live(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for number in range(5):
        batch(spool, number, NOW - 50_000 + number)
    spool.welcome({}, NOW)
    assert names(drain(spool, pb.LIVE)) == ["0", "1", "2", "3", "4"]
    assert drain(spool, pb.BACKFILL) == []
    spool.close()


def test_the_plan_numbers_every_record_once() -> None:
    plan = BackfillPlan(11, ((20, 22), (5, 6)))
    assert [plan.seq_of(n) for n in (22, 21, 20, 6, 5)] == [11, 12, 13, 14, 15]
    assert plan.next_base == 16
    assert plan.after(0) == ((20, 22), (5, 6))
    assert plan.after(12) == ((20, 20), (5, 6))
    assert plan.after(13) == ((5, 6),)
    assert plan.after(15) == ()


@pytest.mark.parametrize("name", ["id", "backfill.json"])
def test_broken_identity_files_give_a_new_id_and_lose_nothing(tmp_path: Path, name: str) -> None:
    spool = open_spool(tmp_path)
    batch(spool, 1)
    spool.close()
    (tmp_path / name).write_bytes(b"\xff\xfe{")
    again = open_spool(tmp_path)
    assert again.id != spool.id
    assert names(drain(again, pb.LIVE)) == ["1"]
    again.close()


def test_one_folder_serves_one_agent(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    with pytest.raises(SpoolError, match=r"another agent uses this spool; stop it or set another spool\.dir"):
        open_spool(tmp_path)
    spool.close()
    open_spool(tmp_path).close()


def test_a_folder_that_cannot_be_used_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolError, match=r"cannot be used as the spool: .*; set spool\.dir"):
        open_spool(tmp_path / "file" / "spool")


WRITER = """
import sys
from drover_agent.config import SpoolConfig
from drover_agent.spool.spool import Spool
from drover_proto import telemetry_pb2 as pb

spool = Spool(SpoolConfig(dir=sys.argv[1]), 1_800_000_000_000)
number = 0
while True:
    spool.add_batch(1_800_000_000_000, [pb.Block(schema=number, body=b"x" * 5000)])
    spool.add_record(1_800_000_000_000, pb.Record(event=pb.Event(kind="xid", code=str(number))))
    print(number, flush=True)
    number += 1
"""


def test_a_killed_writer_loses_nothing_it_had_taken(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    taken = -1
    while taken < 2_000:  # several files
        taken = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    taken = max([taken, *(int(line) for line in writer.stdout.read().split())])
    writer.wait()
    spool = open_spool(tmp_path)
    batches, events = names(drain(spool, pb.LIVE)), names(drain(spool, pb.EVENTS))
    assert batches[: taken + 1] == [str(n) for n in range(taken + 1)]
    assert events[: taken + 1] == batches[: taken + 1]
    assert len(batches) <= taken + 2
    spool.close()


FULL_DISK = """
import resource, signal, sys
from drover_agent.config import SpoolConfig
from drover_agent.spool.spool import Spool
from drover_proto import telemetry_pb2 as pb

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
spool = Spool(SpoolConfig(dir=sys.argv[1]), 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))  # from here the disk is full
for number in range(30):
    spool.add_batch(number, [pb.Block(schema=number, body=b"x" * 3000)])
spool.add_record(0, pb.Record(event=pb.Event(kind="xid", code="79")))
spool.tidy(0)
assert spool.trouble and "too large" in spool.trouble, spool.trouble
spool.sync_events()
def live():
    after, found = 0, []
    while sent := spool.next(pb.LIVE, after):
        after = sent.seq
        found.append(pb.Batch.FromString(sent.body).blocks[0].schema)
    return found
assert live() == list(range(30)), live()
for number in range(30, 2000):
    spool.add_batch(number, [pb.Block(schema=number, body=b"x" * 3000)])
spool.tidy(0)
losses = spool.take_losses()
found = live()
assert losses.telemetry == 2000 - len(found) > 0, (losses, len(found))
assert found[-1] == 1999
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
spool.tidy(0)
assert spool.trouble is None
assert live() == found
assert pb.Record.FromString(spool.next(pb.EVENTS, 0).body).event.code == "79"
spool.close()
spool = Spool(SpoolConfig(dir=sys.argv[1]), 0)
assert live() == found, "what was kept in memory is on disk now"
spool.close()
"""


def test_a_full_disk_keeps_data_in_memory_until_there_is_room(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
