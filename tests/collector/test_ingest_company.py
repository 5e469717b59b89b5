"""How long telemetry waits for company: little of it longer, but not past the read of a bucket."""

import pytest

from drover_collector.ingest_limits import Limits
from drover_collector.ingest_writers import LITTLE_BYTES, LITTLE_TIMES, PARTS, enough
from drover_collector.store.marks import SLACK_MS

LIMITS = Limits(flush_s=1.0)
STEP_S = LIMITS.flush_s / PARTS


@pytest.mark.parametrize(
    ("size", "waits_s"), [(10, 3.0), (LITTLE_BYTES - 1, 3.0), (LITTLE_BYTES, 1.0)], ids=["one", "little", "much"]
)
def test_little_waits_three_times_as_long(size: int, waits_s: float) -> None:
    """Far from a read."""
    assert stored_after_s(size, 9.0) == pytest.approx(waits_s)


@pytest.mark.parametrize("shared", [False, True], ids=["embedded", "server"])
@pytest.mark.parametrize("reads_in_s", [round(0.1 * n, 1) for n in range(1, 100)])
def test_what_came_a_second_before_a_read_is_stored_by_then(reads_in_s: float, shared: bool) -> None:
    """A wait that began `reads_in_s` before it. What came in the last second may miss it, as it always might; of a
    server, what is stored within its slack."""
    ends_s, slack_s = stored_after_s(10, reads_in_s, shared), SLACK_MS / 1000 if shared else 0.0
    assert ends_s <= reads_in_s - slack_s or ends_s == pytest.approx(LIMITS.flush_s) or reads_in_s < LIMITS.flush_s


def stored_after_s(size: int, reads_in_s: float, shared: bool = False) -> float:
    for part in range(1, PARTS * LITTLE_TIMES):
        if enough(part, size, (reads_in_s - part * STEP_S) % 10, shared, LIMITS):
            return part * STEP_S
    return PARTS * LITTLE_TIMES * STEP_S
