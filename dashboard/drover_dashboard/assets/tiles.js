// Racks or leafs, one tile each: its name, a figure by colour and number, its nodes as cells, a remark. A click opens it.
import { element, paint, rampBar, themeOf, worded } from "./common.js";

const shownData = new WeakMap();

export function render({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".tiles");
  root.classList.toggle("dark", themeOf(root).dark);
  const shown = JSON.stringify(data);
  if (shownData.get(parentElement) === shown && root.firstChild) return; // nothing changed: focus stays
  shownData.set(parentElement, shown);
  const focused = root.querySelector(".tile:focus")?.dataset.id;
  root.style.setProperty("--wide", `${data.wide}px`);
  root.replaceChildren();
  if (data.empty) root.append(element("div", "empty", data.empty));
  for (const group of data.groups) {
    if (group.label) root.append(element("div", "group", group.label));
    const grid = element("div", "grid");
    grid.append(...group.tiles.map((tile) => made(tile, data, setTriggerValue)));
    root.append(grid);
  }
  if (data.legend && !data.empty) root.append(legend(data.legend));
  if (focused !== undefined) [...root.querySelectorAll(".tile")].find((tile) => tile.dataset.id === focused)?.focus();
}

export function unmount(parentElement) {
  shownData.delete(parentElement);
}

function made(tile, data, setTriggerValue) {
  const box = element("a", ["tile", tile.tone, tile.id === data.selected ? "selected" : ""].filter(Boolean).join(" "));
  box.href = new URL(tile.href, document.baseURI);
  box.dataset.id = tile.id;
  box.title = tile.title;
  if (tile.id === data.selected) box.setAttribute("aria-current", "true");
  box.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // the link's own ways stay
    event.preventDefault();
    setTriggerValue("open", tile.id);
  });
  const head = element("div", "head");
  head.append(element("span", "name", tile.name));
  if (tile.mark) head.append(element("span", `mark ${tile.tone}`, tile.mark));
  box.append(head);
  if (tile.value) {
    const value = element("div", "value", tile.value);
    if (tile.share === null) value.classList.add("absent");
    else paint(value, tile.share);
    box.append(value);
  }
  if (tile.cells.length) {
    const cells = element("div", "cells"), bad = tile.cells.filter(([state]) => state === "trouble");
    cells.setAttribute("role", "img");
    cells.setAttribute("aria-label", `${bad.length} of ${tile.cells.length} nodes in trouble`);
    for (const [state, title, chosen] of tile.cells) {
      const cell = element("span", `cell ${state} ${chosen || ""}`.trim(), state === "trouble" ? "!" : "");
      cell.title = title;
      cells.append(cell);
    }
    box.append(cells);
  }
  tile.subs.forEach((text) => box.append(worded(element("div", "sub"), text)));
  return box;
}

function legend(scale) {
  const line = element("div", "legend");
  if (scale.low) {
    const bar = element("span", "bar");
    bar.style.background = rampBar();
    line.append(element("span", "", scale.low), bar, element("span", "", scale.high));
  }
  for (const [state, text] of scale.cells) {
    const item = element("span", "item");
    item.append(element("span", `cell ${state}`, state === "trouble" ? "!" : ""), element("span", "", text));
    line.append(item);
  }
  return line;
}
