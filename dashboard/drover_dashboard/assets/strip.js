// What happened in the time of the charts below: incidents, actions and events in lanes, above the lines and not over them.
import { element, themeOf } from "./common.js";

const strips = new WeakMap();
const GAP = 6;

export function render({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".strip");
  root.classList.toggle("dark", themeOf(root).dark);
  let strip = strips.get(parentElement);
  if (!strip) strips.set(parentElement, (strip = begin(root)));
  strip.open = (id) => setTriggerValue("open", id);
  const text = JSON.stringify(data);
  if (strip.text === text) return;
  Object.assign(strip, { text, data });
  draw(strip, root);
}

export function unmount(parentElement) {
  const strip = strips.get(parentElement);
  if (!strip) return;
  removeEventListener("drover-time", strip.at);
  strip.resized.disconnect();
  strips.delete(parentElement);
}

function begin(root) {
  const strip = { at: ({ detail }) => point(strip, detail) };
  addEventListener("drover-time", strip.at); // of a chart's crosshair
  strip.resized = new ResizeObserver(() => strip.width !== root.clientWidth && strip.data && draw(strip, root));
  strip.resized.observe(root);
  return strip;
}

function draw(strip, root) {
  const { data } = strip;
  strip.width = root.clientWidth;
  strip.line = element("div", "now");
  strip.line.hidden = true;
  if (!data.lanes.length) return root.replaceChildren(element("div", "nothing", data.empty), strip.line);
  const ends = element("div", "lane"), axis = element("div", "ends");
  axis.append(element("span", "", data.from), element("span", "", data.to));
  ends.append(element("div"), axis);
  root.replaceChildren(...data.lanes.map((lane) => laneOf(lane, strip)), ends, strip.line);
  for (const track of root.querySelectorAll(".track")) words(track);
}

function laneOf(lane, strip) {
  const made = element("div", "lane"), track = element("div", lane.empty ? "track unknown" : "track");
  if (lane.empty) track.append(element("div", "said", lane.empty));
  const span = strip.data.to_s - strip.data.from_s;
  for (const part of lane.parts) {
    const low = Math.max(0, (part.low_s - strip.data.from_s) / span), high = Math.min(1, (part.high_s - strip.data.from_s) / span);
    const box = element(part.id ? "button" : "div", `part ${part.look}${part.id ? " opens" : ""}`);
    box.style.left = `min(${100 * low}%, calc(100% - 4px))`;
    box.style.width = `${100 * Math.max(0, high - low)}%`;
    box.title = part.text;
    box.dataset.word = part.word;
    if (part.id) {
      box.setAttribute("aria-label", part.text);
      box.addEventListener("click", () => strip.open(part.id));
    } else box.setAttribute("role", "img"), box.setAttribute("aria-label", part.text);
    track.append(box);
  }
  made.append(element("div", "label", lane.label), track);
  return made;
}

// A word stands on its bar or behind it, where there is room until the next one; its tooltip has all of it anyway.
function words(track) {
  const width = track.clientWidth, boxes = [...track.querySelectorAll(".part")];
  boxes.forEach((box, k) => {
    const word = element("span", "word", box.dataset.word);
    track.append(word);
    const next = k + 1 < boxes.length ? boxes[k + 1].offsetLeft : width;
    const end = box.offsetLeft + box.offsetWidth, wide = word.offsetWidth + GAP;
    if (box.offsetWidth >= wide) {
      word.className = `word on ${box.classList[1]}`;
      word.style.left = `${box.offsetLeft + 4}px`;
    } else if (end + wide <= next) word.style.left = `${end + 4}px`;
    else word.remove();
  });
}

function point(strip, at) {
  if (!strip.line || !strip.data.lanes.length) return;
  const { from_s, to_s } = strip.data, share = at === null ? -1 : (at - from_s) / (to_s - from_s);
  strip.line.hidden = !(share >= 0 && share <= 1);
  strip.line.style.left = `calc(92px + (100% - 92px) * ${share})`;
}
