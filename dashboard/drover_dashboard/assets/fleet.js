// The picture of every GPU, by rack or by what else groups them. It fetches its own frames, so that a refresh costs neither a script run nor a flicker.
import { clock, element, themeOf } from "./common.js";
import { next } from "./fleet_keys.js";
import { arrange, place, hit } from "./fleet_layout.js";
import { fillPixels, fits, pixelMap, pixelOf } from "./fleet_pixels.js";

const RAMP = [[0, 32, 76], [0, 66, 106], [86, 92, 108], [124, 123, 120], [165, 156, 116], [210, 193, 95], [255, 233, 69]]; // cividis
const HEALTHY = "healthy";
const UNKNOWN = "unknown";
const JOBS_MS = 20_000; // how often the browser asks again which job holds what
const ASK_MS = 120; // a pointer that only passes asks nothing
const KNOWN_MS = 10_000;
const EARLY_MS = 5_000; // a picture older than this is fetched again
const pictures = new WeakMap();

export function render({ data, parentElement, setTriggerValue }) {
  let picture = pictures.get(parentElement);
  if (!picture) {
    picture = mount(parentElement);
    pictures.set(parentElement, picture);
    if (!data.early && !data.past) inherit(picture, data);
  }
  const changed = !picture.data || picture.data.color_by !== data.color_by || picture.data.group !== data.group || picture.data.cluster !== data.cluster || span(picture.data) !== span(data);
  if (picture.data && span(picture.data) !== span(data)) picture.frame = null; // never the past under the name of now
  if (picture.data && picture.data.cluster !== data.cluster) picture.layout = picture.frame = null; // never one cluster's under the name of another
  picture.data = data;
  picture.open = (cell) => setTriggerValue("open", { node: cell.node, gpu: cell.gpu });
  picture.move = (atMs) => setTriggerValue("moment", Math.round(atMs / 1000));
  picture.player.hidden = !data.past || data.past.from_s === data.past.to_s;
  if (changed) picture.polled = poll(picture);
  else draw(picture);
  return picture;
}

// What of the past is played: the moment within it is not part of it.
const span = (data) => (data.past ? (data.past.from_s === data.past.to_s ? `${data.past.at_s}` : `${data.past.from_s}-${data.past.to_s}`) : "");

// What was drawn before Streamlit's scripts ran (fleet_early.js) is drawn here again, and goes once that is done.
function inherit(picture, data) {
  const early = window.__drover_early;
  const before = early?.picture;
  if (!before) return;
  picture.before = before;
  picture.end = early.end;
  const same = before.data.color_by === data.color_by && before.data.group === data.group && before.data.cluster === data.cluster;
  if (!before.frame || !same) return;
  for (const name of ["data", "layout", "frame", "trouble", "at", "arrangedMs", "plan", "cells", "map", "of", "drawn"]) picture[name] = before[name];
  picture.timer = setTimeout(() => poll(picture), Math.max(0, before.nextMs - Date.now()));
}

function succeed(picture) {
  const { before, canvas, end } = picture;
  picture.before = null;
  const active = before.root.getRootNode().activeElement === before.canvas;
  end();
  if (active) canvas.focus();
}

export function unmount(parentElement) {
  const picture = pictures.get(parentElement);
  if (!picture) return;
  clearTimeout(picture.timer);
  clearInterval(picture.playing);
  picture.closed = true;
  picture.resized.disconnect();
  document.removeEventListener("visibilitychange", picture.woken);
  removeEventListener("drover_health", picture.counted);
  pictures.delete(parentElement);
}

function mount(parent) {
  const root = parent.querySelector(".fleet");
  const picture = {
    root, canvas: root.querySelector("canvas"), tip: root.querySelector(".tip"), legend: root.querySelector(".legend"),
    notice: root.querySelector(".notice"), player: root.querySelector(".player"), layout: null, frame: null, trouble: null, round: 0, at: null,
  };
  picture.canvas.addEventListener("mousemove", (event) => hover(picture, event));
  picture.canvas.addEventListener("mouseleave", () => { picture.tip.hidden = true; });
  picture.canvas.addEventListener("click", (event) => {
    const cell = under(picture, event);
    if (cell) picture.open(cell);
  });
  picture.canvas.addEventListener("keydown", (event) => steer(picture, event));
  picture.canvas.addEventListener("blur", () => left(picture));
  const [button, range] = [picture.player.querySelector("button"), picture.player.querySelector("input")];
  button.addEventListener("click", () => picture.code?.togglePlay(picture, draw));
  range.addEventListener("input", () => picture.code?.showFrame(picture, Number(range.value), draw));
  range.addEventListener("change", () => picture.past && picture.move(picture.past.times[Number(range.value)])); // let go: the page follows
  picture.resized = new ResizeObserver(() => draw(picture));
  picture.resized.observe(root);
  picture.woken = () => { if (!document.hidden && !(picture.data?.past && picture.frame)) poll(picture); };
  document.addEventListener("visibilitychange", picture.woken);
  picture.counted = (event) => recounted(picture, event.detail);
  addEventListener("drover_health", picture.counted);
  return picture;
}

