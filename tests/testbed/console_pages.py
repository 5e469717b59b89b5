"""The pages of the console, each by a link that says more than its name, and how one of its filters is used."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from testbed.console import RED


class Look(NamedTuple):
    """A page from a link that says more than its name. `seen`: what is then on it; `change` uses a filter, after which
    the address has `in_address` and the page `after`."""

    link: str
    seen: tuple[str, ...]
    change: Callable[[Any], None] | None = None
    in_address: str = ""
    after: str | re.Pattern[str] = ""


def press(text: str) -> Callable[[Any], None]:
    return lambda page: page.get_by_role("radio", name=text, exact=True).click()


def pick(label: str, option: str) -> Callable[[Any], None]:
    """As with the keyboard: some of the option is typed, as the list is long."""

    def picked(page: Any) -> None:
        page.get_by_role("combobox", name=label).fill(option)
        page.get_by_role("option", name=option, exact=True).click()

    return picked


# In this order, so that the fleet has time to report and the faults to be found.
PAGES = {
    "probes": Look(
        "probes?figure=hbm_copy&node=r32n04&gpu=5", ("hbm_copy, GB/s", "Between its GPUs, GB/s", "History: hbm_copy"),
        pick("Figure", "gemm_fp8, TFLOP/s"), "figure=gemm_fp8.*node=r32n04", "gemm_fp8, TFLOP/s",
    ),
    "policy": Look("policy", ("The guard holds nothing back.", "approve: actions wait for a person", "Breaker")),
    "silences": Look(
        "silences?state=ended+too", ("Maintenance windows", "Mute notifications only"), press("now and to come"),
        r"/silences$", "No silence is in force or to come.",
    ),
    "audit": Look("audit?by=Drover+too", ("in force from this start on",), press("people"), r"/audit$", "last 7 days"),
    "risk": Look("risk", ("A ranking, not a prophecy", "this ranking", "no ranking")),
    "system": Look("system", ("Connected now", "Detector", "Store")),
    "capacity": Look(
        "capacity?span=30+days",
        ("GPUs of each pool, now", "2.5 EUR a GPU-hour", "Free GPUs under each leaf", "in the last 30 days"),
        press("1 day"), r"span=1\+day", "in the last 1 day",
    ),
    "node": Look(
        f"node?node={RED[0]}&gpu={RED[1]}&span=1+h", ("last report", "Inventory", "Events"),
        pick("Time of the charts", "6 h"), rf"node={RED[0]}.*span=6\+h", "last report",
    ),
    "fleet": Look(
        "?color=gpu_temp_c&group=leaf", ("Held, idle", "newest sample", "°C"),
        pick("Colour every GPU by", "Power"), "color=power_w", re.compile(r"^\d+ W$"),
    ),
    "thermals": Look(
        "thermals?by=hottest&rack=r02", ("Nodes of rack r02", "r02n08"),
        press("Inlet"), r"thermals\?rack=r02", "r02n08",
    ),
    "fabric": Look(
        "fabric?leaf=leaf02", ("Ports of leaf02",), pick("Node", "r03n01"), "node=r03n01", "Ports of r03n01"
    ),
    "job": Look("job?state=ended+too", ("GPU-hours waited", "Waits"), press("running"), r"/job$", "Waits"),
    "ledger": Look(
        "capacity?show=ledger&span=1+day", ("GPU-hours that jobs held", "By job"), press("7 days"),
        r"/capacity\?show=ledger$", "By job",
    ),
    "incidents": Look(
        "incidents?state=all&severity=warning", ("What to do: ", "Timeline"), press("open"), r"severity=warning",
        "What to do: ",
    ),
}  # fmt: skip
