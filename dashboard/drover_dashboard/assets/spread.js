// One figure over the fleet: bars of all boards, the centre of each configuration, and the node's own GPUs below the axis.
import { element, themeOf } from "./common.js";

const HEIGHT = 150, LEFT = 8, RIGHT = 8, AXIS = 18, ROW = 15, ROWS = 4;
const SVG = "http://www.w3.org/2000/svg";
const COLORS = {
  light: { pass: "#7fb5d6", fail: "#d55e00", unknown: "#b9bec6", centre: "#16191d", limit: "#b34700" },
  dark: { pass: "#33658a", fail: "#f0662b", unknown: "#5b626c", centre: "#e8ebef", limit: "#f0662b" },
};
const drawn = new WeakMap();

export function render({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".spread");
  const state = drawn.get(parentElement) || {};
  state.data = data;
  state.open = (id) => setTriggerValue("open", id);
  if (!state.resized) {
    state.resized = new ResizeObserver(() => { if (root.clientWidth !== state.width) draw(root, state); });
    state.resized.observe(root);
    drawn.set(parentElement, state);
  }
  const shown = JSON.stringify([data, themeOf(root).dark]);
  if (shown === state.shown && root.firstChild) return; // nothing changed: focus and what is pointed at stay
  state.shown = shown;
  draw(root, state);
}

export function unmount(parentElement) {
  drawn.get(parentElement)?.resized.disconnect();
  drawn.delete(parentElement);
}

function draw(root, state) {
  const { data } = state;
  const theme = themeOf(root);
  const colors = COLORS[theme.dark ? "dark" : "light"];
  const width = (state.width = root.clientWidth || 600);
  const top = element("div", "top");
  top.append(element("span", "title", data.title), element("span", "note", data.note));
  if (data.empty) {
    root.replaceChildren(top, element("div", "empty", data.empty));
    return;
  }
  const x = (value) => LEFT + ((value - data.low) / (data.high - data.low)) * (width - LEFT - RIGHT);
  const marks = placed(data.marks, x);
  const rows = marks.length ? Math.min(ROWS, 1 + Math.max(...marks.map((mark) => mark.row))) : 0;
  const svg = make("svg", { width, height: HEIGHT + AXIS + rows * ROW + 6, role: "group", "aria-label": `${data.title}: ${data.note}` }); // not an image: its marks can be chosen
  bars(svg, data, x, colors);
  axis(svg, data, x, theme);
  for (const line of data.lines) upright(svg, line, x, colors, theme);
  for (const mark of marks) svg.append(marked(mark, colors, theme, state.open));
  root.replaceChildren(top, svg, legend(data, colors));
}

function bars(svg, data, x, colors) {
  const highest = Math.max(1, ...data.bins.map((bin) => bin.pass + bin.fail + bin.unknown));
  const step = (x(data.high) - x(data.low)) / data.bins.length;
  // A single board must be seen among hundreds: by the square root, and never less than 3 px.
  const tall = (count) => (count ? Math.max(3, Math.sqrt(count / highest) * (HEIGHT - 24)) : 0);
  data.bins.forEach((bin, at) => {
    const total = bin.pass + bin.fail + bin.unknown;
    if (!total) return;
    const high = tall(total);
    let y = HEIGHT;
    for (const kind of ["fail", "unknown", "pass"]) {
      if (!bin[kind]) continue;
      const part = Math.max(3, (high * bin[kind]) / total);
      y -= part;
      const bar = make("rect", { x: x(data.low) + at * step + 0.5, y, width: Math.max(1, step - 1), height: part, fill: colors[kind] });
      const low = data.low + (at * (data.high - data.low)) / data.bins.length;
      bar.append(make("title", {}, `${total} ${total === 1 ? "result" : "results"} around ${number(low)} ${data.unit}`));
      svg.append(bar);
    }
  });
}

