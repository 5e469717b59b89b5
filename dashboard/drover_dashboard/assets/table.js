// Rows of text; some open something. Every text goes in as text, never as HTML: much of it comes from logs.
import { element, themeOf, worded } from "./common.js";

const tables = new WeakMap();
const watched = new WeakMap(); // of a table its newest data: whether it scrolls changes with its room too
const room = new ResizeObserver((sized) => sized.forEach(({ target }) => reachable(target, watched.get(target))));

export function render({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".rows");
  root.classList.toggle("dark", themeOf(root).dark);
  if (!watched.has(root)) room.observe(root);
  watched.set(root, data);
  const shown = JSON.stringify(data);
  if (tables.get(parentElement) === shown && root.firstChild) return reachable(root, data); // selection and scroll stay
  tables.set(parentElement, shown);
  root.classList.toggle("long", Boolean(data.height));
  root.style.setProperty("--tall", data.height && data.rows.length ? `${data.height}px` : "none");
  if (!data.rows.length) {
    root.replaceChildren(element("div", "empty", data.empty));
    reachable(root, data);
    return;
  }
  const scrolled = root.firstChild ? root.scrollTop : 0;
  const table = element("table");
  if (data.columns.some((column) => column.label)) table.append(head(data));
  table.append(body(data, setTriggerValue));
  root.replaceChildren(table);
  root.scrollTop = scrolled;
  reachable(root, data);
}

export function unmount(parentElement) {
  tables.delete(parentElement);
}

// What scrolls can be scrolled with the keyboard too, and a screen reader says what it is.
function reachable(root, data) {
  if (root.scrollHeight <= root.clientHeight + 1 && root.scrollWidth <= root.clientWidth + 1) {
    for (const name of ["tabindex", "role", "aria-label"]) root.removeAttribute(name);
    return;
  }
  root.tabIndex = 0;
  root.setAttribute("role", "region");
  root.setAttribute("aria-label", data.columns.map((column) => column.label).filter(Boolean).join(", ") || "table");
}

function head(data) {
  const line = element("tr");
  for (const column of data.columns) {
    const cell = element("th", column.align || "", column.label);
    cell.scope = "col";
    if (column.help) cell.title = column.help;
    line.append(cell);
  }
  const made = element("thead");
  made.append(line);
  return made;
}

function body(data, setTriggerValue) {
  const made = element("tbody");
  for (const row of data.rows) {
    const line = element("tr", [row.tone, row.href ? "opens" : "", row.id && row.id === data.selected ? "selected" : ""].join(" "));
    row.cells.forEach((cell, k) => line.append(cellOf(cell, data.columns[k] || {}, k === data.link_column ? row : null)));
    if (row.href) {
      line.addEventListener("click", (event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey || getSelection().toString()) return; // the link's own ways stay
        event.preventDefault();
        setTriggerValue("open", row.id);
      });
    }
    made.append(line);
  }
  return made;
}

function stroke(line) {
  const made = element("span", line.dashed ? "stroke dashed" : "stroke");
  made.style.setProperty("--light", line.light);
  made.style.setProperty("--dark", line.dark);
  return made;
}

function cellOf(cell, column, link) {
  const made = element("td", [column.align, column.wrap ? "wrap" : "", cell.kind].filter(Boolean).join(" "));
  if (cell.title) made.title = cell.title;
  const main = element(link && link.href ? "a" : "span", cell.badge ? `badge ${cell.badge}` : "main");
  worded(main, cell.text);
  if (link && link.href) main.href = new URL(link.href, document.baseURI);
  if (cell.line) made.append(stroke(cell.line));
  made.append(main);
  if (cell.mark) made.append(element("span", `mark ${cell.mark.tone}`, cell.mark.text));
  if (cell.sub) made.append(worded(element("div", "sub"), cell.sub));
  return made;
}
