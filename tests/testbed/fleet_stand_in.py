"""A client of the Fleet API for tests of commands: answers without a collector."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from drover_cli import client
from drover_proto.fleet_methods import FleetMethod


class FleetStandIn:
    """Answers a call by its own method of the same name as in fleet.proto; a test derives from it."""

    def call(self, method: FleetMethod[Any, Any], request: Any, deadline_s: float = client.DEADLINE_S) -> Any:
        assert isinstance(request, method.request)
        assert deadline_s > 0
        return getattr(self, method.name)(request)

    stream = call

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let every command reach this instead of a collector."""
        monkeypatch.setattr(client, "connect", lambda _: contextlib.nullcontext(self))
