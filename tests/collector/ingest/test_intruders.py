"""Intruders that no other file has: connections held open, SQL in names, a webhook sent again, what listens.

docs/evidence/intruders.md has the whole table, with the test of each row.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook as Verifier
from standardwebhooks.webhooks import WebhookVerificationError

from drover_collector.config import CollectorConfig, is_loopback, load_config
from drover_collector.notify import Webhook
from drover_collector.notify.base import ReceiverOptions
from drover_collector.store import Store
from drover_core.model.events import Event, EventKind, Severity
from drover_core.settings import SettingsError
from drover_dashboard.main import _parser as console_options
from testbed.fleets import T0, hello, index_of, node_row
from testbed.ingest import EVENTS, Collector, event
from testbed.loop import in_loop
from testbed.notified import body as message
from testbed.receivers import HttpReceiver, http_receiver

SQL = ("n0'; DROP TABLE events; --", 'n0" OR ""="', "n0\\' OR 1=1 --", "{n:String}", "n%", "n_")
IDLE = 200


# ---- oversized and slow


@in_loop
async def test_connections_that_say_nothing_or_a_byte_now_and_then_hold_up_nobody(store: Store) -> None:
    async with Collector(store) as collector:
        held = []
        try:
            for number in range(IDLE):
                connection = socket.create_connection(("127.0.0.1", collector.port))
                if number % 2:
                    connection.sendall(b"PRI * HTTP/2.0\r\n"[: number % 16])
                held.append(connection)
            async with collector.agent(hello("n0")) as agent:
                await agent.send(record=event(1))
                for connection in held[1::2]:
                    connection.sendall(b"\r")
                await agent.until_held(EVENTS, 1)
            assert collector.ingest.stats.waiting_bytes == 0
        finally:
            for connection in held:
                connection.close()


# ---- SQL


@pytest.mark.parametrize("name", SQL)
def test_sql_in_a_name_is_a_name(store: Store, name: str) -> None:
    """Written unchanged, read by that name alone, and nothing else changes; also where a question has it."""
    event = Event("n/s/1", T0, name, 0, EventKind.XID, "79", f"text of {name}", "kmsg", received_ms=T0)
    other = dataclasses.replace(event, id="n/s/2", node="n1", message="another")
    store.events.write([event, other])
    everything = (T0 - 1, T0 + 1)
    assert [e.message for e in store.events.read(*everything, node=name)] == [f"text of {name}"]
    assert {e.node for e in store.events.read(*everything)} == {name, "n1"}
    assert [e.message for e in store.events.read(*everything, node="n1")] == ["another"]


@pytest.mark.parametrize("name", [name for name in SQL if " " in name])
@in_loop
async def test_a_hello_with_sql_for_a_name_is_refused(store: Store, name: str) -> None:
    message = hello()
    message.node = name
    async with Collector(store) as collector, collector.agent() as agent:
        await agent.send(hello=message)
        await agent.ended()
        assert collector.ingest.stats.last_seen == {}
        store.entities.write([node_row(0)])
        assert store.entities.last_seen(index_of(1)) is not None, "the tables are there"


# ---- webhooks


@pytest.fixture
def receiver() -> Iterator[HttpReceiver]:
    with http_receiver() as made:
        yield made


def test_a_webhook_sent_again_or_forged_is_refused_by_its_receiver(receiver: HttpReceiver) -> None:
    """What a receiver does that follows Standard Webhooks: its own library, with the same key."""
    key = b"k" * 32
    now_ms = time.time_ns() // 1_000_000
    sender = Webhook(ReceiverOptions("ops", Severity.INFO, 5.0), receiver.url, key)
    assert sender.deliver("msg_1", message(), now_ms).delivered
    assert sender.deliver("msg_2", message(), now_ms - 6 * 60_000).delivered
    taken, old = receiver.got
    verifier = Verifier(key)
    headers = dict(taken.headers)
    assert verifier.verify(taken.body, headers)
    with pytest.raises(WebhookVerificationError, match="too old"):
        verifier.verify(old.body, dict(old.headers))
    forgeries: dict[str, tuple[bytes, dict[str, str]]] = {
        "another body": (taken.body.replace(b"{", b"{ ", 1), headers),
        "another id, so that it counts as new": (taken.body, headers | {"webhook-id": "msg_9"}),
        "a fresh time": (taken.body, headers | {"webhook-timestamp": str(now_ms // 1000 + 60)}),
    }
    for what, (body, signature) in forgeries.items():
        with pytest.raises(WebhookVerificationError, match="No matching signature"):
            pytest.fail(f"{what}: {verifier.verify(body, signature)}")
    with pytest.raises(WebhookVerificationError, match="No matching signature"):
        Verifier(b"x" * 32).verify(taken.body, headers)


# ---- what listens


def listeners(config: Any, at: str = "") -> dict[str, str]:
    """Every setting called `listen`, by its name."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= listeners(value, f"{at}{field.name}.")
        elif field.name == "listen":
            found[f"{at}{field.name}"] = value
    return found


def test_nothing_listens_on_other_than_loopback_unless_set() -> None:
    found = listeners(CollectorConfig())
    assert set(found) == {"ingest.listen", "api.listen", "metrics.listen", "rest.listen"}
    assert all(address == "" or is_loopback(address) for address in found.values())
    assert console_options().parse_args([]).address == "127.0.0.1"


@pytest.mark.parametrize("name", ["ingest", "api", "metrics"])
def test_and_where_it_is_set_it_wants_certificates(tmp_path: Path, name: str) -> None:
    path = tmp_path / "collector.toml"
    path.write_text(f'[{name}]\nlisten = "0.0.0.0:7399"\n')
    with pytest.raises(SettingsError, match=f"{name}.listen: 0.0.0.0:7399 can be reached from other machines"):
        load_config(path)


def test_a_name_is_not_taken_for_loopback() -> None:
    assert not is_loopback("collector.example:7301")
    assert is_loopback("localhost:7301")
