// The picture by keyboard: arrows go from GPU to GPU, N to the next one that is not well.

// The place among `cells` that `key` leads to from `at` (null: from nowhere yet); null where the key means nothing.
export function next(cells, at, key, unwell) {
  const last = cells.length - 1;
  if (last < 0) return null;
  if (key === "Home") return 0;
  if (key === "End") return last;
  if (key === "n" || key === "N") return after(cells, at, unwell);
  if (!key.startsWith("Arrow")) return null;
  if (at === null || at > last) return 0;
  if (key === "ArrowRight") return Math.min(last, at + 1);
  if (key === "ArrowLeft") return Math.max(0, at - 1);
  return beyond(cells, at, key === "ArrowDown" ? 1 : -1);
}

function after(cells, at, unwell) {
  const from = at === null ? 0 : at + 1;
  for (let k = 0; k < cells.length; k += 1) {
    const place = (from + k) % cells.length;
    if (unwell(cells[place])) return place;
  }
  return null;
}

// The nearest one above or below, in the same column where there is one.
function beyond(cells, at, way) {
  const here = cells[at];
  let best = at, nearest = Infinity;
  cells.forEach((cell, place) => {
    const down = way * (cell.y - here.y);
    if (down < 0.5) return;
    const far = down + 4 * Math.abs(cell.x - here.x);
    if (far < nearest) [best, nearest] = [place, far];
  });
  return best;
}