// The frame has newer counts (frame.js): a picture that still shows others is asked for again at once, so that no node
// that fell silent looks healthy next to a count that says unknown. Where both come from one moment nothing is asked.
function recounted(picture, { cluster, counts, tsMs }) {
  const { frame, data } = picture;
  if (!frame || !data || data.past || picture.trouble || (data.cluster || "") !== cluster || frame.ts_ms >= tsMs) return;
  const mine = frame.legend.map(() => 0);
  for (const code of frame.health) mine[code] += 1;
  if (frame.legend.some((name, code) => mine[code] !== (counts[name] || 0))) poll(picture);
}

async function poll(picture) {
  clearTimeout(picture.timer);
  const round = ++picture.round; // an answer for another colour that comes late is dropped
  if (!document.hidden) {
    try {
      const { group, cluster } = picture.data;
      const moves = group === "job" && !picture.data.past && Date.now() - picture.arrangedMs > JOBS_MS; // jobs come and go
      const lacking = !picture.layout || picture.layout.group !== group || moves;
      const arranged = lacking ? fetchLayout(group, cluster) : null; // at once, together with the frame
      arranged?.catch(() => undefined);
      const { past } = picture.data;
      if (past) picture.code ||= await import("./fleet_past.js"); // who looks at now needs none of it
      const frame = past ? await picture.code.loadPast(picture, (path) => ask(path), within(cluster)) : await fetchFrame(picture.data.color_by, cluster);
      if (round !== picture.round) return;
      if (arranged || picture.layout.version !== frame.layout_version) {
        picture.layout = await (arranged || fetchLayout(group, cluster));
        picture.arrangedMs = Date.now();
        if (round !== picture.round) return;
      }
      if (picture.layout.version === frame.layout_version) picture.frame = frame;
      picture.trouble = frame.trouble;
    } catch (error) {
      if (round !== picture.round) return;
      picture.trouble = error.trouble || "The console's own server does not answer: is drover-dashboard running?";
    }
    draw(picture);
  }
  if (picture.data.past && !picture.trouble) return; // the past does not change
  const everyS = picture.trouble ? 1 : picture.data.every_s; // what is back must be seen to be back
  picture.nextMs = Date.now() + everyS * 1000;
  if (!picture.closed) picture.timer = setTimeout(() => poll(picture), everyS * 1000);
}

// The page's head has asked for the first picture already (early.js); what was asked then is taken once.
function early(what, of, wanted, cluster) {
  const found = window.__drover_early;
  if (!found || !found[what] || found[of] !== wanted || found.cluster !== (cluster || "") || Date.now() - found.at > EARLY_MS) return null;
  const answer = found[what];
  found[what] = null;
  return answer;
}

async function ask(path, asked) {
  const reply = await (asked || fetch(new URL(path, document.baseURI), { cache: "no-store" }));
  if (reply.ok) return reply;
  const error = new Error(path);
  error.trouble = (await reply.json()).trouble;
  throw error;
}

const within = (cluster) => (cluster ? `&cluster=${encodeURIComponent(cluster)}` : "");

const fetchLayout = async (group, cluster) =>
  (await ask(`drover/layout?group=${group}${within(cluster)}`, early("layout", "group", group, cluster))).json();

// A frame: health[n], cells[n], float32 values[n], each part padded to 4 bytes; what they are is in a header of the answer.
async function fetchFrame(colorBy, cluster) {
  const asked = early("frame", "color", colorBy, cluster);
  const reply = await ask(`drover/picture?color_by=${encodeURIComponent(colorBy)}${within(cluster)}`, asked);
  const frame = JSON.parse(reply.headers.get("Drover-Frame"));
  const body = await reply.arrayBuffer();
  const padded = (size) => (size + 3) & ~3;
  frame.health = new Uint8Array(body, 0, frame.gpus);
  let offset = padded(frame.gpus);
  if (frame.metric) {
    frame.cells = new Uint8Array(body, offset, frame.gpus);
    offset += padded(frame.gpus);
    frame.values = frame.has_values ? new Float32Array(body, offset, frame.gpus) : null;
  }
  return frame;
}

