// The picture of the past: all frames of a time in one answer, a scrubber and play. A frame costs the browser one drawing.
import { clock, zone } from "./common.js";

const STEP_MS = 350;

// Fetches the frames and returns the one that the page asks for. `within`: the cluster, as a parameter.
export async function loadPast(picture, ask, within) {
  const { past, color_by: colorBy } = picture.data;
  const [from, to] = past.from_s === past.to_s ? [past.at_s, past.at_s] : [past.from_s, past.to_s];
  const reply = await ask(`drover/playback?color_by=${encodeURIComponent(colorBy)}&from=${from}&to=${to}${within}`);
  const header = JSON.parse(reply.headers.get("Drover-Frame"));
  const body = await reply.arrayBuffer();
  const times = header.frames_ms, size = (header.gpus + 3) & ~3;
  const part = (at) => new Uint8Array(body, at * size, header.gpus);
  const frames = times.map((ts_ms, at) => ({
    ...header, ts_ms, health: part(at), has_values: false, values: null, ...(header.metric ? { cells: part(times.length + at) } : {}),
  }));
  picture.past = { times, frames, at: nearest(times, past.at_s * 1000), bytes: body.byteLength };
  stop(picture);
  say(picture);
  return frames[picture.past.at];
}

const nearest = (times, ms) => times.reduce((best, time, at) => (Math.abs(time - ms) < Math.abs(times[best] - ms) ? at : best), 0);

export function showFrame(picture, at, draw) {
  if (!picture.past) return;
  picture.past.at = Math.min(picture.past.times.length - 1, Math.max(0, at));
  picture.frame = picture.past.frames[picture.past.at];
  say(picture);
  draw(picture);
}

export function togglePlay(picture, draw) {
  if (!picture.past) return;
  if (picture.playing) {
    stop(picture);
    picture.move(picture.past.times[picture.past.at]); // the page shows the moment at which it stands
    return;
  }
  const last = picture.past.times.length - 1;
  if (picture.past.at >= last) showFrame(picture, 0, draw);
  picture.playing = setInterval(() => {
    if (document.hidden) return;
    showFrame(picture, picture.past.at + 1, draw);
    if (picture.past.at >= last) stop(picture);
  }, STEP_MS);
  say(picture);
}

function stop(picture) {
  clearInterval(picture.playing);
  picture.playing = 0;
  say(picture);
}

function say(picture) {
  const { player, past } = picture;
  if (!player || !past) return;
  const [button, range, output] = ["button", "input", "output"].map((name) => player.querySelector(name));
  range.max = String(past.times.length - 1);
  range.value = String(past.at);
  const day = new Date(past.times[past.at]).toLocaleDateString([], { day: "numeric", month: "short", timeZone: zone() });
  output.value = `${day} ${clock(past.times[past.at])}`;
  range.setAttribute("aria-valuetext", output.value);
  button.textContent = picture.playing ? "Pause" : "Play";
  button.setAttribute("aria-pressed", picture.playing ? "true" : "false");
}
