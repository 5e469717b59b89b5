// The frame of every page: product, cluster, mode and the page's name; what waits for a person; search; a bell for what
// opened since the last look; preferences. It stands before Streamlit's scripts run, and asks for itself.
import { clock, element } from "./common.js";
import { finder } from "./frame_search.js";

const EVERY_MS = 2_000;
const NEWS_SHOWN = 20;
const given = JSON.parse(document.getElementById("drover_frame_given").textContent);
const kept = window.__drover_preferences;
const root = new URL(".", location.href);
const at = (path) => new URL(path, root);
const asked = () => (given.several ? new URLSearchParams(location.search).get("cluster") || "" : "");
const of = (cluster) => (cluster ? `cluster=${encodeURIComponent(cluster)}` : "");

// Open a page of the console in its place, as Back does: the address leads, and Streamlit follows it.
export function go(href) {
  history.pushState(null, "", at(href));
  dispatchEvent(new PopStateEvent("popstate", { state: null }));
}

function mount() {
  const host = document.createElement("div");
  host.id = "drover_frame";
  const shadow = host.attachShadow({ mode: "open" });
  shadow.append(document.getElementById("drover_frame_parts").content.cloneNode(true));
  document.body.append(host);
  const part = (name) => shadow.querySelector(name);
  const frame = { host, shadow, part, data: null, cluster: asked(), known: null, timer: 0, signedIn: false };
  for (const name of [".find", ".bell"]) part(name).hidden = given.sign_in; // until somebody has signed in
  const shade = () => host.classList.toggle("dark", kept.dark());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", shade);
  shade();
  part(".product").href = at("");
  shadow.addEventListener("click", (event) => follow(event));
  preferences(frame);
  const search = finder(frame, { at, asked, of, go, pages: given.pages, kept });
  part(".find").addEventListener("click", search.open);
  addEventListener("keydown", (event) => hotkey(event, search), { capture: true });
  part("#news").addEventListener("toggle", (event) => (event.newState === "open" ? news(frame) : looked(frame)));
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(frame); });
  new MutationObserver(() => named(frame)).observe(document.head, { subtree: true, childList: true, characterData: true });
  named(frame);
  const picture = window.__drover_early?.frame; // the fleet's picture comes first
  Promise.resolve(picture).catch(() => undefined).then(() => poll(frame));
}

// A link of the frame stays in the page unless a new tab is asked for.
function follow(event) {
  const link = event.composedPath().find((one) => one.tagName === "A");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  for (const panel of event.currentTarget.querySelectorAll(".panel:popover-open")) panel.hidePopover();
  go(link.href);
}

function hotkey(event, search) {
  const [target] = event.composedPath();
  const writes = target.matches?.("input, textarea, select, [contenteditable=true]");
  const slash = event.key === "/" && !writes && !event.ctrlKey && !event.metaKey && !event.altKey;
  if (!slash && !(event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.shiftKey)) return;
  event.preventDefault();
  event.stopImmediatePropagation();
  search.open();
}

// The page's name is that of its tab, without the product's.
function named(frame) {
  const [name, product] = document.title.split(/ · (?=Drover$)/);
  const path = location.pathname.slice(root.pathname.length);
  const usual = given.sign_in ? "" : given.pages.find((page) => page.path === path)?.title || "";
  put(frame.part("h1"), product ? name : usual);
  const begins = Boolean(product) && !frame.signedIn;
  frame.signedIn ||= Boolean(product);
  if (begins && given.sign_in) poll(frame);
  if (asked() !== frame.cluster) {
    frame.cluster = asked();
    frame.data = frame.known = null; // never one cluster's under the name of another
    poll(frame);
  }
}

async function poll(frame) {
  clearTimeout(frame.timer);
  const { cluster } = frame;
  if (!document.hidden && (frame.signedIn || !given.sign_in)) {
    let data;
    try {
      const reply = await fetch(at(`drover/frame?${of(cluster)}`), { cache: "no-store" });
      data = reply.status === 403 ? { signed_out: true } : await reply.json();
    } catch {
      data = { ...frame.data, trouble: "The console's own server does not answer", link: "" };
    }
    if (cluster === frame.cluster) show(frame, data);
  }
  clearTimeout(frame.timer);
  frame.timer = setTimeout(() => poll(frame), EVERY_MS);
}

function show(frame, data) {
  const { part } = frame;
  frame.data = data;
  const scope = of(frame.cluster) && `?${of(frame.cluster)}`;
  for (const name of [".find", ".bell"]) part(name).hidden = Boolean(data.signed_out);
  put(part(".cluster"), data.cluster || "");
  part(".cluster").href = at(`./${scope}`);
  part(".cluster").title = data.target ? `Its Fleet page; collector ${data.target}` : "";
  put(part(".mode"), data.mode || "");
  part(".mode").className = `mode ${data.mode || ""}`;
  part(".mode").title = data.mode_text || "";
  const waits = part(".waits");
  waits.hidden = !data.pending;
  if (data.pending && waits.dataset.count !== String(data.pending)) {
    waits.dataset.count = data.pending;
    waits.replaceChildren(`${data.pending} `, element("span", "long", data.pending === 1 ? "decision " : "decisions "), data.pending === 1 ? "waits" : "wait");
    waits.title = `${data.pending} ${data.pending === 1 ? "decision waits" : "decisions wait"} for a person: approve or reject`;
  }
  waits.href = at(data.cluster || !given.several ? `policy${scope}` : "");
  const trouble = part(".trouble");
  trouble.hidden = !data.trouble;
  put(trouble, data.trouble || "");
  trouble.title = data.trouble_text || data.trouble || "";
  trouble.href = at(`system${scope}`);
  bell(frame, data);
  if (data.health) dispatchEvent(new CustomEvent("drover_health", { detail: { cluster: frame.cluster, counts: data.health, tsMs: data.ts_ms } }));
}

