// One step of a person is one entry of the browser's history. Streamlit makes an entry whenever the address changes: two
// for a page that is opened with what it shall show, and one for what a page chooses by itself, so that Back only led to
// where one was sent on again. Here a change that no person asked for since the last one amends the entry.
(() => {
  const root = new URL(".", location.href).href;
  // Where Streamlit's own addresses are; otherwise it asks below the page's path first, and the browser's console has a 404.
  window.__streamlit = { BACKEND_BASE_URL: root };
  let asked = false, titled = document.title;
  for (const kind of ["pointerdown", "click", "keydown"]) {
    addEventListener(kind, () => { asked = true; titled = document.title; }, { capture: true, passive: true });
  }
  addEventListener("popstate", () => { asked = false; }, { capture: true });
  const push = history.pushState.bind(history);
  history.pushState = (state, unused, url) => {
    if (asked && new URL(url, location.href).href !== location.href) {
      const next = document.title;  // Streamlit sets it before or after; before, it would name the entry that is left
      document.title = titled;
      push(state, unused, url);
      document.title = next;
    } else history.replaceState(state, unused, url);
    asked = false;
  };
})();
