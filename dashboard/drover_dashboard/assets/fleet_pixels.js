// Cells too small for a gap between them, by the pixel: 100,000 rectangles were most of what a refresh took the browser.
// Each pixel of the screen shows the cell that its centre lies in.
import { rgb } from "./common.js";

// Whether every cell is sure of a pixel of its own.
export const fits = (plan, ratio) => plan.cellHeight < 5 && Math.min(plan.cellWidth, plan.cellHeight) * ratio >= 1;

// Of each pixel, line by line: the place of its GPU in the frame's bytes plus one, 0 where there is none.
export function pixelMap(cells, plan, ratio, width, height) {
  const map = new Uint32Array(width * height);
  const edge = (at, most) => Math.min(most, Math.max(0, Math.ceil(at * ratio - 0.5)));
  for (const cell of cells) {
    const left = edge(cell.x, width);
    const right = edge(cell.x + plan.cellWidth, width);
    const bottom = edge(cell.y + plan.cellHeight, height);
    for (let y = edge(cell.y, height); y < bottom; y += 1) map.fill(cell.index + 1, y * width + left, y * width + right);
  }
  return map;
}

// A colour as a pixel of an image's bytes, read as uint32 (every browser's machine has the low byte first).
export function pixelOf(color) {
  const [red, green, blue] = rgb(color);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

// `codes`: a byte of each GPU. `colors`: the pixel of each of 256 codes; 0 where such a GPU is absent, and hatched.
export function fillPixels(paint, map, codes, colors, hatch) {
  const { width, height } = paint.canvas;
  const known = paint.createImageData(width, height);
  const pixels = new Uint32Array(known.data.buffer);
  let absent = 0;
  for (let k = 0; k < map.length; k += 1) {
    if (!map[k]) continue;
    pixels[k] = colors[codes[map[k] - 1]];
    if (!pixels[k]) absent += 1;
  }
  if (absent) hatched(paint, map, pixels, hatch);
  paint.save();
  paint.resetTransform();
  if (absent) paint.drawImage(layer(known), 0, 0); // over the hatching; putImageData would wipe it out
  else paint.putImageData(known, 0, 0);
  paint.restore();
}

function hatched(paint, map, pixels, hatch) {
  const { width, height } = paint.canvas;
  const mask = paint.createImageData(width, height);
  const holes = new Uint32Array(mask.data.buffer);
  for (let k = 0; k < map.length; k += 1) if (map[k] && !pixels[k]) holes[k] = 0xff000000;
  paint.putImageData(mask, 0, 0);
  paint.save();
  paint.globalCompositeOperation = "source-in";
  paint.fillStyle = hatch;
  paint.fillRect(0, 0, width, height);
  paint.restore();
}

function layer(image) {
  const made = document.createElement("canvas");
  [made.width, made.height] = [image.width, image.height];
  made.getContext("2d").putImageData(image, 0, 0);
  return made;
}
