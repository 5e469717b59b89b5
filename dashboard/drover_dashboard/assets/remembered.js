// Carries the viewer's name between this browser's memory (preferences.js) and the forms that ask for it.
const listeners = new WeakMap();

export function render({ data, parentElement, setStateValue }) {
  const kept = window.__drover_preferences;
  if (data.name) kept.write("name", data.name);
  else if (kept.read("name")) setStateValue("name", kept.read("name"));
  removeEventListener("drover_name", listeners.get(parentElement));
  const changed = () => setStateValue("name", kept.read("name"));
  listeners.set(parentElement, changed);
  addEventListener("drover_name", changed);
}

export function unmount(parentElement) {
  removeEventListener("drover_name", listeners.get(parentElement));
  listeners.delete(parentElement);
}
