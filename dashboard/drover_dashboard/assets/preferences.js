// What this browser remembers of its viewer: theme, time zone and name. In its local storage, and never a secret.
// It runs in the page's head, before Streamlit's scripts: they read the theme and the zone when they begin.
(() => {
  const NAMES = { theme: ["System", "Light", "Dark"] };
  const VERSION = 2; // of Streamlit's own note of a theme, which it keeps for each path
  const read = (name) => {
    try {
      const found = localStorage.getItem(`drover.${name}`) || "";
      return NAMES[name] && !NAMES[name].includes(found) ? "" : found;
    } catch { return ""; } // a browser that keeps nothing
  };
  const write = (name, value) => {
    try {
      if (value) localStorage.setItem(`drover.${name}`, value);
      else localStorage.removeItem(`drover.${name}`);
    } catch { /* nothing is kept */ }
  };
  const theme = read("theme");
  try {
    const own = `stActiveTheme-${location.pathname}-v${VERSION}`;
    if (theme && theme !== "System") localStorage.setItem(own, JSON.stringify(theme));
    else if (localStorage.getItem(own)) localStorage.removeItem(own);
  } catch { /* nothing is kept */ }
  const system = new Intl.DateTimeFormat().resolvedOptions().timeZone;
  const zone = read("zone");
  if (zone && Intl.supportedValuesOf && [...Intl.supportedValuesOf("timeZone"), "UTC"].includes(zone)) {
    // Streamlit reports this zone to the server, which writes the times of the pages in it.
    const options = Intl.DateTimeFormat.prototype.resolvedOptions;
    Intl.DateTimeFormat.prototype.resolvedOptions = function resolvedOptions() {
      const found = options.call(this);
      return found.timeZone === system ? { ...found, timeZone: zone } : found;
    };
    window.__drover_zone = zone;
  }
  window.__drover_preferences = {
    read, write, system,
    dark: () => (theme === "Dark" || (theme !== "Light" && matchMedia("(prefers-color-scheme: dark)").matches)),
  };
})();
