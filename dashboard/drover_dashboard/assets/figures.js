// The fleet in figures: each leads to the page that says more; what is zero is quiet, what is faulty is not.
import { element } from "./common.js";

const shownData = new WeakMap();

export function render({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".figures");
  const shown = JSON.stringify(data);
  if (shownData.get(parentElement) === shown && root.firstChild) return; // nothing changed: focus stays
  shownData.set(parentElement, shown);
  data.figures.forEach((figure, number) => {
    const made = root.children[number] || root.appendChild(element("a", "figure"));
    made.className = `figure ${figure.tone} ${figure.small ? "small" : ""}`.trim();
    made.href = new URL(figure.href, document.baseURI);
    made.title = `${figure.label}: ${figure.value} ${figure.context}`;
    made.replaceChildren(element("div", "label", figure.label), element("div", "value", figure.value), element("div", "context", figure.context));
    made.onclick = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return; // the link's own ways stay
      event.preventDefault();
      setTriggerValue("open", figure.page);
    };
  });
}

export function unmount(parentElement) {
  shownData.delete(parentElement);
}
