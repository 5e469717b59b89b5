// Bandwidth from each GPU (rows) to each other one (columns): colour from 0 to the best, a sign where a way failed.
import { element, paint, rampBar, themeOf } from "./common.js";

export function render({ data, parentElement }) {
  const root = parentElement.querySelector(".matrix");
  root.classList.toggle("dark", themeOf(root).dark);
  const top = element("div", "top");
  top.append(element("span", "title", `Between its GPUs, ${data.unit || "GB/s"}`), element("span", "note", "from row to column"));
  if (data.empty) {
    root.replaceChildren(top, element("div", "empty", data.empty));
    return;
  }
  const table = element("table", "");
  const heads = element("tr", "");
  heads.append(element("th", "", ""), ...data.slots.map((slot) => element("th", "", `GPU ${slot}`)));
  table.append(heads);
  for (const from of data.slots) {
    const line = element("tr", "");
    line.append(element("th", "", `GPU ${from}`));
    for (const to of data.slots) line.append(from === to ? element("td", "self", "") : cell(data.cells[`${from}/${to}`], data.best));
    table.append(line);
  }
  root.replaceChildren(top, table, legend(data));
}

export function unmount() {}

function cell(found, best) {
  const made = element("td", "", found ? found.text : "absent");
  if (!found || found.value === null) {
    made.className = "absent";
    made.title = found ? found.title : "not measured";
    return made;
  }
  paint(made, best ? found.value / best : 0);
  if (found.verdict === "fail") made.textContent = `! ${found.text}`;
  made.className = found.verdict;
  made.title = found.title;
  return made;
}

function legend(data) {
  const line = element("div", "legend");
  const bar = element("span", "bar");
  bar.style.background = rampBar();
  line.append(element("span", "", "0"), bar, element("span", "", `${data.best.toLocaleString([], { maximumSignificantDigits: 4 })} ${data.unit}`));
  if (Object.values(data.cells).some((found) => found.verdict === "fail")) line.append(element("span", "failed", "! failed"));
  return line;
}
