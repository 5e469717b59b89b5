// The strips of all clusters before Streamlit's scripts have run, at the place where the component will stand. They go once
// that has drawn its own.
import { render, unmount } from "./clusters.js";

const MOST_MS = 20_000; // of a page that does not come
const LOOK_MS = 100;
const STYLE = `
:host { position: absolute; z-index: 1; left: calc(1.6 * var(--rem)); right: calc(1.6 * var(--rem)); top: calc(4 * var(--rem)); }
@media (max-width: 640px) { :host { left: calc(0.7 * var(--rem)); right: calc(0.7 * var(--rem)); top: calc(4.4 * var(--rem)); } }
.clusters { background: var(--st-background-color); }`;

export async function show(early) {
  while (!document.body) await new Promise((next) => { setTimeout(next); });
  const { rem, themes, every_s: everyS, data } = early.given;
  const host = document.createElement("div");
  const theme = themes[matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"];
  for (const [name, value] of Object.entries({ ...theme, "--rem": `${rem}px` })) host.style.setProperty(name, value);
  const shadow = host.attachShadow({ mode: "open" });
  const style = document.createElement("style");
  style.textContent = STYLE;
  shadow.append(document.getElementById("drover_clusters_early").content.cloneNode(true), style);
  document.body.append(host);
  const open = (_name, cluster) => location.assign(new URL(`.?${new URLSearchParams({ cluster })}`, document.baseURI));
  const strips = render({ data: { every_s: everyS || 2, palette: data.palette, page: "", kept: {} }, parentElement: shadow, setTriggerValue: open });
  const path = location.pathname, began = Date.now();
  const end = () => {
    clearInterval(looked);
    unmount(shadow);
    host.remove();
    early.endStrips = null;
  };
  early.endStrips = (drawn) => { if (drawn !== strips) end(); }; // the component has drawn what it knows
  const looked = setInterval(() => {
    const app = document.querySelector("[data-testid=stApp]");
    const other = app?.dataset.testScriptState === "notRunning" && !document.querySelector(".st-key-clusters");
    if (location.pathname !== path || Date.now() - began > MOST_MS || other) end();
  }, LOOK_MS);
  await strips.polled;
  await new Promise((next) => { requestAnimationFrame(() => setTimeout(next)); }); // it is on the screen
}
