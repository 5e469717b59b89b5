// What the components share: the page's theme and the viewer's clock.

// Streamlit's theme as seen from `element`: is the page dark, and its text colour.
export function themeOf(element) {
  const style = getComputedStyle(element);
  const text = style.getPropertyValue("--st-text-color").trim() || "#16191d";
  const back = style.getPropertyValue("--st-background-color").trim() || "#ffffff";
  const border = style.getPropertyValue("--st-border-color").trim() || "#d5d9de";
  const [r, g, b] = rgb(back);
  return { dark: 0.299 * r + 0.587 * g + 0.114 * b < 128, text, back, border };
}

export function rgb(color) {
  const hex = color.match(/^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})/i);
  if (hex) return hex.slice(1).map((part) => parseInt(part, 16));
  const numbers = color.match(/[\d.]+/g) || [255, 255, 255];
  return numbers.slice(0, 3).map(Number);
}

// The zone that the viewer chose (preferences.js); undefined: the browser's.
export const zone = () => window.__drover_zone;

export const clock = (ms) => new Date(ms).toLocaleTimeString([], { hour12: false, timeZone: zone() });

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined && text !== null) made.textContent = text; // never HTML: texts come from logs of the fleet
  return made;
}

// Text in which no name is broken at its hyphens (job-5001); read or copied it is the same.
export function worded(made, text) {
  for (const part of String(text).split(/(\S*\w-\w\S*)/)) {
    if (part.length > 30 || !/\w-\w/.test(part)) made.append(part);
    else made.append(Object.assign(element("span", "", part), { style: "white-space: nowrap" }));
  }
  return made;
}

const RAMP = [[0, 32, 76], [0, 66, 106], [86, 92, 108], [124, 123, 120], [165, 156, 116], [210, 193, 95], [255, 233, 69]]; // cividis

export const rampBar = () => `linear-gradient(90deg, ${RAMP.map((part) => `rgb(${part.join(",")})`).join(",")})`;

// Colours of `element` for a value that is `share` (0..1) of the way from the lowest to the highest.
export function paint(element, share) {
  const at = Math.min(1, Math.max(0, share)) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  const color = RAMP[low].map((part, k) => Math.round(part + (RAMP[low + 1][k] - part) * (at - low)));
  element.style.background = `rgb(${color.join(",")})`;
  element.style.color = luminance(color) > 0.179 ? "#000000" : "#ffffff"; // a contrast of 4.58 or more on every colour
}

// WCAG 2.1, relative luminance of an sRGB colour.
function luminance(color) {
  const [red, green, blue] = color.map((part) => (part <= 10 ? part / 3294 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
