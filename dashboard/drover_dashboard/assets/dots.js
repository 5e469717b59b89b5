// GPUs of one job against each other: a row of dots per metric over the band of the middle 80 %, those in trouble named.
import { element, themeOf } from "./common.js";

const HEIGHT = 40, PAD = 10, NEAR = 9;
const drawn = new WeakMap();

export function render({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".dots");
  let state = drawn.get(parentElement);
  if (!state) {
    state = { hover: -1, rows: [] };
    state.resized = new ResizeObserver(() => paintAll(state));
    state.resized.observe(root);
    drawn.set(parentElement, state);
  }
  const theme = themeOf(root);
  root.classList.toggle("dark", theme.dark);
  state.open = (id) => setTriggerValue("open", id);
  state.data = data;
  state.theme = theme;
  state.root = root;
  const shape = JSON.stringify([data.empty, data.rows.map((row) => row.label)]);
  if (state.shape !== shape) build(state, root);
  state.shape = shape;
  fill(state);
  paintAll(state);
}

export function unmount(parentElement) {
  drawn.get(parentElement)?.resized.disconnect();
  drawn.delete(parentElement);
}

function build(state, root) {
  state.title = element("span", "title");
  state.note = element("span", "note");
  const top = element("div", "top");
  top.append(state.title, state.note);
  root.replaceChildren(top);
  state.rows = [];
  if (state.data.empty) {
    root.append(element("div", "empty", state.data.empty));
    return;
  }
  state.data.rows.forEach((_, at) => {
    const line = element("div", "row");
    const left = element("div", "left"), label = element("div", "label"), scale = element("div", "scale");
    const canvas = document.createElement("canvas"), value = element("div", "value");
    left.append(label, scale);
    canvas.setAttribute("role", "img");
    canvas.addEventListener("mousemove", (event) => point(state, at, event));
    canvas.addEventListener("mouseleave", () => leave(state));
    canvas.addEventListener("click", () => { if (state.hover >= 0) state.open(state.data.gpus[state.hover].id); });
    line.append(left, canvas, value);
    root.append(line);
    state.rows.push({ label, scale, canvas, value });
  });
  const legend = element("div", "legend");
  for (const [name, text] of [["dot", "a GPU"], ["band", "p10 to p90 of the job, median upright"], ["slow", "named by an open incident"]]) {
    const item = element("span");
    item.append(element("i", name), document.createTextNode(text));
    legend.append(item);
  }
  legend.append(element("span", "", "point for the value, click for the node"));
  state.tip = element("div", "tip");
  state.tip.hidden = true;
  root.append(legend, state.tip);
}

function fill(state) {
  state.title.textContent = state.data.title;
  state.note.textContent = state.data.note;
  state.rows.forEach((made, at) => {
    const row = state.data.rows[at];
    made.label.textContent = row.label;
    made.scale.textContent = `${row.low_text} to ${row.high_text}`;
    made.value.replaceChildren(element("span", "", `median ${row.median_text}`));
    if (row.absent) made.value.append(element("span", "lack", `${row.absent} absent`));
    made.canvas.setAttribute("aria-label", row.said);
  });
}

function paintAll(state) {
  state.rows.forEach((_, at) => paintRow(state, at));
}

const x = (row, value, width) => PAD + ((value - row.low) / (row.high - row.low)) * (width - 2 * PAD);
// Dots of one value side by side: a fixed small offset by the GPU's place in the list.
const y = (at) => HEIGHT / 2 + (((at * 7) % 11) - 5) * 1.7;