function draw(picture) {
  const { root, canvas, frame, data } = picture;
  picture.notice.textContent = picture.trouble ? `${frame ? `Old picture, as of ${clock(frame.ts_ms)}. ` : ""}${picture.trouble}` : "";
  picture.notice.hidden = !picture.trouble;
  picture.notice.classList.toggle("over", Boolean(frame)); // over it: no cell moves away below a pointer
  canvas.classList.toggle("stale", Boolean(picture.trouble));
  if (picture.before && picture.trouble && !frame) succeed(picture);
  if (!frame || !root.clientWidth) return;
  const theme = themeOf(root);
  const shade = theme.dark ? "dark" : "light";
  const ratio = window.devicePixelRatio || 1;
  const width = root.clientWidth;
  const room = data.height - 46;
  const { of } = picture;
  const moved = !of || of.layout !== picture.layout || of.width !== width || of.room !== room || of.ratio !== ratio;
  if (moved) { // 100,000 places: not at each refresh
    picture.plan = arrange(picture.layout, width, room);
    picture.cells = place(picture.layout, picture.plan);
    picture.of = { layout: picture.layout, width, room, ratio };
  }
  const { plan } = picture;
  const height = plan.height;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  if (moved) picture.map = fits(plan, ratio) ? pixelMap(picture.cells, plan, ratio, canvas.width, canvas.height) : null;
  canvas.style.height = `${height}px`;
  const paint = canvas.getContext("2d");
  const ramp = rampColors();
  const { before, drawn } = picture;
  if (before && drawn && drawn.frame === frame && drawn.shade === shade && drawn.width === canvas.width && drawn.height === canvas.height) {
    paint.drawImage(before.canvas, 0, 0); // what this one would draw, to the pixel
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
  } else {
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    fill(picture, paint, theme, shade, ramp);
  }
  picture.drawn = { frame, shade, width: canvas.width, height: canvas.height };
  legend(picture, theme, shade, ramp);
  publish(picture);
  const chosen = picture.at === null ? null : picture.cells[picture.at];
  if (chosen) ring(paint, plan, chosen, theme);
  if (picture.before) succeed(picture);
}

// All cells, their labels and their signs, on an empty canvas.
function fill(picture, paint, theme, shade, ramp) {
  const { frame, data, plan, map } = picture;
  const hatch = hatching(paint, theme);
  const looks = frame.legend.map((name) => data.palette.health[name] || data.palette.health[UNKNOWN]);
  const gap = plan.cellHeight >= 5 ? 1 : 0;
  if (map) {
    const colors = new Uint32Array(256);
    if (frame.metric) ramp.forEach((color, code) => { if (code) colors[code] = pixelOf(color); });
    else frame.legend.forEach((name, code) => { if (name !== UNKNOWN) colors[code] = pixelOf(looks[code][shade]); });
    fillPixels(paint, map, frame.metric ? frame.cells : frame.health, colors, hatch);
  }
  labels(paint, plan, theme);
  const marked = [];
  const byFill = new Map(); // a change of colour costs more than a cell: all cells of one colour together
  for (const cell of picture.cells) {
    const code = frame.health[cell.index];
    const name = frame.legend[code] || UNKNOWN;
    if (name !== HEALTHY && name !== UNKNOWN) marked.push([cell, looks[code]]);
    if (map) continue;
    const absent = frame.metric ? frame.cells[cell.index] === 0 : name === UNKNOWN;
    const key = absent ? -1 : frame.metric ? frame.cells[cell.index] : code;
    const same = byFill.get(key);
    if (same) same.push(cell);
    else byFill.set(key, [cell]);
  }
  for (const [key, cells] of byFill) {
    paint.fillStyle = key === -1 ? hatch : frame.metric ? ramp[key] : looks[key][shade];
    for (const cell of cells) paint.fillRect(cell.x, cell.y, plan.cellWidth - gap, plan.cellHeight - gap);
  }
  for (const [cell, look] of marked) mark(paint, plan, cell, look, shade, Boolean(frame.metric), gap);
}

// Where the keyboard is.
function ring(paint, plan, cell, theme) {
  paint.lineWidth = 3;
  paint.strokeStyle = theme.text;
  paint.strokeRect(cell.x - 3, cell.y - 3, plan.cellWidth + 5, plan.cellHeight + 5);
}

