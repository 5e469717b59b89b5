// Lines over time with uPlot: an absent value is a gap, the peers are a band, moments (onset, opened) are faint uprights.
import uPlot from "./uplot/uPlot.esm.js";
import { element, themeOf, zone } from "./common.js";

const charts = new WeakMap();

export function render({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".chart");
  const { head, columns } = decode(data);
  const theme = themeOf(root);
  let chart = charts.get(parentElement);
  const shape = JSON.stringify([head.lines, head.unit, head.height, theme.dark]);
  if (chart && chart.shape !== shape) {
    unmount(parentElement);
    chart = null;
  }
  if (!chart) {
    root.replaceChildren();
    chart = { shape, head };
    charts.set(parentElement, chart);
    build(chart, root, theme, columns);
  }
  chart.head = head;
  chart.load = head.loads ? (from_s, to_s) => setTriggerValue("zoom", { from_s, to_s }) : null;
  if (head.open) chart.zoomed = false; // what was drawn open has come, with its own points
  chart.title.textContent = head.title;
  chart.note.textContent = head.note;
  root.classList.toggle("absent", Boolean(head.absent));
  chart.absent.textContent = head.absent || "";
  chart.plot.setData(columns, false);
  if (chart.zoomed) chart.plot.redraw();
  else chart.plot.setScale("x", { min: head.from_s, max: head.to_s });
}

export function unmount(parentElement) {
  const chart = charts.get(parentElement);
  if (!chart) return;
  chart.resized.disconnect();
  chart.plot.destroy();
  charts.delete(parentElement);
}

// uint32 length of a JSON header, the header padded to 8 bytes, float64 seconds[points], then float32[points] per line.
function decode(data) {
  const bytes = data.slice(); // its own buffer, aligned
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  let offset = (4 + length + 7) & ~7;
  const columns = [Array.from(new Float64Array(bytes.buffer, offset, head.points))];
  offset += head.points * 8;
  head.lines.forEach(() => {
    columns.push(Array.from(new Float32Array(bytes.buffer, offset, head.points), (value) => (Number.isNaN(value) ? null : value)));
    offset += head.points * 4;
  });
  return { head, columns };
}

function build(chart, root, theme, columns) {
  const { head } = chart;
  const shade = (chart.shade = theme.dark ? "dark" : "light");
  chart.title = element("div", "title");
  chart.note = element("div", "note");
  chart.absent = element("div", "nothing");
  const top = element("div", "top");
  top.append(chart.title, chart.note);
  const area = element("div", "area");
  chart.tip = element("div", "tip");
  chart.tip.hidden = true;
  root.append(top, area, chart.absent, chart.tip);
  const grid = { stroke: theme.border, width: 1 };
  const axis = { stroke: theme.text, grid, ticks: grid, font: "11px sans-serif" };
  const text = (value) => (value === null || value === undefined ? "absent" : number(value, head.unit));
  const band = head.lines.findIndex((line) => line.role === "peers_p10") + 1;
  chart.plot = new uPlot(
    {
      width: root.clientWidth || 400,
      height: head.height,
      series: [{}, ...head.lines.map((line) => lineOf(line, theme, shade, head))],
      bands: band ? [{ series: [band + 1, band], fill: theme.dark ? "#8fa3b844" : "#5f758c33" }] : [],
      scales: { x: { time: true }, y: { range: (_, low, high) => range(chart.head, low, high) } },
      axes: [
        { ...axis, space: 60, size: 26, values: (plot, marks) => marks.map((at) => tick(at, plot.scales.x)) },
        { ...axis, space: 26, size: 54, values: (_, marks) => marks.map((value) => number(value, "")) },
      ],
      cursor: {
        y: false,
        drag: { x: true, y: false },
        points: { size: 5 },
        // The charts of a page share the crosshair by time; a zoom goes its own way, through the address.
        sync: { key: "drover", scales: ["x", null], filters: { pub: shared, sub: shared } },
      },
      legend: { show: false },
      hooks: {
        drawClear: [(plot) => moments(plot, chart.head.marks, theme)],
        setSelect: [(plot) => opened(chart, plot)],
        setCursor: [(plot) => readout(chart, plot, text)],
      },
    },
    columns,
    area,
  );
  area.addEventListener("dblclick", () => {
    chart.zoomed = false;
    if (chart.head.open && chart.load) return chart.load(0, 0);
    chart.plot.setScale("x", { min: chart.head.from_s, max: chart.head.to_s });
  });
  chart.resized = new ResizeObserver(() => {
    const width = root.clientWidth;
    if (width && width !== chart.width) chart.plot.setSize({ width: (chart.width = width), height: head.height });
  });
  chart.resized.observe(root);
}

