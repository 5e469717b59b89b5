"""The table of REST: the address of each method of the Fleet API.

A method of drover_proto/fleet_methods.py that has neither an address here nor a reason in LEFT_OUT is refused on
import. Roles, deadlines and functions are those of the method.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drover_proto import fleet_methods as wire
from drover_proto.fleet_methods import FleetMethod

ROOT = "/api/v1"
STREAM = f"{ROOT}/incidents/stream"
ANNOTATIONS = f"{ROOT}/annotations"
DOCUMENT = f"{ROOT}/openapi.json"
WRITES = "/api/v1/write"  # Prometheus remote_write, as other receivers of it have it
OTLP = "/v1/metrics"  # the path that OTLP/HTTP has for metrics


@dataclass(frozen=True, slots=True)
class Paging:
    """How a list is cut into pages.

    Attributes:
        items: the reply's field. key: fields that lead to what identifies an item, such as ("order", "id").
        most: items that the method gives at most. Pages end there.
        whole: all are fetched for each page, as the method counts its limit from the other end, or has none.
        keyed: maps of the reply with an entry for items, by their key.
    """

    items: str
    key: tuple[str, ...]
    most: int
    whole: bool = False
    keyed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """The address of a method. Fields of its request that the path does not name are parameters or the body."""

    method: FleetMethod[Any, Any]
    verb: str
    path: str  # below ROOT
    tag: str
    paging: Paging | None = None

    @property
    def operation(self) -> str:
        """Return the name of the operation: `list_incidents`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.method.name).lower()

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(re.findall(r"\{(\w+)\}", self.path))

    @property
    def acts(self) -> bool:
        return self.verb == "POST"


LEFT_OUT: Mapping[str, str] = {
    "Export": "a stream of Arrow files: `drover export`",
    "GetPlayback": "packed bytes for the console's browser; other addresses take `at`",
    "Backup": "it runs for hours on the collector's machine: `drover backup`",
}

ROUTES = (
    Route(wire.GET_STATUS, "GET", "/status", "fleet"),
    Route(wire.GET_LAYOUT, "GET", "/layout", "fleet"),
    Route(wire.GET_PICTURE, "GET", "/picture", "fleet"),
    Route(wire.GET_TREND, "GET", "/trend", "reports"),
    Route(wire.LIST_CHANGES, "GET", "/changes", "fleet"),
    Route(wire.LIST_RISK, "GET", "/risk", "fleet", Paging("nodes", ("node",), 20_000)),
    Route(wire.GET_SYSTEM, "GET", "/system", "fleet"),
    Route(wire.LIST_REPORTING, "GET", "/reporting", "fleet", Paging("nodes", ("name",), 1_000_000, whole=True)),
    Route(wire.SEARCH, "GET", "/search", "fleet"),
    Route(wire.LIST_NODES, "GET", "/nodes", "nodes", Paging("nodes", ("name",), 10_000)),
    Route(wire.GET_NODE, "GET", "/nodes/{node}", "nodes"),
    Route(wire.PREVIEW_ACT, "GET", "/nodes/{node}/actions/preview", "actions"),
    Route(wire.ACT_ON_NODE, "POST", "/nodes/{node}/actions", "actions"),
    Route(wire.ADOPT_NODE, "POST", "/nodes/{node}/adoption", "nodes"),
    Route(wire.LIST_ACTIONS, "GET", "/actions", "actions", Paging("actions", ("id",), 10_000, whole=True)),
    Route(
        wire.LIST_INCIDENTS,
        "GET",
        "/incidents",
        "incidents",
        Paging("incidents", ("id",), 10_000, keyed=("silences", "handling")),
    ),
    Route(wire.GET_INCIDENT, "GET", "/incidents/{id}", "incidents"),
    Route(wire.NOTE_INCIDENT, "POST", "/incidents/{id}/notes", "incidents"),
    Route(wire.LIST_SIMILAR, "GET", "/incidents/{id}/similar", "incidents"),
    Route(wire.LIST_EVENTS, "GET", "/events", "incidents", Paging("events", ("id",), 10_000)),
    Route(wire.QUERY_SERIES, "GET", "/series", "series"),
    Route(wire.LIST_DECISIONS, "GET", "/decisions", "decisions", Paging("decisions", ("id",), 10_000)),
    Route(wire.APPROVE_DECISION, "POST", "/decisions/{decision}/approve", "decisions"),
    Route(wire.REJECT_DECISION, "POST", "/decisions/{decision}/reject", "decisions"),
    Route(wire.GET_POLICY, "GET", "/policy", "decisions"),
    Route(wire.BACKTEST_POLICIES, "GET", "/policy/backtest", "decisions"),
    Route(wire.LIST_AUDIT, "GET", "/audit", "decisions", Paging("audit", ("id",), 10_000)),
    Route(wire.LIST_JOBS, "GET", "/jobs", "jobs", Paging("jobs", ("job",), 5_000)),
    Route(wire.GET_JOB, "GET", "/jobs/{job}", "jobs"),
    Route(wire.GET_FABRIC, "GET", "/fabric", "fleet", Paging("leafs", ("name",), 5_000)),
    Route(wire.GET_THERMALS, "GET", "/thermals", "fleet"),
    Route(wire.GET_CAPACITY, "GET", "/capacity", "reports"),
    Route(wire.GET_LEDGER, "GET", "/ledger", "reports"),
    Route(wire.LIST_PROBES, "GET", "/probes", "probes"),
    Route(wire.PROBE_HISTORY, "GET", "/probes/history", "probes"),
    Route(wire.LIST_PROBE_ORDERS, "GET", "/probes/orders", "probes", Paging("orders", ("order", "id"), 1_000)),
    Route(wire.REQUEST_PROBE, "POST", "/probes/orders", "probes"),
    Route(wire.LIST_SILENCES, "GET", "/silences", "silences", Paging("silences", ("id",), 10_000)),
    Route(wire.CREATE_SILENCE, "POST", "/silences", "silences"),
    Route(wire.END_SILENCE, "POST", "/silences/{id}/end", "silences"),
    Route(wire.REPORT_MAINTENANCE, "POST", "/maintenance", "silences"),
)


def _compare_with_methods() -> None:
    """
    Raises:
        TypeError: a method has no address and no reason, or two addresses; or one that acts can be called by GET.
    """
    named = [route.method.name for route in ROUTES]
    missing = wire.METHODS.keys() - set(named) - LEFT_OUT.keys()
    if missing or len(set(named)) < len(named) or set(named) & LEFT_OUT.keys():
        raise TypeError(f"rest/routes.py lacks or repeats methods: {', '.join(sorted(missing)) or named}")
    if wrong := [route.method.name for route in ROUTES if route.method.acts != route.acts]:
        raise TypeError(f"rest/routes.py: what acts is a POST, and nothing else: {', '.join(wrong)}")


_compare_with_methods()
_PATTERNS = [
    (route, re.compile(re.escape(ROOT) + re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", re.escape(route.path))))
    for route in sorted(ROUTES, key=lambda route: len(route.variables))  # /incidents/stream before /incidents/{id}
]


def find(path: str) -> list[tuple[Route, dict[str, str]]]:
    """Return the routes of a path, one for each verb, each with what the path says, still quoted."""
    found = [(route, match.groupdict()) for route, pattern in _PATTERNS if (match := pattern.fullmatch(path))]
    return [each for each in found if len(each[0].variables) == len(found[0][0].variables)]
