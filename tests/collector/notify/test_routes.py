"""Who is notified of an incident, and what is wrong with routes, in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drover_collector.config import load_config
from drover_collector.notify.routes import RouteConfig, Routes, validate_places
from drover_core.model.events import Incident, IncidentKind, Severity
from drover_core.model.fleet import FleetSpec, NodeSpec
from drover_core.settings import SettingsError
from testbed.outboxes import Listener, fault

NODES = (
    NodeSpec("n-train", pool="train", sku="H100-SXM"), NodeSpec("n-lab", pool="lab", sku="A100"), NodeSpec("n-bare"),
)  # fmt: skip
PLACES = FleetSpec(NODES).by_name
RECEIVERS = (Listener("chat"), Listener("page", Severity.CRITICAL), Listener("log", Severity.INFO))


def at(node: str, severity: Severity = Severity.WARNING, **more: Any) -> Incident:
    return replace(fault(severity=severity), node=node, members=((node, 0),), **more)


def receivers_of(incident: Incident, *routes: RouteConfig) -> tuple[str, ...]:
    return Routes(RECEIVERS, routes, PLACES).receivers(incident)


@pytest.mark.parametrize(
    ("severity", "receivers"),
    [(Severity.INFO, ("log",)), (Severity.WARNING, ("chat", "log")), (Severity.CRITICAL, ("chat", "page", "log"))],
)
def test_without_routes_each_is_notified_from_its_severity_on(severity: Severity, receivers: tuple[str, ...]) -> None:
    assert receivers_of(at("n-train", severity)) == receivers


@pytest.mark.parametrize(
    ("route", "fits"),
    [
        (RouteConfig(("log",), severity=("warning",)), True),
        (RouteConfig(("log",), severity=("critical", "info")), False),
        (RouteConfig(("log",), kind=("xid", "link")), True),
        (RouteConfig(("log",), kind=("link",)), False),
        (RouteConfig(("log",), scope=("gpu",)), True),
        (RouteConfig(("log",), scope=("node",)), False),
        (RouteConfig(("log",), pool=("train",)), True),
        (RouteConfig(("log",), pool=("lab",)), False),
        (RouteConfig(("log",), sku=("H100-SXM",)), True),
        (RouteConfig(("log",), pool=("train",), sku=("A100",)), False),
    ],
)
def test_a_route_matches_by_all_its_keys(route: RouteConfig, fits: bool) -> None:
    nobody = RouteConfig(())
    assert receivers_of(at("n-train"), route, nobody) == (("log",) if fits else ())


def test_the_first_that_matches_decides_unless_it_goes_on() -> None:
    first, second = RouteConfig(("page", "chat"), severity=("warning",)), RouteConfig(("log",))
    assert receivers_of(at("n-lab"), first, second) == ("page", "chat")
    assert receivers_of(at("n-lab"), replace(first, continue_=True), second) == ("page", "chat", "log")
    assert receivers_of(at("n-lab"), replace(first, continue_=True), RouteConfig(("chat",), repeat_h=4)) == (
        "page",
        "chat",
    )


def test_a_gap_between_routes_hides_nothing() -> None:
    assert receivers_of(at("n-bare"), RouteConfig(("page",), pool=("lab",))) == ("chat", "log")


def test_a_route_that_names_no_severity_leaves_it_to_its_receivers() -> None:
    route = RouteConfig(("chat", "page", "log"))
    assert receivers_of(at("n-lab", Severity.INFO), route) == ("log",)
    assert receivers_of(at("n-lab", Severity.INFO), replace(route, severity=("info",))) == ("chat", "page", "log")


def test_an_incident_of_two_pools_is_of_both() -> None:
    both = replace(at("n-train"), scope="job", node=None, members=(("n-train", 0), ("n-lab", 1)))
    assert receivers_of(both, RouteConfig(("page",), pool=("lab",), severity=("warning",))) == ("page",)


def test_how_one_is_notified_is_said_by_the_first_route_that_names_it() -> None:
    first = RouteConfig(("chat",), continue_=True, repeat_h=2, group=False)
    targets = Routes(RECEIVERS, [first, RouteConfig(("chat", "log"))], PLACES).targets(at("n-lab"))
    assert (targets["chat"].repeat_ms, targets["chat"].group) == (7_200_000, False)
    assert (targets["log"].repeat_ms, targets["log"].group) == (None, True)


WEBHOOKS = '[[notify.webhook]]\nname = "ops"\nurl = "http://x"\nsecret_env = "S"\n'
SECRET = {"S": "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="}


def loaded(folder: Path, routes: str) -> Any:
    path = folder / "collector.toml"
    path.write_text(WEBHOOKS + routes)
    return load_config(path, SECRET)


@pytest.mark.parametrize(
    ("routes", "line", "says"),
    [
        ('[[notify.route]]\nreceivers = ["opps"]', 6, "'opps' is not a configured receiver; there are ops"),
        ('[[notify.route]]\nreceivers = ["ops"]\nkind = ["heat"]', 7, "kind: 'heat' is not one of straggler, "),
        ('[[notify.route]]\nreceivers = ["ops"]\nseverity = ["bad"]', 7, "'bad' is not one of info, warning, critical"),
        ('[[notify.route]]\nreceivers = ["ops"]\nscope = ["pod"]', 7, "'pod' is not one of gpu, node, rack"),
        ('[[notify.route]]\nreceivers = ["ops"]\ncontinues = true', 7, "did you mean notify.route[0].continue?"),
        ('[[notify.route]]\nkind = ["xid"]', 5, "notify.route[0].receivers: missing"),
        ('[[notify.route]]\nreceivers = ["ops"]\nrepeat_h = -1', 7, "must be from 0 to 720"),
        (
            '[[notify.route]]\nreceivers = ["ops"]\nkind = ["xid", "link"]\n'
            '[[notify.route]]\nreceivers = ["ops"]\nkind = ["link"]\npool = ["lab"]',
            8, "notify.route[1]: nothing reaches it: notify.route[0] matches the same",
        ),
        ("[[notify.route]]\nreceivers = []", 5, "matches everything, and no route names 'ops', which is never"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_routes_is_reported_with_its_line(tmp_path: Path, routes: str, line: int, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        loaded(tmp_path, routes)
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'collector.toml'}:{line}: ")


def test_routes_that_are_good(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        '[[notify.route]]\nreceivers = ["ops"]\nkind = ["xid"]\ncontinue = true\n'
        '[[notify.route]]\nreceivers = []\nkind = ["xid"]\n[[notify.route]]\nreceivers = ["ops"]',
    )
    assert [(r.receivers, r.kind, r.continue_) for r in config.notify.route] == [
        (("ops",), (IncidentKind.XID,), True), ((), (IncidentKind.XID,), False), (("ops",), (), False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("route", "says"),
    [
        (RouteConfig(("ops",), pool=("trian",)), "route[0].pool: 'trian' is not in the fleet file; it has lab, train"),
        (RouteConfig(("ops",), sku=("H200",)), "route[0].sku: 'H200' is not in the fleet file; it has A100, H100-SXM"),
    ],
)
def test_a_place_that_the_fleet_does_not_have(route: RouteConfig, says: str) -> None:
    validate_places([RouteConfig(("ops",), pool=("lab",), sku=("A100",))], FleetSpec(NODES))
    with pytest.raises(SettingsError) as caught:
        validate_places([route], FleetSpec(NODES))
    assert says in str(caught.value)