const seenName = (frame) => `seen.${frame.cluster || frame.data?.cluster || ""}`;
// What a colleague acknowledged or silenced is listed and not counted. What opened and closed between two looks counts;
// who has never looked missed nothing of it.
const after = (one, seenMs) => !one.calm && one.opened_ms > seenMs;
const overSince = (frame) => {
  const seenMs = Number(kept.read(seenName(frame)) || 0);
  return seenMs ? (frame.data?.over || []).filter((one) => after(one, seenMs)) : [];
};
const unseen = (frame) => {
  const seenMs = Number(kept.read(seenName(frame)) || 0);
  return [...(frame.data?.opened || []).filter((one) => after(one, seenMs)), ...overSince(frame)];
};

function bell(frame, data) {
  const found = unseen(frame), count = frame.part(".count");
  count.hidden = !found.length;
  put(count, found.length > 99 ? "99+" : String(found.length));
  const worst = ["critical", "warning", "info"].find((word) => found.some((one) => one.severity === word));
  count.className = `count ${worst || ""}`;
  frame.part(".bell").hidden = Boolean(data.signed_out) || (given.several && !frame.cluster); // of all clusters nobody asks
  const said = !data.opened ? "What is open is not known" : found.length ? `${found.length} ${found.length === 1 ? "incident" : "incidents"} opened since your last look` : data.judged === false ? "Nothing is judged yet: what is open is not known" : "No incident opened since your last look";
  const button = frame.part(".bell");
  if (button.title !== said) {
    button.title = said;
    button.setAttribute("aria-label", said);
  }
  if (!data.opened) return;
  const fresh = frame.known ? data.opened.filter((one) => !frame.known.has(one.id)) : [];
  frame.known = new Set([...(frame.known || []), ...data.opened.map((one) => one.id)]);
  if (fresh.length) put(frame.part(".said"), `New: ${fresh[0].title}${fresh.length > 1 ? `, and ${fresh.length - 1} more` : ""}`);
}

// What is open, what is new first; it counts as seen when the list is closed.
function news(frame) {
  const panel = frame.part("#news"), list = frame.data?.opened;
  const fresh = new Set(unseen(frame).map((one) => one.id));
  const head = element("h2", "", frame.part(".bell").title);
  if (!list) return panel.replaceChildren(head, element("p", "", "The collector does not answer."));
  const sorted = [...list, ...overSince(frame)].sort((a, b) => fresh.has(b.id) - fresh.has(a.id) || b.opened_ms - a.opened_ms);
  const rows = sorted.slice(0, NEWS_SHOWN).map((one) => {
    const times = one.closed_ms ? `opened ${clock(one.opened_ms)}, over ${clock(one.closed_ms)}` : `opened ${clock(one.opened_ms)}`;
    const row = element("a", "news"), sub = element("span", "sub", [one.severity, times, one.handled].filter(Boolean).join(" · "));
    row.href = at(one.href);
    row.append(one.title, sub);
    if (fresh.has(one.id)) sub.append(element("span", "new", "new"));
    return row;
  });
  const rest = frame.data.open_total - sorted.slice(0, NEWS_SHOWN).filter((one) => !one.closed_ms).length;
  const all = element("a", "news", rest > 0 ? `${rest} more open incidents` : "All incidents");
  all.href = at(`incidents${of(frame.cluster) && `?${of(frame.cluster)}`}`);
  const unknown = frame.data.over ? "" : element("p", "", "What opened and closed meanwhile is not known.");
  panel.replaceChildren(head, ...rows, rows.length ? "" : element("p", "", frame.data.judged === false ? "The collector has judged nothing yet." : "No open incident."), unknown, all);
  frame.lookedMs = frame.data.ts_ms;
}

function looked(frame) {
  if (!frame.lookedMs || !frame.data) return;
  kept.write(seenName(frame), String(frame.lookedMs));
  bell(frame, frame.data);
}

function preferences(frame) {
  const field = (name) => frame.part(`#preferences [name=${name}]`);
  frame.part("#preferences").addEventListener("beforetoggle", () => listZones(field("zone")), { once: true });
  frame.part("#preferences .name").hidden = !given.asks_name;
  for (const name of ["theme", "zone", "name"]) {
    if (name !== "zone") field(name).value = kept.read(name);
    field(name).addEventListener("change", () => {
      kept.write(name, field(name).value.trim());
      if (name === "name") dispatchEvent(new CustomEvent("drover_name"));
      else location.reload(); // Streamlit reads both when it starts
    });
  }
}

// 400 of them: not before somebody looks.
function listZones(field) {
  for (const [value, text] of [["", `this browser's: ${kept.system}`], ["UTC", "UTC"], ...(Intl.supportedValuesOf?.("timeZone") || []).map((zone) => [zone, zone])]) {
    field.append(Object.assign(element("option", "", text), { value }));
  }
  field.value = kept.read("zone");
}

function put(part, text) {
  if (part.textContent !== text) part.textContent = text; // what stays is not announced again
}

if (![...new URLSearchParams(location.search).keys()].some((name) => name.startsWith("embed"))) {
  if (document.body) mount();
  else document.addEventListener("DOMContentLoaded", mount);
}
