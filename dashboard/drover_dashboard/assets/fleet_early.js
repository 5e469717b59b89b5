// The fleet's picture before Streamlit's scripts have run: the same drawing of the same answers, at the place where the
// component will stand, until that has drawn its own (fleet.js). Where anything is not as expected there is none.
import { render, unmount } from "./fleet.js";

const LOOK_MS = 100;
const MOST_MS = 20_000; // of a page that does not come

// What stands above it: the page's padding, the numbers (page.css keeps their room) and the lists to choose from.
const STYLE = `
:host { position: absolute; z-index: 1; pointer-events: none; left: calc(1.6 * var(--rem)); right: calc(1.6 * var(--rem)); top: calc(var(--above) + 42px + 6.9 * var(--rem)); }
:host(.several) { top: calc(var(--above) + 42px + 10 * var(--rem)); } /* below the name of the cluster */
.fleet { width: calc(100% * 1.35 / 2.35 - var(--rem)); pointer-events: auto; background: var(--st-background-color); }
:host { --above: calc(9.2 * var(--rem)); }
@media (min-width: 1292px) { :host { --above: calc(7.7 * var(--rem)); } }`;

export async function show(early) {
  if (!expected()) return;
  const answers = await Promise.all([early.frame, early.layout]);
  if (!answers.every((answer) => answer.ok) || !early.frame || !early.layout) return; // the component says why, or has them
  while (!document.body) await new Promise((next) => { setTimeout(next); });
  const { data, rem, themes } = early.given;
  const host = document.createElement("div");
  const theme = themes[window.__drover_preferences.dark() ? "dark" : "light"];
  for (const [name, value] of Object.entries({ ...theme, "--rem": `${rem}px` })) host.style.setProperty(name, value);
  host.style.height = `${data.height}px`;
  const shadow = host.attachShadow({ mode: "open" });
  const style = document.createElement("style");
  style.textContent = STYLE;
  shadow.append(document.getElementById("drover_fleet_early").content.cloneNode(true), style); // fleet.css, fleet.html
  document.body.append(host);
  const path = location.pathname;
  const end = () => {
    clearInterval(looked);
    unmount(shadow);
    host.remove();
    early.picture = null;
  };
  const began = Date.now();
  const looked = setInterval(() => {
    if (location.pathname !== path || Date.now() - began > MOST_MS || another()) end();
  }, LOOK_MS);
  const of = early.cluster ? { cluster: early.cluster } : {};
  const open = (_name, cell) => location.assign(new URL(`node?${new URLSearchParams({ ...of, ...cell })}`, document.baseURI));
  if (early.given.several) host.classList.add("several");
  early.picture = render({ data: { ...data, color_by: early.color, group: early.group, cluster: early.cluster, early: true }, parentElement: shadow, setTriggerValue: open });
  early.end = end;
  await early.picture.polled;
  await new Promise((next) => { requestAnimationFrame(() => setTimeout(next)); }); // it is on the screen
}

// A desk's screen (a phone has the list first), and Streamlit's usual frame.
function expected() {
  const embedded = [...new URLSearchParams(location.search).keys()].some((name) => name.startsWith("embed"));
  if (new URLSearchParams(location.search).has("at")) return false; // of the past
  return !embedded && matchMedia("(min-width: 1100px)").matches;
}

// The page's script has run, and there is no picture on it: who looks has to sign in first, or it failed.
function another() {
  const app = document.querySelector("[data-testid=stApp]");
  return app?.dataset.testScriptState === "notRunning" && !document.querySelector(".st-key-fleet_picture");
}
