// The fleet's picture is asked for and drawn (fleet_early.js) before Streamlit's scripts, which take a second: they are
// asked for after it, and begin when it is on the screen, or there will be none, or it takes long. fleet.js takes over.
(() => {
  const LONG_MS = 500;
  const given = GIVEN;
  const asked = new URLSearchParams(location.search);
  const cluster = given.several ? asked.get("cluster") || "" : "";
  const early = { color: asked.get("color") || "health", group: asked.get("group") || "rack", cluster, at: Date.now(), given };
  const all = given.several && !cluster; // the page of all clusters: strips in the place of the picture
  const of = cluster ? `&cluster=${encodeURIComponent(cluster)}` : "";
  const at = (path) => new URL(path, document.baseURI);
  const get = (path, name, value) => fetch(at(`drover/${path}?${name}=${encodeURIComponent(value)}${of}`), { cache: "no-store" });
  if (all) early.strips = fetch(at("drover/clusters"), { cache: "no-store" });
  else if (!asked.has("at")) { // a picture of the past is asked for when its page stands
    early.layout = get("layout", "group", early.group);
    early.frame = get("picture", "color_by", early.color);
  }
  for (const answer of [early.frame, early.layout, early.strips]) answer?.catch(() => undefined);
  window.__drover_early = early;
  const picture = (module) => module.includes("drover/assets/fleet"); // not needed where the strips are
  for (const module of all ? [...given.strips, ...given.modules.filter((module) => !picture(module))] : given.modules) {
    document.head.append(Object.assign(document.createElement("link"), { rel: "modulepreload", crossOrigin: "", href: at(module) }));
  }
  const shown = import(at(all ? given.strips[0] : given.modules[0])).then((found) => found.show(early)).catch(() => undefined); // the page says what is wrong
  const long = new Promise((next) => { setTimeout(next, LONG_MS); });
  const parsed = new Promise((next) => { document.addEventListener("DOMContentLoaded", next); });
  Promise.all([Promise.race([shown, long]), parsed]).then(() => import(at(given.entry)));
})();
