"""Key updates of TLS 1.3 that do not end: OpenSSL takes them within one read."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from drover_collector.auth.tls import ServerTls
from drover_collector.grpc_h2 import stalled_read
from testbed.certificates import Fleet
from testbed.grpc_server import WAIT_S, Echo, serving
from testbed.key_updates import NAME, Flood
from testbed.loop import in_loop
from testbed.waiting import until

MANY = 20_000  # half a second of the event loop's; endless ones would have it for ever


@pytest.mark.skipif(NAME is None, reason="no OpenSSL apart from Python's")
@in_loop
async def test_a_read_that_takes_key_updates_without_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stalled_read, "CHECK_S", 0.02)
    monkeypatch.setattr(stalled_read, "STALLED_S", 0.005)
    fleet = Fleet(tmp_path / "ca")
    tls = ServerTls(*fleet.issue("collector", "c1").paths)
    async with serving(Echo(), tls) as (served, port):
        flood = await asyncio.to_thread(Flood, port, fleet.issue("agent", "n0"))
        try:
            assert served._pollers.open is not None
            await until(lambda: served._pollers.open.links, "it is through with its handshake")
            with caplog.at_level(logging.WARNING):
                await asyncio.wait_for(asyncio.to_thread(flood.send, MANY), 3 * WAIT_S)
                await until(lambda: not served._pollers.open.links, "it is ended")
            assert "key updates" in caplog.text
        finally:
            flood.close()


def test_what_is_read_at_once_is_left_alone() -> None:
    """However slow the machine: what counts is the event loop's own CPU within one read."""
    cut: list[str] = []

    class One:
        def shut_down(self) -> None:
            cut.append("cut")

    watch = stalled_read.StalledReadWatchdog()
    link = One()
    watch.reading = (link,)  # type: ignore[assignment]  # as much of a link as is asked for
    watch.check(10.0)
    watch.check(10.0 + stalled_read.STALLED_S / 2)  # the same one still, as of a loop that is not given the processor
    watch.reading = (link,)  # type: ignore[assignment]  # another read
    watch.check(99.0)
    watch.reading = None
    watch.check(999.0)
    assert cut == []
    watch.reading = (link,)  # type: ignore[assignment]  # the same
    watch.check(1000.0)
    watch.check(1000.0 + stalled_read.STALLED_S)
    assert cut == ["cut"]
