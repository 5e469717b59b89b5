"""One event for reports of two sources and many lines."""

from __future__ import annotations

from drover_agent.sources.base import NodeEvent
from drover_agent.telemetry.event_dedup import (
    HOLD_MS,
    MANY,
    MAX_FORGEABLE,
    MAX_OPEN,
    WINDOW_MS,
    EventMerger,
)
from drover_core.model.events import EventKind

T = 1_800_000_000_000
LINE = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


def line(ms: int, source: str, code: str = "79", gpu: int | None = 0, **more: object) -> NodeEvent:
    message = more.pop("message", LINE if source == "kmsg" else f"XID {code}")
    return NodeEvent(T + ms, gpu, EventKind.XID, code, str(message), source, **more)  # type: ignore[arg-type]  # flags


def reported(events: list[NodeEvent]) -> list[tuple[str, str, int]]:
    return [(e.code, e.source, e.count) for e in events]


def test_the_kernels_line_leaves_at_once_and_swallows_nvmls() -> None:
    merger = EventMerger(expect_kernel_log=True)
    assert reported(merger.offer(line(0, "kmsg"))) == [("79", "kmsg", 1)]
    assert merger.offer(line(40, "nvml")) == []
    assert merger.due(T + WINDOW_MS) == []
    assert merger.merged == 1


def test_nvmls_report_waits_a_moment_for_the_text() -> None:
    merger = EventMerger(expect_kernel_log=True)
    assert merger.offer(line(0, "nvml")) == []
    [event] = merger.offer(line(30, "kmsg"))
    assert (event.message, event.source, event.count) == (LINE, "kmsg", 1)
    assert merger.due(T + WINDOW_MS + 30) == []


def test_without_a_kernel_line_nvmls_report_leaves_alone_and_its_late_twin_is_swallowed() -> None:
    merger = EventMerger(expect_kernel_log=True)
    assert merger.offer(line(0, "nvml")) == []
    assert reported(merger.due(T + HOLD_MS)) == [("79", "nvml", 1)]
    assert merger.offer(line(3_000, "kmsg")) == []
    assert merger.due(T + 30_000) == []


def test_without_the_kernel_log_nvml_does_not_wait() -> None:
    merger = EventMerger(expect_kernel_log=False)
    assert reported(merger.offer(line(0, "nvml"))) == [("79", "nvml", 1)]


def test_a_storm_is_one_event_at_once_and_a_sum_per_window() -> None:
    merger = EventMerger(expect_kernel_log=True)
    out = []
    for number in range(1_000):
        out += merger.offer(line(number, "kmsg", "13"))
        out += merger.offer(line(number, "nvml", "13"))
    out += merger.due(T + WINDOW_MS)
    assert reported(out) == [("13", "kmsg", 1), ("13", "kmsg", 999)]
    out = [event for number in range(5) for event in merger.offer(line(WINDOW_MS + number, "kmsg", "13"))]
    assert out == []
    assert reported(merger.due(T + 2 * WINDOW_MS)) == [("13", "kmsg", 5)]
    assert merger.due(T + 3 * WINDOW_MS) == []
    assert not merger.open
    assert reported(merger.offer(line(4 * WINDOW_MS, "kmsg", "13"))) == [("13", "kmsg", 1)]


def test_a_reader_that_lags_behind_a_storm_sends_no_more_than_one_that_does_not() -> None:
    """Lines of a second come in six: their times fall ever further behind, while `due` goes by the time now."""
    merger = EventMerger(expect_kernel_log=True)
    out = []
    for number in range(2_400):
        now_ms = T + number * 25
        out += merger.offer(line(number * 4, "kmsg", "95"), now_ms)
        if number % 10 == 0:
            out += merger.due(now_ms)
    assert sum(event.count for event in [*out, *merger.flush()]) == 2_400
    assert len(out) <= 1 + 2_400 * 25 // WINDOW_MS


def test_errors_of_an_old_log_keep_their_times_apart() -> None:
    merger = EventMerger(expect_kernel_log=True)
    old = [line(-3_600_000 + number * 60_000, "kmsg", "95", backlog=True) for number in range(30)]
    out = [reported for event in old for reported in merger.offer(event, T)]
    assert [event.ts_ms for event in out] == [event.ts_ms for event in old]
    assert merger.due(T + WINDOW_MS) == []
    assert not merger.open


