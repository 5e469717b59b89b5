// Where each GPU lies: racks side by side, a node per line, its slots from left to right.

const NODE_LABEL = 74; // room left of a line for the node's name, px
const RACK_LABEL = 18; // room above a rack for its name, px
const GAP = 14;
const LARGEST = { width: 36, height: 30 };

// Tries every number of racks in a row and keeps the one with the largest cells, of equal ones the widest; names go where
// cells are too small for them.
export function arrange(layout, width, height) {
  const racks = layout.racks;
  const lines = Math.max(1, ...racks.map((rack) => rack.nodes.length));
  const slots = Math.max(1, ...racks.map((rack) => Math.max(0, ...rack.nodes.map((node) => node.gpus))));
  const styles = [
    { left: NODE_LABEL, top: RACK_LABEL, gap: GAP, least: 11 },
    { left: 0, top: RACK_LABEL, gap: GAP, least: 5 },
    { left: 0, top: 0, gap: 3, least: 0 },
  ];
  for (const style of styles) {
    let best = null;
    for (let across = 1; across <= racks.length; across += 1) {
      const down = Math.ceil(racks.length / across);
      const wide = Math.min(LARGEST.width, (width / across - style.left - style.gap) / slots);
      const high = Math.min(LARGEST.height, (height / down - style.top - style.gap / 2) / lines);
      const size = Math.min(wide, high * 1.5);
      if (!best || size >= best.size) best = { across, down, size, wide: Math.min(wide, high * 2), high: Math.min(high, wide * 1.2) };
    }
    if (best && best.high >= style.least) return finish(best, style, racks, slots, lines);
  }
  return finish({ across: 1, down: 1, wide: 1, high: 1 }, styles[2], racks, slots, lines);
}

function finish(best, style, racks, slots, lines) {
  const whole = (size) => (size >= 4 ? Math.floor(size) : size); // sharp edges where cells are large enough to see them
  const plan = { across: best.across, cellWidth: whole(best.wide), cellHeight: whole(best.high), labels: [], origins: [] };
  const stepX = style.left + slots * plan.cellWidth + style.gap;
  const stepY = style.top + lines * plan.cellHeight + style.gap / 2;
  plan.height = Math.ceil(best.down * stepY);
  racks.forEach((rack, number) => {
    const x = (number % best.across) * stepX + style.left;
    const y = Math.floor(number / best.across) * stepY + style.top;
    plan.origins.push({ x, y });
    if (style.top) plan.labels.push({ text: rack.name || "(no rack)", x, y: y - 5, room: slots * plan.cellWidth, strong: true });
    if (!style.left) return;
    rack.nodes.forEach((node, line) => {
      const middle = y + (line + 0.5) * plan.cellHeight + 4;
      plan.labels.push({ text: node.name, x: x - style.left, y: middle, room: style.left - 6, strong: false });
    });
  });
  return plan;
}

// One entry per GPU, group by group; `index` is its place in the frame's bytes.
export function place(layout, plan) {
  const cells = [];
  layout.racks.forEach((rack, number) => {
    const origin = plan.origins[number];
    rack.nodes.forEach((node, line) => {
      for (let k = 0; k < node.gpus; k += 1) {
        const gpu = node.slots ? node.slots[k] : k;
        const [x, y] = [origin.x + k * plan.cellWidth, origin.y + line * plan.cellHeight];
        cells.push({ index: node.first + gpu, node: node.name, gpu, rack: node.rack || "(no rack)", group: rack.name, x, y });
      }
    });
  });
  return cells;
}

export function hit(cells, plan, x, y) {
  return cells.find((cell) => x >= cell.x && x < cell.x + plan.cellWidth && y >= cell.y && y < cell.y + plan.cellHeight) || null;
}
