// Rows of stacked bars: each part has a word and a pattern of its own, so that colour is not its only sign.
import { element, themeOf } from "./common.js";

const shown = new WeakMap();

export function render({ data, parentElement }) {
  const root = parentElement.querySelector(".bars");
  root.classList.toggle("dark", themeOf(root).dark);
  const text = JSON.stringify(data);
  if (shown.get(parentElement) === text && root.firstChild) return;
  shown.set(parentElement, text);
  if (!data.rows.length) {
    root.replaceChildren(element("div", "empty", data.empty));
    return;
  }
  root.replaceChildren(legend(data), ...data.rows.map((row) => line(row, data)));
}

export function unmount(parentElement) {
  shown.delete(parentElement);
}

function legend(data) {
  const made = element("div", "legend");
  for (const kind of data.kinds) {
    const item = element("span", "item");
    item.append(element("span", `swatch ${kind.kind}`), element("span", "", kind.label));
    if (kind.help) item.title = kind.help;
    made.append(item);
  }
  return made;
}

function line(row, data) {
  const made = element("div", "row");
  const label = element("div", "label", row.label);
  if (row.sub) label.append(element("div", "sub", row.sub));
  const track = element("div", "track");
  track.setAttribute("role", "img");
  const words = data.kinds.map((kind, k) => `${kind.label} ${row.values[k].toLocaleString()} ${data.unit}`);
  track.setAttribute("aria-label", `${row.label}: ${words.join(", ")}`);
  data.kinds.forEach((kind, k) => {
    const value = row.values[k];
    if (!value) return;
    const share = value / (data.shares ? row.values.reduce((sum, each) => sum + each, 0) : data.most);
    const part = element("div", `part ${kind.kind}`, share > 0.045 ? shorter(value) : "");
    part.style.width = `${100 * share}%`;
    part.title = `${kind.label}: ${value.toLocaleString()} ${data.unit}`;
    track.append(part);
  });
  made.append(label, track, element("div", "value", row.value));
  return made;
}

const shorter = (value) => value.toLocaleString([], { maximumFractionDigits: value >= 100 ? 0 : value >= 1 ? 1 : 2 });
