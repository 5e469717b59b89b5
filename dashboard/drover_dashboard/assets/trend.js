// The fleet by day: utilisation, power, GPU-hours lost and goodput. It is asked for when the page stands, never before. A
// day without data is hatched, which is not zero.
import { element, themeOf } from "./common.js";

const strips = new WeakMap();
const AGAIN_MS = 600_000;
const COUNTING_MS = 5_000; // while days are still counted
const FIRST_MS = 1_500;

export function render({ data, parentElement }) {
  const root = parentElement.querySelector(".trend");
  root.classList.toggle("dark", themeOf(root).dark);
  let strip = strips.get(parentElement);
  const other = strip && strip.data.cluster !== data.cluster;
  if (strip && !other) return;
  if (other) unmount(parentElement);
  strip = { root, data, timer: 0, closed: false };
  strips.set(parentElement, strip);
  root.replaceChildren(element("div", "said", "The last 30 days: not asked for yet."));
  strip.timer = setTimeout(() => load(strip), FIRST_MS);
}

export function unmount(parentElement) {
  const strip = strips.get(parentElement);
  if (!strip) return;
  strip.closed = true;
  clearTimeout(strip.timer);
  strips.delete(parentElement);
}

async function load(strip) {
  let wait = AGAIN_MS;
  if (!document.hidden) {
    try {
      const { cluster } = strip.data;
      const of = cluster ? `?cluster=${encodeURIComponent(cluster)}` : "";
      const reply = await fetch(new URL(`drover/trend${of}`, document.baseURI), { cache: "no-store" });
      const found = await reply.json();
      if (strip.closed) return;
      if (!reply.ok) throw new Error(found.trouble);
      draw(strip, found);
      if (found.pending) wait = COUNTING_MS;
    } catch (error) {
      if (strip.closed) return;
      strip.root.replaceChildren(element("div", "said", `The last 30 days are not known: ${error.message}`));
      wait = 30_000;
    }
  } else wait = COUNTING_MS;
  strip.timer = setTimeout(() => load(strip), wait);
}

function draw(strip, found) {
  const dates = found.days_ms.map((ms) => new Date(ms).toLocaleDateString([], { day: "numeric", month: "short", timeZone: "UTC" }));
  strip.root.replaceChildren(...found.figures.map((figure) => box(strip, found, figure, dates)));
}

function box(strip, found, figure, dates) {
  const made = element("a", "box"), head = element("div", "head"), bars = element("div", "bars"), foot = element("div", "foot");
  made.href = new URL(strip.data.href, document.baseURI);
  const known = figure.values.filter((value) => value !== null);
  const most = figure.unit === "%" ? 100 : Math.max(...known, 0);
  const last = figure.values.length - 1;
  const newest = figure.values[last];
  head.append(element("span", "", `${figure.label} by day`), element("b", "", newest === null ? "today: no data" : `today ${text(newest, figure.unit)}`));
  figure.values.forEach((value, at) => {
    const day = element("span", `day${value === null ? " none" : ""}${figure.bad ? " bad" : ""}${at === last ? " today" : ""}`);
    day.title = `${dates[at]} (UTC): ${value === null ? (found.waits[at] ? "not counted yet" : "no data") : text(value, figure.unit)}`;
    if (value !== null) {
      const bar = element("i");
      bar.style.height = `${most > 0 ? Math.max(2, (100 * value) / most) : 2}%`;
      day.append(bar);
    }
    bars.append(day);
  });
  const mean = known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  const counted = found.pending ? `, ${found.pending} days still being counted` : "";
  const said = mean === null ? `no data${counted}` : `${figure.bad ? "sum" : "mean"} ${text(figure.bad ? mean * known.length : mean, figure.unit)} of ${known.length} ${known.length === 1 ? "day" : "days"}${counted}`;
  foot.append(element("span", "", dates[0]), element("span", "", said));
  made.title = "Opens Capacity. `drover report` has each day in full.";
  made.append(head, bars, foot);
  return made;
}

function text(value, unit) {
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${value.toLocaleString([], { maximumFractionDigits: digits })} ${unit}`;
}
