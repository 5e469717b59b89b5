// A job's time in lanes: runs, steps, slow phases, faults, restarts. Each lane says in words what it has or lacks.
import { element, themeOf } from "./common.js";

const shown = new WeakMap();

export function render({ data, parentElement }) {
  const root = parentElement.querySelector(".timeline");
  root.classList.toggle("dark", themeOf(root).dark);
  const text = JSON.stringify(data);
  if (shown.get(parentElement) === text && root.firstChild) return;
  shown.set(parentElement, text);
  const top = element("div", "top");
  top.append(element("span", "title", data.title), element("span", "note", data.note));
  root.replaceChildren(top, ...data.lanes.map(lane), axis(data));
}

export function unmount(parentElement) {
  shown.delete(parentElement);
}

function lane(row) {
  const made = element("div", "lane"), track = element("div", row.unknown ? "track unknown" : "track");
  track.setAttribute("role", "img");
  track.setAttribute("aria-label", `${row.label}: ${row.parts.map((part) => part.text).join("; ") || row.empty}`);
  if (!row.parts.length) track.append(element("div", "nothing", row.empty));
  for (const part of row.parts) {
    const box = element("div", `part ${part.look}`);
    box.style.left = `${100 * part.low}%`;
    box.style.width = `${100 * (part.high - part.low)}%`;
    box.title = part.text;
    track.append(box);
  }
  made.append(element("div", "label", row.label), track);
  return made;
}

function axis(data) {
  const made = element("div", "lane"), line = element("div", "axis");
  for (const tick of data.ticks) {
    const mark = element("span", "", tick.text);
    mark.style.left = `${100 * tick.at}%`;
    line.append(mark);
  }
  made.append(element("div", "label"), line);
  return made;
}
