"""Every page opened for the first time while its collector is down, or is one version older and has little to show."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from streamlit.testing.v1 import AppTest

from drover_dashboard import client
from drover_dashboard.client import FleetClient
from drover_proto import fleet_pb2
from testbed.older_fleet import OLDER, older

from .test_client import Ticking
from .test_pages import opened

PAGES: list[tuple[str, dict[str, str]]] = [
    ("fleet", {}), ("incidents", {}), ("incidents", {"id": "i1"}), ("node", {}), ("node", {"node": "n1"}), ("job", {}),
    ("job", {"job": "j"}), ("fabric", {}), ("fabric", {"node": "n1"}), ("thermals", {}), ("probes", {}),
    ("probes", {"node": "n1"}), ("risk", {}), ("capacity", {}), ("policy", {}), ("system", {}),
]  # fmt: skip
IDS = [" ".join((page, *query)) for page, query in PAGES]
NEWER = ("job", "fabric", "thermals", "system", "capacity")  # pages whose question the older service did not know


class Reticent(grpc.GenericRpcHandler):
    """An older collector whose answers have nothing in them; `down`: it does not answer; `new`: it knows every
    question; `takes_ms`: how long an answer takes, by the client's clock."""

    def __init__(self) -> None:
        self.down, self.new, self.takes_ms, self.clock = False, False, 0, Ticking()

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]
        if self.down:
            return grpc.unary_unary_rpc_method_handler(
                lambda _request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "connection refused")
            )
        if name == "GetIncident":  # the one answer that is never empty: there is no such incident
            return grpc.unary_unary_rpc_method_handler(
                lambda _request, context: context.abort(grpc.StatusCode.NOT_FOUND, "no incident 'i1'")
            )
        if not self.new and name not in older():
            return None
        return grpc.unary_unary_rpc_method_handler(self._nothing)

    def _nothing(self, _request: bytes, _context: grpc.ServicerContext) -> bytes:
        self.clock.ms += self.takes_ms
        return b""


@pytest.fixture(scope="module")
def reticent() -> Iterator[Reticent]:
    handler = Reticent()
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    handler.address = f"127.0.0.1:{port}"  # type: ignore[attr-defined]  # for the client below
    yield handler
    server.stop(None).wait()


@pytest.fixture
def asked(reticent: Reticent) -> Iterator[Reticent]:
    """The process' client, which has received nothing yet."""
    made = FleetClient(reticent.address)  # type: ignore[attr-defined]  # see above
    client.share(made)
    yield reticent
    made.close()


@pytest.mark.parametrize(("page", "query"), PAGES, ids=IDS)
def test_without_a_collector_every_page_says_why(asked: Reticent, page: str, query: dict[str, str]) -> None:
    asked.down = True
    texts = " ".join(text.value for text in opened(page, **query).text)
    assert "has not answered since" in texts
    assert "(connection refused): is drover-collector running?" in texts


@pytest.mark.parametrize(("page", "query"), PAGES, ids=IDS)
def test_a_collector_one_version_older_breaks_no_page(asked: Reticent, page: str, query: dict[str, str]) -> None:
    asked.down = False
    texts = " ".join(text.value for text in opened(page, **query).text)
    assert ("has not known a question of this page since" in texts) == (page in NEWER)
    assert ("run both at one version" in texts) == (page in NEWER)


def said(app: AppTest) -> str:
    return " ".join(text.value for text in app.text)


@pytest.mark.parametrize(
    ("page", "query"), [(page, {"node": "n1"} if page == "node" else {}) for page in dict.fromkeys(p for p, _ in PAGES)]
)
def test_an_open_page_says_what_is_wrong_keeps_what_it_shows_and_recovers(
    reticent: Reticent, page: str, query: dict[str, str]
) -> None:
    clock = reticent.clock
    made = FleetClient(reticent.address, now_ms=clock)  # type: ignore[attr-defined]  # see above
    client.share(made)
    reticent.down, reticent.new, reticent.takes_ms = False, True, 0
    app = opened(page, **query)

    def later() -> str:
        clock.ms += 16_000  # so long no part of a page waits until it refreshes itself, but one
        app.run()
        assert not app.exception
        return said(app)

    assert "since" not in later()
    reticent.takes_ms = 2_500
    assert "has answered slowly since" in later()
    reticent.takes_ms = 0
    assert "since" not in later()
    reticent.down = True
    shown = later()
    assert "has not answered since" in shown
    assert "Shown is the last answer, of" in shown
    reticent.down = False
    assert "since" not in later()
    reticent.new = False
    made.close()


def test_the_contract_only_grows() -> None:
    """A console and a collector of neighbouring versions understand each other: no number has got another meaning."""
    assert (OLDER / "fleet.proto").exists()
    for answer in older().values():
        for message in _messages(answer.DESCRIPTOR, {}).values():
            now = fleet_pb2.DESCRIPTOR.message_types_by_name[message.name]
            for field in message.fields:
                found = now.fields_by_number.get(field.number)
                assert found is not None, f"{message.name}.{field.name} is gone"
                assert (found.name, found.type, found.is_repeated) == (field.name, field.type, field.is_repeated)


def _messages(found: Any, known: dict[str, Any]) -> dict[str, Any]:
    """`found` and all messages that it is made of, by name; not the entries of maps."""
    if found.name in known or found.GetOptions().map_entry:
        return known
    known[found.name] = found
    for field in found.fields:
        if field.message_type is not None:
            _messages(field.message_type, known)
    return known