def test_other_codes_other_gpus_and_unknown_devices_stay_apart() -> None:
    merger = EventMerger(expect_kernel_log=True)
    events = [
        line(0, "kmsg", "79", 0),
        line(0, "kmsg", "79", 1),
        line(0, "kmsg", "48", 0),
        line(0, "kmsg", "79", None, where="0000:5e:00"),
        line(0, "kmsg", "79", None, where="0000:86:00"),
    ]
    assert sum(len(merger.offer(event)) for event in events) == len(events)


def test_a_forged_line_hides_no_real_one() -> None:
    merger = EventMerger(expect_kernel_log=True)
    assert [e.forgeable for e in merger.offer(line(0, "kmsg", forgeable=True))] == [True]
    assert [e.forgeable for e in merger.offer(line(1, "kmsg"))] == [False]


def test_a_changed_recovery_action_is_not_a_repeat() -> None:
    merger = EventMerger(expect_kernel_log=True)
    to = "recovery action changed from 0x0 (None) to 0x{0} ({1})"
    assert merger.offer(line(0, "kmsg", "154", message=to.format(1, "GPU Reset Required")))
    assert merger.offer(line(5, "kmsg", "154", message=to.format(2, "Node Reboot Required")))
    assert not merger.offer(line(9, "kmsg", "154", message=to.format(2, "Node Reboot Required")))


def test_a_clock_set_back_does_not_hold_a_sum_for_ever() -> None:
    merger = EventMerger(expect_kernel_log=False)
    merger.offer(line(0, "kmsg"))
    merger.offer(line(1, "kmsg"))
    assert reported(merger.due(T - 3_600_000)) == [("79", "kmsg", 1)]


def test_nothing_untold_is_left_at_the_end() -> None:
    merger = EventMerger(expect_kernel_log=True)
    merger.offer(line(0, "nvml", "48"))
    merger.offer(line(0, "kmsg", "79"))
    merger.offer(line(1, "kmsg", "79"))
    assert sorted(reported(merger.flush())) == [("48", "nvml", 1), ("79", "kmsg", 1)]


def test_lifecycle_events_pass() -> None:
    merger = EventMerger(expect_kernel_log=True)
    event = NodeEvent(T, 0, EventKind.LIFECYCLE, "gpu_lost", "", "nvml")
    assert merger.offer(event) == merger.offer(event) == [event]


def kernel(ms: int, code: str, where: str, **more: object) -> NodeEvent:
    return NodeEvent(T + ms, None, EventKind.KERNEL, code, f"{code} {where}", "kmsg", where=where, **more)  # type: ignore[arg-type]  # flags


def test_the_same_trouble_of_other_devices_is_reported_at_once() -> None:
    merger = EventMerger(expect_kernel_log=True)
    for where in ("0000:5e:00 Corrected", "0000:5e:00 Uncorrected (Fatal)", "0000:86:00 Corrected"):
        assert [event.message for event in merger.offer(kernel(0, "aer", where))] == [f"aer {where}"]
        assert merger.offer(kernel(1, "aer", where)) == []


def test_more_different_lines_than_are_remembered_are_summed() -> None:
    merger = EventMerger(expect_kernel_log=True)
    out = [event for number in range(MAX_OPEN + 500) for event in merger.offer(kernel(0, "disk", f"sd{number}"))]
    assert len(merger._open) == MAX_OPEN + 1
    assert [event.message for event in out[-2:]] == [f"disk sd{MAX_OPEN - 1}", f"{MANY}disk sd{MAX_OPEN}"]
    [rest] = merger.due(T + WINDOW_MS)
    assert (rest.count, rest.message) == (499, f"{MANY}disk sd{MAX_OPEN + 499}")
    assert merger.due(T + 2 * WINDOW_MS) == [] and not merger.open
    assert merger.offer(kernel(2 * WINDOW_MS, "disk", "sd1"))[0].message == "disk sd1"


def test_many_forgeable_lines_leave_room_for_the_real_ones() -> None:
    merger = EventMerger(expect_kernel_log=True)
    out = [event for number in range(500) for event in merger.offer(kernel(0, "disk", f"sd{number}", forgeable=True))]
    assert len(out) == MAX_FORGEABLE + 1
    assert merger.offer(kernel(0, "disk", "sd499"))[0].message == "disk sd499"
    merger.due(T + WINDOW_MS)
    merger.due(T + 2 * WINDOW_MS)
    again = [
        event for number in range(500) for event in merger.offer(kernel(30_000, "disk", f"x{number}", forgeable=True))
    ]
    assert len(again) == MAX_FORGEABLE + 1
