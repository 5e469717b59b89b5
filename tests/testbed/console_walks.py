"""What a person does in the console to get an answer, step by step, with what must be seen on the way: by the tests of
a small fleet (tests/e2e) and by those of 256 nodes (tests/console)."""

from __future__ import annotations

import re

from drover_core.model.events import Incident
from drover_core.model.incident_title import incident_title
from testbed.browsing import SCREEN, Tab

DRAWN_PX = 12  # between a line above the picture and the next


def stable_summary(incident: Incident) -> str:
    """Return what stays of an incident's summary while it is open. The rest is its newest values: they change between
    the moment in which a test asks the collector and the one in which the page is drawn."""
    return incident.summary.partition(":")[0]


def red_gpu(tab: Tab, wanted: Incident, gpus: int, name: str) -> None:
    """On the Fleet page: from a confirmed GPU to its node. `gpus`: of the fleet; `name`: of the screenshots."""
    page, node, gpu = tab.page, wanted.node, wanted.gpu
    page.wait_for_function(
        "([node, gpu]) => window.__drover_fleet && !window.__drover_fleet.early && window.__drover_fleet.cells()"
        ".some((c) => c.node === node && c.gpu === gpu && c.health === 'confirmed')",
        arg=[node, gpu],
    )
    page.get_by_text(incident_title(wanted)).first.wait_for()
    page.get_by_text("Held, idle").wait_for()  # the numbers above are there: nothing moves the picture any more
    page.get_by_text(re.compile("times in CES?T")).wait_for()
    cells = page.evaluate("window.__drover_fleet.cells()")
    assert len(cells) == gpus
    lines = page.locator('[class*="st-key-trouble_"]').all()  # what Drover reports of itself, on a busy machine
    room = SCREEN["height"] + sum(box["height"] + DRAWN_PX for line in lines if (box := line.bounding_box()))
    assert all(0 < c["y"] < room and 0 < c["x"] < SCREEN["width"] for c in cells), "all above the fold"
    assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight") <= room
    tab.shot(name)

    cell = next(c for c in cells if c["node"] == node and c["gpu"] == gpu)
    page.mouse.move(cell["x"], cell["y"])
    page.get_by_text(f"{node} GPU {gpu}", exact=True).first.wait_for()
    page.mouse.click(cell["x"], cell["y"])
    page.wait_for_url(re.compile(rf"/node\?.*node={node}"))
    assert f"gpu={gpu}" in page.url
    page.locator("canvas").nth(5).wait_for()  # six charts
    assert page.locator("tr.selected").get_by_text(f"GPU {gpu}", exact=True).count() == 1


def its_incident(tab: Tab, wanted: Incident) -> None:
    """From the node's page to the incident, without a mouse."""
    page = tab.page
    page.locator("tr.opens a").get_by_text(incident_title(wanted)).first.press("Enter")
    page.wait_for_url(re.compile(rf"/incidents\?.*id={wanted.id}"))
    page.get_by_text("What to do: ").wait_for()
    heading = page.locator(".st-key-summary_what").inner_text()
    assert heading.startswith(stable_summary(wanted))
    advice = page.locator(".st-key-todo_advice").bounding_box()
    assert advice["y"] + advice["height"] < SCREEN["height"], "what to do is on the first screen"
    page.get_by_text("Evidence").first.wait_for()


def slow_gpu(tab: Tab, slow: Incident) -> None:
    """On the Job page: which GPU slows the job, and what it costs."""
    page = tab.page
    page.locator("tbody tr").first.get_by_text("HURT", exact=True).wait_for()
    page.locator("tr.opens").get_by_text(slow.job, exact=True).first.click()
    page.wait_for_url(re.compile(rf"/job\?.*job={slow.job}"))
    clock = page.locator(".dots canvas").first
    clock.wait_for()
    assert f"{slow.node} GPU {slow.gpu}" in clock.get_attribute("aria-label")
    shown = page.locator(".st-key-todo_slow").inner_text()
    assert shown.startswith(f"GPU {slow.gpu} of node {slow.node}")
    assert "GPU-hours for it" in shown
    page.locator("canvas").nth(10).wait_for()  # next to the dots, the slow GPU over time


def one_node(tab: Tab, flapping: str) -> None:
    """On the Fabric page: it is one node, not the switch."""
    page = tab.page
    page.wait_for_url(re.compile(r"/fabric\?leaf=leaf01"))  # the worst one, without a click
    page.get_by_text(f"One of 16 nodes, not the switch: {flapping}.").first.wait_for()
    cells = page.locator(".tile").first.locator(".cell")
    cells.first.wait_for()
    assert [cells.nth(at).get_attribute("class") for at in range(cells.count())].count("cell trouble") == 1
    page.locator("tbody tr").first.get_by_text(re.compile(rf"^{flapping} mlx5_\d$")).wait_for()


def links_of(tab: Tab, url: str, node: str) -> None:
    """NVLinks of a node that was never probed."""
    page = tab.page
    page.goto(f"{url}/fabric?node={node}")
    page.get_by_text(f"NVLinks of {node}").wait_for()
    page.get_by_text("GPU 7", exact=True).first.wait_for()
    page.get_by_text("No bandwidth between its GPUs has been measured.").wait_for()


def hot_rack(tab: Tab, hot: tuple[str, int]) -> None:
    """On the Thermals page: from the rack r02 to the GPU there that is poorly cooled."""
    page, (node, gpu) = tab.page, hot
    page.get_by_text("No incident of hot air; poor cooling in r02.").wait_for()
    tile = page.locator(".tile", has=page.get_by_text("r02", exact=True))
    tile.get_by_text(re.compile("poor")).wait_for()
    tile.press("Enter")
    page.wait_for_url(re.compile(r"/thermals\?by=hottest&rack=r02"))
    page.get_by_text("r02n08", exact=True).wait_for()
    page.locator("tr.opens").get_by_text(f"{node} GPU {gpu}", exact=True).click()
    page.wait_for_url(re.compile(r"/incidents\?.*id="))
    page.get_by_text("What to do: ").wait_for()


def decided_again(tab: Tab, url: str, name: str) -> None:
    """On the Policy page: what this policy and each preset would have made of the last days."""
    page = tab.page
    page.goto(f"{url}/policy")
    page.get_by_role("button", name="Decide the last 7 days again").click()
    page.get_by_text("Decided again by", exact=True).wait_for()
    rows = page.locator("tbody tr", has=page.get_by_text(re.compile("^(in force|preset)$")))
    rows.nth(1).wait_for()
    assert rows.get_by_text("in force", exact=True).count() == 1
    rows.first.scroll_into_view_if_needed()
    tab.shot(name)
