// Search from anywhere: the collector answers, at most 20 rows; pages and actions are found here.
import { clock, element, zone } from "./common.js";

const WAIT_MS = 120; // after the last key
const RECENT = 5;
const TIMED = new Set(["node", "gpu", "job", "rack", "leaf"]); // their pages have charts
const OWN = 6; // pages and actions shown
const KINDS = { node: "Nodes", gpu: "GPUs", job: "Jobs", incident: "Incidents", xid: "XIDs", rack: "Racks", leaf: "Leaf switches", cluster: "Clusters", page: "Pages", action: "Actions", recent: "Opened lately" };
const ACTIONS = [
  ["Approve or reject a decision", "policy", "pending waits"], ["Silence an incident", "incidents", "mute acknowledge"],
  ["Drain, resume or probe a node", "node", "test take out return"], ["What would Drover have done", "policy", "backtest enforce"],
  ["What faults cost", "capacity", "gpu-hours lost money"], ["Is Drover itself healthy", "system", "agents store receivers log"],
];
const ISO = /\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z/g;

export function finder(frame, { at, asked, of, go, pages, kept }) {
  const dialog = frame.part("dialog"), field = dialog.querySelector("input"), list = dialog.querySelector("#hits"), note = dialog.querySelector(".note");
  const state = { rows: [], chosen: -1, round: 0, timer: 0 };
  const paths = new Set(pages.map((page) => page.path));
  const scoped = (path) => `${path || "./"}${asked() ? `?${of(asked())}` : ""}`;

  function own(text) {
    const words = text.toLowerCase();
    const found = pages.map((page) => ({ kind: "page", name: page.title, href: scoped(page.path) }));
    for (const [name, path, more] of ACTIONS) if (paths.has(path)) found.push({ kind: "action", name, href: scoped(path), more });
    const themes = { light: "Light", dark: "Dark", system: "" };
    for (const [name, value] of Object.entries(themes)) found.push({ kind: "action", name: `Theme: ${name}`, act: () => remember("theme", value), more: "colour color mode" });
    for (const [name, value] of [["UTC", "UTC"], [`this browser's zone, ${kept.system}`, ""]]) found.push({ kind: "action", name: `Times in ${name}`, act: () => remember("zone", value), more: "clock local" });
    const rank = (one) => (one.name.toLowerCase().startsWith(words) ? 0 : one.name.toLowerCase().includes(words) ? 1 : one.more?.includes(words) ? 2 : 3);
    return found.filter((one) => rank(one) < 3).sort((a, b) => rank(a) - rank(b)).slice(0, OWN);
  }

  function remember(name, value) {
    kept.write(name, value);
    location.reload();
  }

  // What a browser kept may be of another version, or a person's.
  function lately() {
    try {
      const found = JSON.parse(kept.read(`recent.${asked()}`) || "[]");
      return found.filter((one) => [one.kind, one.name, one.href].every((text) => typeof text === "string"));
    } catch { return []; }
  }

  function start() {
    const recent = lately().map((one) => ({ ...one, was: one.kind, kind: "recent" }));
    show([...recent, ...pages.map((page) => ({ kind: "page", name: page.title, href: scoped(page.path) }))], "");
  }

  function changed() {
    clearTimeout(state.timer);
    state.round += 1;
    const text = field.value.trim();
    if (!text) return start();
    state.timer = setTimeout(() => ask(text, state.round), WAIT_MS);
  }

  async function ask(text, round) {
    let answer;
    try {
      const reply = await fetch(at(`drover/search?text=${encodeURIComponent(text)}&${of(asked())}`), { cache: "no-store" });
      answer = await reply.json();
    } catch {
      answer = { trouble: "The console's own server does not answer: is drover-dashboard running?" };
    }
    if (round !== state.round || !dialog.open) return;
    const hits = answer.hits || [], mine = own(text);
    const said = answer.trouble || (!hits.length && !mine.length ? `Nothing in the fleet is called "${text}".` : answer.more ? "More match: type more of it." : "");
    show(hits.length && hits[0].exact ? [...hits, ...mine] : mine.length && mine[0].name.toLowerCase() === text.toLowerCase() ? [...mine, ...hits] : [...hits, ...mine], said);
  }

  function show(rows, said) {
    state.rows = rows;
    list.replaceChildren();
    let kind = "", group = list;
    rows.forEach((row, number) => {
      if (row.kind !== kind) {
        kind = row.kind;
        group = element("div");
        group.setAttribute("role", "group");
        group.setAttribute("aria-label", KINDS[kind] || kind);
        const head = element("div", "kind", KINDS[kind] || kind);
        head.setAttribute("aria-hidden", "true");
        group.append(head);
        list.append(group);
      }
      group.append(line(row, number));
    });
    note.textContent = said;
    choose(rows.findIndex(opens));
  }

  const opens = (row) => Boolean(row.href || row.act);

  function line(row, number) {
    const made = element("div", "hit"), text = element("span", "", row.name);
    made.id = `hit${number}`;
    made.setAttribute("role", "option");
    if (!opens(row)) made.setAttribute("aria-disabled", "true");
    made.append(element("span", `dot ${row.state || "none"}`));
    if (row.detail) text.append(element("span", "sub", row.detail.replace(ISO, (time) => when(Date.parse(time)))));
    made.append(text);
    made.addEventListener("mousemove", () => { if (state.chosen !== number && opens(row)) choose(number); });
    made.addEventListener("click", (event) => open(number, event.ctrlKey || event.metaKey));
    return made;
  }

  function choose(number) {
    state.chosen = number;
    for (const one of list.querySelectorAll(".hit")) one.setAttribute("aria-selected", String(one.id === `hit${number}`));
    const shown = list.querySelector(`#hit${number}`);
    if (shown) {
      field.setAttribute("aria-activedescendant", shown.id);
      shown.scrollIntoView({ block: "nearest" });
    } else field.removeAttribute("aria-activedescendant");
  }

  function step(by) {
    for (let k = 1; k <= state.rows.length; k += 1) {
      const number = (state.chosen + by * k + state.rows.length * 2) % state.rows.length;
      if (opens(state.rows[number])) return choose(number);
    }
  }

  function open(number, apart) {
    const row = state.rows[number];
    if (!row || !opens(row)) return;
    if (row.act) return row.act();
    const { name, href } = row, kind = row.was || row.kind, leads = TIMED.has(kind) ? sameTime(href) : href;
    if (kind !== "page" && kind !== "action") {
      const recent = lately().filter((one) => one.href !== href);
      kept.write(`recent.${asked()}`, JSON.stringify([{ kind, name, href }, ...recent].slice(0, RECENT)));
    }
    dialog.close();
    if (apart) window.open(at(leads));
    else go(leads);
  }

  // The time of the charts goes along, as with a click on a link.
  function sameTime(href) {
    const here = new URLSearchParams(location.search), there = new URL(at(href));
    for (const name of ["span", "open"]) if (here.has(name)) there.searchParams.set(name, here.get(name));
    return there.href;
  }

  field.addEventListener("input", changed);
  dialog.addEventListener("keydown", (event) => {
    event.stopPropagation(); // Streamlit has keys of its own
    if (event.key === "ArrowDown" || event.key === "ArrowUp") step(event.key === "ArrowDown" ? 1 : -1);
    else if (event.key === "Enter") open(state.chosen, event.ctrlKey || event.metaKey);
    else return;
    event.preventDefault();
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); }); // next to it
  return {
    open: () => {
      if (dialog.open || frame.data?.signed_out) return;
      field.value = "";
      dialog.showModal();
      field.focus();
      start();
    },
  };
}

const when = (ms) => (Date.now() - ms < 43_200_000 ? clock(ms) : new Date(ms).toLocaleDateString([], { month: "short", day: "numeric", timeZone: zone() }) + ` ${clock(ms)}`);