function paintRow(state, at) {
  const row = state.data.rows[at], { canvas } = state.rows[at];
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  if (!width || !row) return;
  canvas.width = width * ratio;
  canvas.height = HEIGHT * ratio;
  const pen = canvas.getContext("2d"), style = getComputedStyle(state.root);
  const color = (name) => style.getPropertyValue(name).trim();
  pen.scale(ratio, ratio);
  pen.fillStyle = color("--band");
  pen.fillRect(x(row, row.p10, width), 5, Math.max(2, x(row, row.p90, width) - x(row, row.p10, width)), HEIGHT - 10);
  pen.strokeStyle = color("--dot");
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.moveTo(x(row, row.median, width), 4);
  pen.lineTo(x(row, row.median, width), HEIGHT - 4);
  pen.stroke();
  pen.fillStyle = color("--dot");
  pen.globalAlpha = row.values.length > 128 ? 0.45 : 0.7;
  row.values.forEach((value, gpu) => {
    if (value === null || state.data.gpus[gpu].named) return;
    pen.beginPath();
    pen.arc(x(row, value, width), y(gpu), 3, 0, 7);
    pen.fill();
  });
  pen.globalAlpha = 1;
  const ends = [];
  row.values.forEach((value, gpu) => {
    if (value !== null && state.data.gpus[gpu].named) named(pen, state, x(row, value, width), width, gpu, ends, color("--bad"));
  });
  if (state.hover >= 0 && row.values[state.hover] !== null) {
    pen.strokeStyle = state.theme.text;
    pen.lineWidth = 2;
    pen.beginPath();
    pen.arc(x(row, row.values[state.hover], width), y(state.hover), 6, 0, 7);
    pen.stroke();
  }
}

// A triangle, and its name where that does not cover another one.
function named(pen, state, at, width, gpu, ends, color) {
  const middle = y(gpu);
  pen.fillStyle = color;
  pen.beginPath();
  pen.moveTo(at, middle - 6);
  pen.lineTo(at + 6, middle + 5);
  pen.lineTo(at - 6, middle + 5);
  pen.fill();
  const text = state.data.gpus[gpu].name;
  pen.font = `700 11px ${getComputedStyle(state.root).fontFamily}`;
  const wide = pen.measureText(text).width;
  const left = at + 9 + wide < width ? at + 9 : at - 9 - wide;
  if (ends.some(([low, high]) => left < high + 4 && left + wide > low - 4)) return;
  ends.push([Math.min(left, at - 6), Math.max(left + wide, at + 6)]);
  pen.fillStyle = state.theme.back;
  pen.globalAlpha = 0.82;
  pen.fillRect(left - 2, HEIGHT / 2 - 8, wide + 4, 16);
  pen.globalAlpha = 1;
  pen.fillStyle = state.theme.text;
  pen.fillText(text, left, HEIGHT / 2 + 4);
}

function point(state, at, event) {
  const row = state.data.rows[at], { canvas } = state.rows[at];
  let best = -1, least = NEAR * NEAR;
  row.values.forEach((value, gpu) => {
    if (value === null) return;
    const away = (x(row, value, canvas.clientWidth) - event.offsetX) ** 2 + (y(gpu) - event.offsetY) ** 2;
    if (away < least) [best, least] = [gpu, away];
  });
  if (best !== state.hover) {
    state.hover = best;
    paintAll(state);
  }
  state.tip.hidden = best < 0;
  if (best < 0) return;
  const gpu = state.data.gpus[best];
  state.tip.replaceChildren(element("div", "", gpu.name));
  state.tip.firstChild.style.fontWeight = 700;
  if (gpu.place) state.tip.append(element("div", "", gpu.place));
  state.tip.append(element("div", "", `${row.label}: ${row.texts[best]}; median ${row.median_text}`));
  if (gpu.why) state.tip.append(element("div", "", gpu.why));
  const room = state.root.getBoundingClientRect(), box = canvas.getBoundingClientRect();
  const left = box.left - room.left + event.offsetX + 14;
  state.tip.style.left = `${Math.max(0, Math.min(left, room.width - state.tip.offsetWidth))}px`;
  state.tip.style.top = `${box.bottom - room.top + 2}px`;
}

function leave(state) {
  state.hover = -1;
  state.tip.hidden = true;
  paintAll(state);
}
