// A strip for each cluster: health, GPUs, open incidents, mode. It asks the console's own server what is known, which waits
// for no collector. What is old is grey and says of when it is; it is never drawn as if it were of now.
import { clock, element, themeOf } from "./common.js";

const made = new WeakMap();
const SEVERITIES = ["critical", "warning", "info"];
const ALONE_MS = 10_000; // the console's own server has not answered for so long: all strips are old
const number = (count) => count.toLocaleString();
const several = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

export function render({ data, parentElement, setTriggerValue }) {
  let strips = made.get(parentElement);
  if (!strips) {
    strips = { root: parentElement.querySelector(".clusters"), lines: new Map() };
    made.set(parentElement, strips);
    strips.woken = () => { if (!document.hidden) poll(strips); };
    document.addEventListener("visibilitychange", strips.woken);
    strips.data = data;
    strips.polled = poll(strips);
  }
  strips.data = data;
  strips.open = (name) => setTriggerValue("open", name);
  draw(strips);
  return strips;
}

export function unmount(parentElement) {
  const strips = made.get(parentElement);
  if (!strips) return;
  clearTimeout(strips.timer);
  strips.closed = true;
  document.removeEventListener("visibilitychange", strips.woken);
  made.delete(parentElement);
}

async function poll(strips) {
  clearTimeout(strips.timer);
  if (!document.hidden) {
    try {
      const asked = window.__drover_early?.strips;
      if (asked) window.__drover_early.strips = null;
      const reply = await (asked || fetch(new URL("drover/clusters", document.baseURI), { cache: "no-store", signal: AbortSignal.timeout(ALONE_MS / 2) }));
      if (!reply.ok) throw new Error(reply.status);
      strips.known = await reply.json();
      strips.receivedMs = Date.now();
    } catch { /* how old it is shows: draw() */ }
    draw(strips);
    window.__drover_early?.endStrips?.(strips);
  }
  if (!strips.closed) strips.timer = setTimeout(() => poll(strips), strips.data.every_s * 1000);
}

function draw(strips) {
  const { root, known, data } = strips;
  const theme = themeOf(root);
  root.classList.toggle("dark", theme.dark);
  if (!known) return;
  const alone = Date.now() - strips.receivedMs > ALONE_MS;
  const nowMs = known.now_ms + (Date.now() - strips.receivedMs);
  const lines = [total(known, data, theme, alone)];
  for (const cluster of known.clusters) lines.push(strip(strips, cluster, theme, nowMs, alone));
  lines.forEach((line, k) => { // what has not changed keeps its element, and the focus
    const before = root.children[k];
    if (!before) root.append(line);
    else if (!before.isEqualNode(line)) {
      const focused = before === before.getRootNode().activeElement;
      before.replaceWith(line);
      if (focused) line.focus();
    }
  });
  while (root.children.length > lines.length) root.lastChild.remove();
  root.onclick = (event) => {
    const line = event.target.closest("a.strip");
    if (!line || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    strips.open(line.dataset.cluster);
  };
}

function total(known, data, theme, alone) {
  const sum = known.total;
  const line = element("div", "strip total");
  const name = element("div");
  name.append(element("div", "name", "All clusters"), element("div", "faint", alone ? "the console's server does not answer" :
    `${sum.answering} of ${sum.clusters} answer`));
  const modes = Object.entries(sum.modes).map(([mode, count]) => `${mode}: ${count}`).join(", ");
  line.append(name, health(sum, data, theme, sum.uncounted ? ` and those of ${several(sum.uncounted, "cluster")}, not known` : ""),
    incidents(sum.incidents, sum.answering < sum.clusters || !sum.judged, sum.judged), waiting(sum.pending), element("div", "faint", modes));
  if (alone) line.classList.add("away");
  return line;
}

function strip(strips, cluster, theme, nowMs, alone) {
  const { data } = strips;
  const fresh = cluster.state === "fresh" && !alone;
  const line = element("a", `strip ${fresh ? SEVERITIES.find((severity) => cluster.incidents[severity]) || (cluster.notes.length ? "warning" : cluster.health.unknown || !cluster.judged ? "plain" : "well") : "away"}`);
  line.dataset.cluster = cluster.name;
  line.href = new URL(`${data.page || "."}?${new URLSearchParams({ ...data.kept, cluster: cluster.name })}`, document.baseURI);
  const name = element("div");
  name.append(element("div", "name", cluster.name));
  if (cluster.fleet) name.append(element("div", "faint", `fleet ${cluster.fleet}`));
  line.append(name);
  if (cluster.health) {
    const silent = cluster.nodes - cluster.reporting;
    line.append(health(cluster, data, theme, `, ${several(cluster.nodes, "node")}${silent ? `, ${number(silent)} silent` : ""}`, !fresh),
      incidents(cluster.incidents, false, cluster.judged), waiting(cluster.pending), mode(cluster));
  }
  if (!fresh) line.append(element("div", "trouble", trouble(cluster, nowMs, alone)));
  else for (const note of cluster.notes.slice(0, 2)) line.append(element("div", "note", note));
  return line;
}

function trouble(cluster, nowMs, alone) {
  if (cluster.state === "asked") return "Asked, no answer yet: nothing is known of it.";
  if (cluster.state === "never") return `Does not answer, and has not since this console started: nothing is known of it (${cluster.trouble}).`;
  const age = `Last known, of ${clock(cluster.as_of_ms)} (${ago(nowMs - cluster.as_of_ms)} ago)`;
  if (alone) return `${age}: the console's own server does not answer.`;
  return `${age}: its collector does not answer${cluster.trouble ? ` (${cluster.trouble})` : ""}.`;
}

function ago(ms) {
  const seconds = Math.max(0, Math.round(ms / 10_000) * 10);
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function health(of, data, theme, more, old) {
  const box = element("div", "health");
  const bar = element("div", "bar");
  const words = [];
  for (const [state, count] of Object.entries(of.health)) {
    if (!count) continue;
    const look = data.palette.health[state];
    const part = element("span", state);
    part.style.flexGrow = count;
    if (state !== "unknown") part.style.background = look[theme.dark ? "dark" : "light"];
    bar.append(part);
    words.push(`${look.label} ${number(count)}`);
  }
  bar.title = words.join(", ");
  box.append(bar, element("div", "faint", `${old ? "was: " : ""}${several(of.gpus, "GPU")}${more}: ${words.join(", ") || "none counted"}`));
  return box;
}

function incidents(open, partly, judged) { // judged: whether nothing found means that nothing is open
  const box = element("div", "incidents");
  const found = SEVERITIES.filter((severity) => open[severity]);
  found.forEach((severity, k) => {
    if (k) box.append(", ");
    box.append(element("span", severity, `${number(open[severity])} ${severity}`));
  });
  if (!found.length) box.append(judged ? "none open" : "not known");
  box.append(element("div", "faint", partly ? "open where it is known" : "open incidents"));
  return box;
}

function waiting(pending) {
  const box = element("div");
  if (pending) box.append(element("span", "waits", `${several(pending, "decision")} ${pending === 1 ? "waits" : "wait"} for you`));
  return box;
}

function mode(cluster) {
  const box = element("div");
  box.append(element("span", `mode ${cluster.mode}`, cluster.mode || "mode not known"));
  if (cluster.role && cluster.role !== "active") box.append(element("div", "faint", cluster.role));
  return box;
}