function steer(picture, event) {
  if (!picture.frame || !picture.plan || event.ctrlKey || event.metaKey || event.altKey) return;
  const { cells, frame, plan } = picture;
  if (event.key === "Enter") {
    if (cells[picture.at]) picture.open(cells[picture.at]);
    return;
  }
  const at = next(cells, picture.at, event.key, (cell) => ![HEALTHY, UNKNOWN].includes(frame.legend[frame.health[cell.index]] || UNKNOWN));
  if (at === null) return;
  event.preventDefault();
  picture.at = at;
  draw(picture);
  const cell = cells[at];
  showTip(picture, cell, cell.x + plan.cellWidth, picture.canvas.offsetTop + cell.y);
}

function left(picture) {
  picture.tip.hidden = true;
  if (picture.at === null) return;
  picture.at = null;
  draw(picture);
}

// A state is shown by its sign where a cell has room for one, else by a ring that no single small cell can hide behind.
function mark(paint, plan, cell, look, shade, onRamp, gap) {
  const [width, height] = [plan.cellWidth - gap, plan.cellHeight - gap];
  if (onRamp || height < 11) {
    const room = height < 11 ? 2 : 0;
    paint.lineWidth = 2;
    paint.strokeStyle = look[shade];
    paint.strokeRect(cell.x - room, cell.y - room, width + 2 * room, height + 2 * room);
  }
  if (height < 11) return;
  paint.font = `bold ${Math.min(16, Math.round(height * 0.75))}px sans-serif`;
  paint.textAlign = "center";
  paint.textBaseline = "middle";
  paint.lineWidth = 3;
  if (onRamp) {
    paint.strokeStyle = "#fff";
    paint.strokeText(look.sign, cell.x + width / 2, cell.y + height / 2 + 1);
  }
  paint.fillStyle = "#111";
  paint.fillText(look.sign, cell.x + width / 2, cell.y + height / 2 + 1);
}

function labels(paint, plan, theme) {
  paint.fillStyle = theme.text;
  paint.textAlign = "left";
  paint.textBaseline = "alphabetic";
  for (const label of plan.labels) {
    paint.font = label.strong ? "600 12px sans-serif" : "11px sans-serif";
    paint.globalAlpha = label.strong ? 1 : 0.75;
    paint.fillText(label.text, label.x, label.y, label.room);
  }
  paint.globalAlpha = 1;
}

function hatching(paint, theme) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const brush = tile.getContext("2d");
  brush.fillStyle = theme.dark ? "#20262d" : "#eceef1";
  brush.fillRect(0, 0, 6, 6);
  brush.strokeStyle = theme.dark ? "#8b929c" : "#7d838c";
  brush.lineWidth = 1.2;
  brush.beginPath();
  for (const shift of [-6, 0, 6]) { brush.moveTo(shift, 6); brush.lineTo(shift + 6, 0); }
  brush.stroke();
  return paint.createPattern(tile, "repeat");
}

function rampColors() {
  const colors = [""];
  for (let step = 0; step < 255; step += 1) {
    const at = (step / 254) * (RAMP.length - 1);
    const low = Math.min(Math.floor(at), RAMP.length - 2);
    const mix = RAMP[low].map((part, k) => Math.round(part + (RAMP[low + 1][k] - part) * (at - low)));
    colors.push(`rgb(${mix.join(",")})`);
  }
  return colors;
}

function legend(picture, theme, shade, ramp) {
  const { frame, data } = picture;
  const parts = [];
  if (frame.metric) {
    const bar = element("span", "ramp");
    bar.style.background = `linear-gradient(90deg, ${[1, 64, 128, 192, 255].map((k) => ramp[k]).join(",")})`;
    parts.push(element("span", "", frame.low_text), bar, element("span", "", frame.high_text));
    parts.push(swatch("hatched", "", "", "absent"));
  }
  const counts = frame.legend.map(() => 0);
  for (const code of frame.health) counts[code] = (counts[code] || 0) + 1;
  frame.legend.forEach((name, code) => {
    if (!counts[code] || (frame.metric && (name === HEALTHY || name === UNKNOWN))) return;
    const look = data.palette.health[name] || data.palette.health[UNKNOWN];
    parts.push(swatch(name === UNKNOWN ? "hatched" : "", look[shade], look.sign, `${name} ${counts[code].toLocaleString()}`));
  });
  parts.push(element("span", "asof", data.past ? `the past, as of ${clock(frame.ts_ms)}` : `as of ${clock(frame.ts_ms)}`));
  picture.legend.replaceChildren(...parts);
  picture.root.classList.toggle("dark", theme.dark);
}

