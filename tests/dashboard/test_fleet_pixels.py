"""The picture of a very large fleet, drawn by the pixel, in a real browser: each GPU has its own, in its own colour."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route, sync_playwright

from drover_dashboard.widgets.components import ASSETS
from testbed.browser import CHROMIUM, FLAGS

pytestmark = pytest.mark.system

ORIGIN = "http://assets.test/"
# 781 racks of 16 nodes of 8 GPUs, as wide and high as on a desk's screen; codes 0 (absent) to 4 one after another.
DRAWN = """async (ratio) => {
  const { arrange, place } = await import("./fleet_layout.js");
  const { fillPixels, fits, pixelMap, pixelOf } = await import("./fleet_pixels.js");
  let first = 0;
  const racks = [...Array(781)].map((_, r) => ({ name: `r${r}`, nodes: [...Array(16)].map((_, n) => {
    first += 8;
    return { name: `n${n}`, gpus: 8, first: first - 8 };
  }) }));
  const plan = arrange({ racks }, 789, 529), cells = place({ racks }, plan);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.round(789 * ratio), Math.round(plan.height * ratio)];
  const paint = canvas.getContext("2d");
  paint.setTransform(ratio, 0, 0, ratio, 0, 0);
  const map = pixelMap(cells, plan, ratio, canvas.width, canvas.height);
  const codes = Uint8Array.from(cells, (_, k) => k % 5);
  const named = ["", "#0072b2", "rgb(255,233,69)", "#d55e00", "#1b5a49"];
  const colors = new Uint32Array(256);
  named.forEach((color, code) => { if (color) colors[code] = pixelOf(color); });
  const hatch = document.createElement("canvas");
  hatch.width = hatch.height = 6;
  const brush = hatch.getContext("2d");
  brush.fillStyle = "#010203";
  brush.fillRect(0, 0, 6, 6);
  fillPixels(paint, map, codes, colors, paint.createPattern(hatch, "repeat"));
  const { data } = paint.getImageData(0, 0, canvas.width, canvas.height);
  const expected = [[1, 2, 3], [0, 114, 178], [255, 233, 69], [213, 94, 0], [27, 90, 73]];
  const own = new Set(map), wrong = [];
  own.delete(0);
  let outside = 0;
  for (let k = 0; k < map.length; k += 1) {
    const [at, pixel] = [map[k] - 1, [...data.subarray(4 * k, 4 * k + 4)]];
    if (at < 0) {
      if (pixel[3]) wrong.push(["drawn where there is no GPU", k]);
      outside += 1;
      continue;
    }
    const [x, y] = [(k % canvas.width + 0.5) / ratio, (Math.floor(k / canvas.width) + 0.5) / ratio], cell = cells[at];
    const inside = x >= cell.x && y >= cell.y && x <= cell.x + plan.cellWidth && y <= cell.y + plan.cellHeight;
    if (!inside) wrong.push(["not there", k]);
    if (pixel.join() !== [...expected[codes[at]], 255].join()) wrong.push([pixel, codes[at]]);
  }
  return { fits: fits(plan, ratio), gpus: cells.length, own: own.size, outside, wrong: wrong.slice(0, 5) };
}"""


def _asset(route: Route) -> None:
    name = route.request.url.removeprefix(ORIGIN)
    if name == "blank":
        route.fulfill(body="<!doctype html>", content_type="text/html")
    else:
        route.fulfill(body=(ASSETS / name).read_text("utf-8"), content_type="text/javascript")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        made = browser.new_page()
        made.route(f"{ORIGIN}**", _asset)
        made.goto(f"{ORIGIN}blank")
        yield made
        browser.close()


@pytest.mark.parametrize("ratio", [1, 1.25, 2])
def test_each_of_100_000_gpus_has_its_own_pixels_in_its_own_colour(page: Page, ratio: float) -> None:
    found: dict[str, Any] = page.evaluate(DRAWN.replace('"./', f'"{ORIGIN}'), ratio)
    assert found["wrong"] == []
    assert found["fits"]
    assert found["gpus"] == found["own"] == 99_968
    assert found["outside"] > 0


def test_cells_below_a_pixel_and_cells_with_room_for_a_sign_are_drawn_otherwise(page: Page) -> None:
    fits = f"async ([plan, ratio]) => (await import('{ORIGIN}fleet_pixels.js')).fits(plan, ratio)"
    asked = [
        ({"cellWidth": 0.8, "cellHeight": 2}, 1),
        ({"cellWidth": 0.8, "cellHeight": 2}, 2),
        ({"cellWidth": 9, "cellHeight": 6}, 1),
    ]
    assert [page.evaluate(fits, [plan, ratio]) for plan, ratio in asked] == [False, True, False]


LAYOUT = {"group": "rack", "version": 1, "racks": [{"name": "r1", "nodes": [{"name": "n1", "gpus": 8, "first": 0}]}]}
HEAD = json.dumps(
    {"gpus": 8, "metric": "", "legend": ["unknown", "healthy"], "layout_version": 1, "ts_ms": 1_790_000_000_000}
)
CELLS = b"\1" * 8
SHOWN = """async () => {
  const { render } = await import("./fleet.js");
  const look = { light: "#0072b2", dark: "#0072b2", sign: "" };
  const data = { group: "rack", color_by: "health", every_s: 0.05, height: 500,
    palette: { health: { healthy: look, unknown: look } } };
  window.shown = render({ data, parentElement: document.body, setTriggerValue: () => {} });
  await window.shown.polled;
}"""
PLACES = """() => {
  const { top, left, height } = document.querySelector("canvas").getBoundingClientRect();
  return [top, left, height, ...window.shown.cells.flatMap((cell) => [cell.x, cell.y])];
}"""


def test_no_cell_moves_when_the_picture_is_shown_to_be_old(page: Page) -> None:
    html, css = ((ASSETS / f"fleet.{kind}").read_text("utf-8") for kind in ("html", "css"))
    page.set_content(f"<base href='{ORIGIN}'><style>:root {{ --st-background-color: #fff }} {css}</style>{html}")
    page.route(f"{ORIGIN}drover/layout**", lambda route: route.fulfill(json=LAYOUT))
    page.route(
        f"{ORIGIN}drover/picture**",
        lambda route: route.fulfill(
            body=CELLS, headers={"Drover-Frame": HEAD, "Access-Control-Expose-Headers": "Drover-Frame"}
        ),
    )
    page.evaluate(SHOWN.replace('"./', f'"{ORIGIN}'))
    before = page.evaluate(PLACES)
    assert len(before) == 3 + 16
    page.route(
        f"{ORIGIN}drover/picture**", lambda route: route.fulfill(status=503, json={"trouble": "It does not answer."})
    )
    page.wait_for_selector(".notice:not([hidden])")
    assert "Old picture" in page.inner_text(".notice")
    assert page.evaluate(PLACES) == before
