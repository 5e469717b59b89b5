// The fleet's picture is asked for before any script of the page is there; fleet.js takes the answers.
(() => {
  const asked = new URLSearchParams(location.search);
  const early = { color: asked.get("color") || "health", group: asked.get("group") || "rack", at: Date.now() };
  const get = (path, name, value) => fetch(new URL(`drover/${path}?${name}=${encodeURIComponent(value)}`, document.baseURI), { cache: "no-store" });
  early.frame = get("picture", "color_by", early.color);
  early.layout = get("layout", "group", early.group);
  for (const answer of [early.frame, early.layout]) answer.catch(() => undefined);
  window.__drover_early = early;
})();