function swatch(kind, color, sign, text) {
  const item = element("span", "item");
  const box = element("span", `swatch ${kind}`, sign);
  if (color && !kind) box.style.background = color;
  item.append(box, document.createTextNode(text));
  return item;
}

function under(picture, event) {
  if (!picture.frame || !picture.plan) return null;
  const box = picture.canvas.getBoundingClientRect();
  return hit(picture.cells, picture.plan, event.clientX - box.left, event.clientY - box.top);
}

function hover(picture, event) {
  const cell = under(picture, event);
  picture.tip.hidden = !cell;
  picture.canvas.style.cursor = cell ? "pointer" : "default";
  if (!cell) return;
  const box = picture.root.getBoundingClientRect();
  showTip(picture, cell, event.clientX - box.left, event.clientY - box.top);
}

// Show what a cell is, next to (x, y) of the picture.
function showTip(picture, cell, x, y) {
  const { frame, tip, root } = picture;
  tip.hidden = false;
  const health = frame.legend[frame.health[cell.index]] || UNKNOWN;
  const known = picture.known?.cell === cell && Date.now() - picture.known.at < KNOWN_MS ? picture.known : null;
  const said = known?.text || (health === UNKNOWN ? `unknown: ${picture.data.past ? "not known of then" : "no data received"}` : health);
  tip.replaceChildren(element("b", "", `${cell.node} GPU ${cell.gpu}`), element("div", "more", said));
  if (frame.metric) tip.append(element("div", "", `${frame.label}: ${valueText(frame, cell.index)}`));
  const group = cell.group && cell.group !== cell.rack ? ` · ${cell.group}` : "";
  if (!known && !picture.data.past) askAbout(picture, cell, x, y); // of now
  tip.append(element("div", "faint", `${cell.rack}${group} · click to open`));
  tip.style.left = `${Math.min(x + 14, root.clientWidth - Math.max(200, tip.offsetWidth))}px`;
  tip.style.top = `${y > root.clientHeight / 2 ? y - tip.offsetHeight - 10 : y + 14}px`;
}

// Cause, since when, and who holds it: asked of the collector for the one cell that is looked at.
function askAbout(picture, cell, x, y) {
  clearTimeout(picture.asking);
  picture.asking = setTimeout(async () => {
    const { cluster } = picture.data, name = `${cell.node} GPU ${cell.gpu}`;
    let text = "";
    try {
      const reply = await ask(`drover/search?text=${encodeURIComponent(`${cell.node}:${cell.gpu}`)}${within(cluster)}`);
      const hit = (await reply.json()).hits.find((one) => one.kind === "gpu" && one.name === name);
      text = hit ? hit.detail.replace(/\d{4}-\d\d-\d\dT[\d:.]+Z/g, (time) => clock(Date.parse(time))) : "";
    } catch { /* the picture itself says what does not answer */ }
    picture.known = { cell, text, at: Date.now() };
    if (text && !picture.tip.hidden && picture.tip.firstChild?.textContent === name) showTip(picture, cell, x, y);
  }, ASK_MS);
}

// Without exact values (a very large fleet) the colour's own step is shown, marked as about.
function valueText(frame, index) {
  const step = frame.cells[index];
  if (step === 0) return "absent";
  const value = frame.values ? frame.values[index] : frame.low + ((step - 1) / 254) * (frame.high - frame.low);
  const scaled = value * frame.scale;
  const digits = Math.abs(scaled) >= 100 || Number.isInteger(scaled) ? 0 : Math.abs(scaled) >= 10 ? 1 : 3;
  const text = scaled.toLocaleString([], { maximumFractionDigits: digits });
  return `${frame.values ? "" : "about "}${text} ${frame.unit}`.trim();
}

// For tests and for scripts of operators: where each GPU is on the page, and what it shows.
function publish(picture) {
  const { frame, plan, canvas } = picture;
  window.__drover_fleet = {
    early: Boolean(picture.data.early), tsMs: frame.ts_ms, colorBy: frame.metric || "health", stale: Boolean(picture.trouble),
    past: picture.data.past ? { frame: picture.past?.at, frames: picture.past?.times.length, playing: Boolean(picture.playing), bytes: picture.past?.bytes } : null,
    cells: () => {
      const box = canvas.getBoundingClientRect();
      return picture.cells.map((cell) => ({
        node: cell.node, gpu: cell.gpu, health: frame.legend[frame.health[cell.index]] || UNKNOWN,
        x: box.left + cell.x + plan.cellWidth / 2, y: box.top + cell.y + plan.cellHeight / 2,
      }));
    },
  };
}
