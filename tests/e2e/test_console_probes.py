"""The Probes page in a real browser: the slow GPU in the fleet's distribution, the slow way in the matrix, a decline.

Screenshots stay in test-artifacts/console/.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drover_core.model.fleet import dump_toml
from drover_simulator.fleet import build_fleet
from testbed import probed
from testbed.browsing import Tab, lone_tab
from testbed.system_processes import collector, free_port, reachable, running
from testbed.waiting import wait_until

pytestmark = pytest.mark.system

NODES = 16


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """(address, names of nodes) of a console whose collector finds a store of what probes gave. No agent runs."""
    folder = tmp_path_factory.mktemp("console_probes")
    spec = build_fleet(NODES, 7)
    (folder / "fleet.toml").write_text(dump_toml(spec))
    tests = str(Path(__file__).resolve().parents[1])
    url = f"chdb://{folder / 'store'}"
    subprocess.run(
        [sys.executable, "-m", "testbed.probed", url, str(folder / "fleet.toml")],
        check=True, timeout=120, env=os.environ | {"PYTHONPATH": tests},
    )  # fmt: skip
    port = free_port()
    with (
        collector(folder, dump_toml(spec)) as served,
        running(folder, "drover_dashboard.main", "--collector", served.api, "--port", str(port)),
    ):
        wait_until(lambda: reachable("127.0.0.1", port), "the console listens")
        yield f"http://127.0.0.1:{port}", [node.name for node in spec.nodes]


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    with lone_tab(browser, "dark") as made:
        yield made


def test_from_the_slow_gpu_to_its_node_and_back(console: tuple[str, list[str]], tab: Tab) -> None:
    url, nodes = console
    page = tab.page
    page.goto(f"{url}/probes")
    page.get_by_text("gemm_bf16, TFLOP/s", exact=True).first.wait_for()
    mark = page.locator("g.mark")
    mark.first.wait_for()
    assert mark.count() == 1, "what failed, and nothing else"
    page.get_by_text(f"{nodes[0]} GPU {probed.SLOW}", exact=True).first.wait_for()
    page.get_by_text("no result").first.wait_for()
    tab.shot("probes")

    mark.first.click()
    page.wait_for_url(re.compile(rf"/probes\?.*node={nodes[0]}.*gpu={probed.SLOW}"))
    page.get_by_text("Between its GPUs, GB/s").first.wait_for()
    assert page.locator("g.mark").count() == 8, "the node's own GPUs"
    assert page.locator("td.pass").count() == 56
    tab.shot("probes-node")

    page.goto(f"{url}/probes?node={nodes[1]}&figure=p2p")
    page.locator("td.fail").first.wait_for()
    assert sorted(page.locator("td.fail").all_inner_texts())[0].startswith("! 18")
    assert page.locator("td.fail").count() == 2, "both ways of one link"
    tab.shot("probes-matrix")

    page.goto(f"{url}/probes?node={nodes[3]}&gpu={probed.SLOW}&figure=hbm_copy")
    page.locator("canvas").first.wait_for()
    page.get_by_text("what it gave before").first.wait_for()
    tab.shot("probes-history")

    page.goto(f"{url}/node?node={nodes[2]}")
    page.get_by_text("WRONG").first.scroll_into_view_if_needed()
    page.get_by_text("absent", exact=True).first.wait_for()
    tab.shot("node-probes")
    page.goto(f"{url}/probes?node={nodes[-1]}")
    page.get_by_text(f"{nodes[-1]} was never probed.").first.wait_for()