// A time was drawn open: magnified at once, and its finer data is asked for.
function opened(chart, plot) {
  if (plot.select.width <= 0) return;
  chart.zoomed = true;
  const at = (left) => plot.posToVal(left, "x");
  if (chart.load) chart.load(at(plot.select.left), at(plot.select.left + plot.select.width));
}

// What the cursor points at: the moment and each line's value, absent where there is none.
function readout(chart, plot, text) {
  const { idx, left } = plot.cursor;
  const known = idx !== null && idx !== undefined && left >= 0;
  const here = plot.over.matches(":hover"); // on the other charts there is the crosshair alone
  if (here || !known) dispatchEvent(new CustomEvent("drover-time", { detail: known ? plot.posToVal(left, "x") : null }));
  chart.tip.hidden = !known || !here;
  if (chart.tip.hidden) return;
  const lines = chart.head.lines.map((line, k) => {
    const made = element("div", line.strong ? "strong" : "");
    made.append(swatch(line, chart.shade), `${line.label}: ${text(plot.data[k + 1][idx])}`);
    return made;
  });
  chart.tip.replaceChildren(element("b", "", moment(plot.data[0][idx])), ...lines);
  const room = plot.over.clientWidth;
  chart.tip.style.left = `${left > room / 2 ? left + 54 - 8 - chart.tip.offsetWidth : left + 54 + 14}px`;
}

const shared = (type) => type === "mousemove" || type === "mouseleave";

// A sample of the line before its value.
function swatch(line, shade) {
  const made = element("i", line.role === "value" ? (line.dash ? "swatch dashed" : "swatch") : "swatch peers");
  if (line.role === "value") made.style.color = line[shade];
  return made;
}

// Clock times for spans of hours, days for spans of days.
function tick(seconds, scale) {
  const at = new Date(seconds * 1000);
  if (scale.max - scale.min > 2 * 86400) return at.toLocaleDateString([], { month: "short", day: "numeric", timeZone: zone() });
  const parts = { hour: "2-digit", minute: "2-digit", hour12: false, timeZone: zone() };
  return at.toLocaleTimeString([], scale.max - scale.min < 300 ? { ...parts, second: "2-digit" } : parts);
}

function lineOf(line, theme, shade, head) {
  const base = { label: line.label, spanGaps: false, points: { show: false } };
  if (line.role === "value") {
    return { ...base, stroke: line[shade], width: line.strong ? 2.5 : 1.25, dash: line.dash, points: { show: head.points < 40, size: 4 } };
  }
  if (line.role === "peers_median") return { ...base, stroke: theme.dark ? "#aab6c3" : "#5f6f80", width: 1.25, dash: [5, 4] };
  return { ...base, stroke: theme.dark ? "#8fa3b877" : "#5f758c66", width: 0.75 };
}

// All values of one chart share a scale; a flat line gets room above and below instead of filling it.
function range(head, low, high) {
  if (low === null || high === null) return [0, 1];
  if (head.range) return head.range;
  const span = Math.max(high - low, Math.abs(high) * 0.04, 1e-9);
  const floor = low - span * 0.12;
  return [low >= 0 && floor < 0 ? 0 : floor, Math.max(high + span * 0.12, low + (head.least || 0))];
}

const number = (value, unit) =>
  `${value.toLocaleString([], { maximumFractionDigits: Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 1 ? 1 : 4 })} ${unit}`.trim();

const moment = (seconds) => new Date(seconds * 1000).toLocaleString([], { hour12: false, timeZone: zone(), month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" });

// Behind the lines, and without words: the strip above the charts has them.
function moments(plot, marks, theme) {
  const paint = plot.ctx;
  const ratio = window.devicePixelRatio || 1;
  const { left, top, width, height } = plot.bbox;
  paint.save();
  paint.strokeStyle = paint.fillStyle = theme.dark ? "#c9a27a" : "#8a6a48";
  paint.lineWidth = ratio;
  for (const at of marks) {
    const x = plot.valToPos(at, "x", true);
    if (x < left || x > left + width) continue;
    paint.globalAlpha = 1;
    paint.beginPath();
    paint.moveTo(x - 4 * ratio, top - 6 * ratio);
    paint.lineTo(x + 4 * ratio, top - 6 * ratio);
    paint.lineTo(x, top);
    paint.fill();
    paint.globalAlpha = 0.55;
    paint.setLineDash([2 * ratio, 4 * ratio]);
    paint.beginPath();
    paint.moveTo(x, top);
    paint.lineTo(x, top + height);
    paint.stroke();
  }
  paint.restore();
}
