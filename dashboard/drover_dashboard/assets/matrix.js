// Bandwidth from each GPU (rows) to each other one (columns): colour from 0 to the best, a sign where a way failed.
import { element, themeOf } from "./common.js";

const RAMP = [[0, 32, 76], [0, 66, 106], [86, 92, 108], [124, 123, 120], [165, 156, 116], [210, 193, 95], [255, 233, 69]]; // cividis

export function render({ data, parentElement }) {
  const root = parentElement.querySelector(".matrix");
  root.classList.toggle("dark", themeOf(root).dark);
  const top = element("div", "top");
  top.append(element("span", "title", `Between its GPUs, ${data.unit || "GB/s"}`), element("span", "note", "from row to column"));
  root.replaceChildren(top);
  if (data.empty) {
    root.append(element("div", "empty", data.empty));
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
  root.append(table, legend(data));
}

export function unmount() {}

function cell(found, best) {
  const made = element("td", "", found ? found.text : "absent");
  if (!found || found.value === null) {
    made.className = "absent";
    made.title = found ? found.title : "not measured";
    return made;
  }
  const [red, green, blue] = color(best ? found.value / best : 0);
  made.style.background = `rgb(${red}, ${green}, ${blue})`;
  made.style.color = 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#16191d" : "#ffffff";
  if (found.verdict === "fail") made.textContent = `! ${found.text}`;
  made.className = found.verdict;
  made.title = found.title;
  return made;
}

function color(share) {
  const at = Math.min(1, Math.max(0, share)) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  return RAMP[low].map((part, k) => Math.round(part + (RAMP[low + 1][k] - part) * (at - low)));
}

function legend(data) {
  const line = element("div", "legend");
  const bar = element("span", "bar");
  bar.style.background = `linear-gradient(90deg, ${RAMP.map((part) => `rgb(${part.join(",")})`).join(",")})`;
  line.append(element("span", "", "0"), bar, element("span", "", `${data.best.toLocaleString([], { maximumSignificantDigits: 4 })} ${data.unit}`));
  if (Object.values(data.cells).some((found) => found.verdict === "fail")) line.append(element("span", "failed", "! failed"));
  return line;
}
