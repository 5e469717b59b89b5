"""What a collector reports of itself when all is well."""

from __future__ import annotations

from drover_core import VERSION
from drover_proto import fleet_pb2 as pb

NOW_MS = 1_790_000_000_000


def well() -> pb.System:
    return pb.System(
        version=VERSION, ts_ms=NOW_MS, started_ms=NOW_MS - 3_600_000, certificate_ends_ms=NOW_MS + 80 * 86_400_000,
        agents=pb.AgentsState(
            expected=10, reporting=10, connected=10, lag_median_s=3, lag_max_s=6,
            versions=[pb.AgentVersion(version=VERSION, nodes=10)],
        ),
        detection=pb.DetectionState(role="active", newest_tick_ms=NOW_MS - 17_000, tick_s=0.2, interval_s=10),
        store=pb.StoreState(answers=True, bytes=10**9, days_left=400),
        notifiers=[pb.NotifierState(name="ops", kind="webhook", delivered=3)],
    )  # fmt: skip
