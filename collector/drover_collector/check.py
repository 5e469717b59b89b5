"""Check settings, fleet, policy and the store's folder for `drover-collector check`. Opens and starts nothing."""

from __future__ import annotations

import time
from pathlib import Path

from drover_collector.app import check_disk
from drover_collector.auth.tls import server_tls
from drover_collector.config import CollectorConfig
from drover_collector.notify.factory import notifiers
from drover_collector.policy.policy import Policy
from drover_collector.store import KEEP_FREE_BYTES, StoreFolderState, folder_state
from drover_core import x509
from drover_core.model.fleet import FleetSpec
from drover_core.times import iso

CLOCK_AHEAD_S, CLOCK_BACK_S = 7 * 86_400, 3600  # between the clock and the store's last write: a larger gap is reported


def check(path: Path | None, config: CollectorConfig, spec: FleetSpec, policy: Policy) -> int:
    """Print what was found. Return the exit code.

    Raises:
        SettingsError: certificates, receivers or room that cannot be used. StoreError: an invalid store.url, or a
            folder that cannot hold a store.
    """
    receivers = ", ".join(f"{n.name} ({n.kind})" for n in notifiers(config.notify, config.webhooks, spec)) or "nobody"
    met = folder_state(config.store.url, config.store.cluster)
    check_disk(config.store, None if met is None else met.disk)
    tls = server_tls(config.tls)
    until = f", certificate until {x509.format_time(tls.own.ends_s)}" if tls is not None else ""
    counted = f"{_plural(len(spec.nodes), 'node')}, {_plural(spec.gpu_count, 'GPU')}"
    print(f"{path or 'defaults'}: good; {counted}, {policy.name}{until}; notifies {receivers}")
    for remark in _remarks(met):
        print(f"but {remark}")
    return 2 if tls is not None and tls.own.ended(time.time()) else 0


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _remarks(met: StoreFolderState | None) -> list[str]:
    """Return what about the store would keep a collector from running or storing now, though the settings are right."""
    if met is None:
        return ["whether the ClickHouse server of store.url answers shows at the start"]
    remarks = []
    if met.holder:
        remarks.append(f"the store is open in process {met.holder}: another collector starts when that has stopped")
    if met.disk[0] < KEEP_FREE_BYTES:
        free, least = met.disk[0] >> 20, KEEP_FREE_BYTES >> 20
        remarks.append(f"only {free} MB are free on the store's disk, and below {least} nothing is stored: make room")
    return remarks + _clock_remark(met.written_s, time.time())


def _clock_remark(written_s: float | None, now_s: float) -> list[str]:
    """Return a sentence if this machine's clock looks wrong by the store's last write."""
    if written_s is None or -CLOCK_BACK_S <= now_s - written_s <= CLOCK_AHEAD_S:
        return []
    days = abs(now_s - written_s) / 86_400
    when = f"{days:.0f} days ago" if now_s > written_s else f"{days:.1f} days from now"
    return [
        f"by this machine's clock the store was last written {when}, at {iso(round(written_s * 1000))}: if that is"
        " wrong, set the clock (timedatectl)"
    ]