function axis(svg, data, x, theme) {
  svg.append(make("line", { x1: LEFT, x2: x(data.high), y1: HEIGHT + 0.5, y2: HEIGHT + 0.5, stroke: theme.border }));
  for (const value of ticks(data.low, data.high)) {
    svg.append(make("line", { x1: x(value), x2: x(value), y1: HEIGHT, y2: HEIGHT + 4, stroke: theme.border }));
    svg.append(make("text", { x: x(value), y: HEIGHT + 15, fill: theme.text, class: "tick" }, number(value)));
  }
}

function upright(svg, line, x, colors, theme) {
  const group = make("g", {});
  group.append(make("line", {
    x1: x(line.value), x2: x(line.value), y1: 12, y2: HEIGHT, stroke: colors[line.kind], "stroke-width": 1.5,
    "stroke-dasharray": line.kind === "limit" ? "4 3" : "none",
  }));
  if (line.text) group.append(make("text", { x: x(line.value), y: 9, fill: theme.text, class: "tick strong" }, line.text));
  group.append(make("title", {}, line.title));
  svg.append(group);
}

// Labels side by side; those that would touch go a row down.
function placed(marks, x) {
  const ends = [];
  return [...marks].sort((a, b) => a.value - b.value).map((mark) => {
    const at = x(mark.value);
    const wide = 8 + 7 * Math.max(1, mark.label.length);
    let row = ends.findIndex((end) => at - wide / 2 > end);
    if (row < 0) row = Math.min(ends.length, ROWS - 1);
    ends[row] = Math.max(ends[row] ?? -Infinity, at + wide / 2);
    return { ...mark, at, row, wide };
  });
}

function marked(mark, colors, theme, open) {
  const bad = mark.verdict === "fail";
  const y = HEIGHT + AXIS + mark.row * ROW + 2;
  const group = make("g", { class: "mark", tabindex: 0, role: "button", "aria-label": mark.title });
  const color = bad ? colors.fail : theme.text;
  if (mark.label) {
    const strong = bad || mark.strong;
    group.append(make("rect", {
      x: mark.at - mark.wide / 2 + 1, y, width: mark.wide - 2, height: ROW - 2, rx: 3, fill: bad ? colors.fail : theme.back,
      stroke: color, "stroke-width": strong ? 1.75 : 0.75,
    }));
    const ink = bad ? (theme.dark ? "#16191d" : "#ffffff") : theme.text;
    group.append(make("text", { x: mark.at, y: y + 10.5, fill: ink, class: `tick${strong ? " strong" : ""}` }, mark.label));
    group.append(make("line", { x1: mark.at, x2: mark.at, y1: HEIGHT - 7, y2: HEIGHT, stroke: color, "stroke-width": strong ? 3 : 1.5 }));
  } else {
    group.append(make("path", { d: `M${mark.at} ${y} l5 9 h-10 z`, fill: color }));
  }
  group.append(make("title", {}, mark.title));
  group.addEventListener("click", () => open(mark.id));
  group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") open(mark.id); });
  return group;
}

function legend(data, colors) {
  const line = element("div", "legend");
  const some = (kind) => data.bins.some((bin) => bin[kind]);
  for (const [kind, text] of [["pass", "as its configuration gives"], ["fail", "failed"], ["unknown", "not judged"]]) {
    if (!some(kind)) continue;
    const sample = element("span", "sample");
    sample.style.background = colors[kind];
    line.append(sample, element("span", "", text));
  }
  if (data.lines.length) line.append(element("span", "rule"), element("span", "", "centre"), element("span", "rule limit"), element("span", "", "judged worse from here on"));
  line.append(element("span", "", "bar heights: square root of the count"));
  return line;
}

function ticks(low, high) {
  const rough = (high - low) / 6;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((part) => part * power).find((part) => part >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high; at += 1) found.push(at * step);
  return found;
}

const number = (value) => value.toLocaleString([], { maximumSignificantDigits: 4 });

function make(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
