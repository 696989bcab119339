// The past of each GPU, and the curve made of it: the last minutes are read once from the agent and carried on from the node's
// document, the last day is read after each of its steps.

import { h, s, set, vary, write } from "./dom.js";
import * as format from "./format.js";

const WIDTH = 300;
const HEIGHT = 40;
const STEPS = 3; // of the time axis
const GRID = [`M0 ${HEIGHT / 2}H${WIDTH}`, ...[1, 2].map((step) => `M${(step * WIDTH) / STEPS} 0V${HEIGHT}`)].join("");
const DEFAULT_STEP_S = 5;
const POINTS_UNLESS_TOLD = 180;
const DAY_STEP_S = 300;
const LATE_S = 5; // the agent makes the point of a step of the day a moment after its end

/** The agent's curves of a span, `recent` or `day`; nothing where it does not answer: the connection's state is shown by store.js. */
export async function readCurves(span, query) {
  try {
    const answer = await fetch(`api/v1/history?${query}${span === "day" ? "&span=day" : ""}`, { cache: "no-store" });
    return answer.ok ? await answer.json() : {};
  } catch {
    return {};
  }
}

export class History {
  constructor(store) {
    this.store = store;
    this.gpus = new Map(); // uuid -> {sm: [], memory: []}, ratios or null, oldest first
    this.stepEnds = 0;
    this.parts = new Map(); // uuid -> sums of the step that is not over
    this.choose("recent");
  }

  choose(span) {
    this.span = span;
    this.step = span === "day" ? DAY_STEP_S : DEFAULT_STEP_S;
    this.points = POINTS_UNLESS_TOLD;
    this.gpus.clear();
  }

  /** After each new connection: what was missed is in the agent's rings. */
  async load() {
    const { span } = this;
    const answered = await readCurves(span, "only=gpus");
    if (span !== this.span) return;
    this.step = answered.step_seconds || this.step;
    for (const [uuid, rows] of Object.entries(answered.gpus ?? {})) {
      const capacity = this.store.gpus.get(uuid)?.memory.capacity_bytes || 1;
      const memory = (rows.memory_used_bytes ?? []).map((used) => (used === null ? null : used / capacity));
      this.gpus.set(uuid, { sm: rows.sm_ratio ?? [], memory });
      this.points = Math.max(this.points, memory.length);
    }
    this.stepEnds = (answered.at ?? this.store.now()) + this.step;
    this.parts.clear();
  }

  /** Whether a step of the day is over, which only the agent knows; once for each. */
  isDue() {
    if (this.span !== "day" || this.store.now() < this.stepEnds + LATE_S) return false;
    this.stepEnds += this.step;
    return true;
  }

  /** One more sample of each GPU. True where a step is over, so that each curve has a new point. */
  sample() {
    if (this.span === "day") return false;
    for (const gpu of this.store.gpus.values()) {
      const part = this.parts.get(gpu.uuid) ?? { count: 0, sm: 0, memory: 0 };
      if (!gpu.usage || gpu.usage.sm_ratio === null) continue;
      part.count += 1;
      part.sm += gpu.usage.sm_ratio;
      part.memory += (gpu.usage.memory_used_bytes ?? 0) / (gpu.memory.capacity_bytes || 1);
      this.parts.set(gpu.uuid, part);
    }
    const now = this.store.now();
    if (now < this.stepEnds) return false;
    const missed = Math.min(this.points, Math.floor((now - this.stepEnds) / this.step));
    for (const uuid of this.store.gpus.keys()) this.#add(uuid, missed);
    this.parts.clear();
    this.stepEnds += (missed + 1) * this.step;
    return true;
  }

  #add(uuid, missed) {
    const rows = this.gpus.get(uuid) ?? { sm: [], memory: [] };
    const part = this.parts.get(uuid);
    for (let n = 0; n < missed; n += 1) {
      rows.sm.push(null);
      rows.memory.push(null);
    }
    rows.sm.push(part ? part.sm / part.count : null);
    rows.memory.push(part ? part.memory / part.count : null);
    rows.sm.splice(0, rows.sm.length - this.points);
    rows.memory.splice(0, rows.memory.length - this.points);
    this.gpus.set(uuid, rows);
  }

  seconds() {
    return this.points * this.step;
  }
}

/** `15 minutes`, `24 hours`. */
export const spanText = (seconds) => (seconds > 7200 ? format.count(+(seconds / 3600).toFixed(1), "hour", "hours") : format.count(Math.round(seconds / 60), "minute", "minutes"));

/** A curve of two ratios: a figure, and `draw` for each new point. Under the pointer the caption has that moment's values. */
export function makeCurve(name = "SM", memoryName = "memory") {
  const area = s("path", { class: "curve-area" });
  const sm = s("path", { class: "curve-sm" });
  const memory = s("path", { class: "curve-memory" });
  const drawn = s(
    "svg",
    { class: "curve", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
    s("path", { class: "curve-line", d: GRID }),
    area,
    sm,
    memory,
  );
  const mark = h("i", { class: "curve-mark", hidden: true });
  const plot = h("div", { class: "plot" }, drawn, mark, h("div", { class: "ticks-y", "aria-hidden": true }, ["100 %", "50", "0"].map((text) => h("span", {}, text))));
  const times = h("div", { class: "ticks-x", "aria-hidden": true }, Array.from({ length: STEPS + 1 }, () => h("span")));
  const values = h("span", { class: "curve-values" });
  const element = h("figure", { class: "past" }, plot, times,
    h("figcaption", {}, h("span", { class: "key-sm" }, name), h("span", { class: "key-memory" }, memoryName), values));
  let shown = { rows: { sm: [], memory: [] }, points: 0, seconds: 0 };
  let at = null; // where the pointer is, 0 to 1
  function point() {
    const { rows, points, seconds } = shown;
    mark.hidden = at === null || !points;
    if (mark.hidden) return write(values, "");
    const back = Math.round((1 - at) * (points - 1)); // points before the newest
    const value = (row) => format.percent(row[row.length - 1 - back]);
    vary(mark, "--at", (1 - back / (points - 1)).toFixed(4));
    return write(values, `${back ? `${format.duration((back * seconds) / points)} ago` : "now"}: ${value(rows.sm)}, memory ${value(rows.memory)}`);
  }
  const moved = (event) => {
    const box = drawn.getBoundingClientRect();
    at = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    point();
  };
  plot.addEventListener("pointermove", moved);
  plot.addEventListener("pointerdown", moved);
  plot.addEventListener("pointerleave", () => {
    at = null;
    point();
  });
  function draw(rows, points, seconds) {
    shown = { rows, points, seconds };
    const [unit, length] = seconds > 7200 ? ["h", seconds / 3600] : ["min", Math.round(seconds / 60)];
    [...times.children].forEach((one, place) => write(one, place === STEPS ? "now" : `${place ? "" : "−"}${+(length * (1 - place / STEPS)).toFixed(1)}${place ? "" : ` ${unit}`}`));
    point();
    const lineOf = (values) => path(values, points);
    const line = lineOf(rows.sm);
    set(sm, "d", line.d);
    set(area, "d", line.area);
    set(memory, "d", lineOf(rows.memory).d);
    set(drawn, "aria-label", `Last ${spanText(seconds)}. ${name} use: ${spoken(rows.sm)}. Memory: ${spoken(rows.memory)}.`);
  }
  return { element, draw };
}

function spoken(values) {
  const known = values.filter((value) => value !== null);
  if (!known.length) return "not known";
  const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  return `now ${format.percent(known.at(-1))}, mean ${format.percent(mean)}, most ${format.percent(Math.max(...known))}`;
}

/** The newest point is at the right edge; a gap stays a gap. */
function path(values, points) {
  const y = (value) => (HEIGHT - 1 - Math.min(1, Math.max(0, value)) * (HEIGHT - 2)).toFixed(1);
  const x = (place) => (((points - values.length + place) / (points - 1)) * WIDTH).toFixed(1);
  let d = "";
  let area = "";
  for (let place = 0; place < values.length; place += 1) {
    if (values[place] === null) continue;
    const isFirst = place === 0 || values[place - 1] === null;
    const isLast = place === values.length - 1 || values[place + 1] === null;
    d += `${isFirst ? "M" : "L"}${x(place)} ${y(values[place])}`;
    area += isFirst ? `M${x(place)} ${HEIGHT}L${x(place)} ${y(values[place])}` : `L${x(place)} ${y(values[place])}`;
    if (isLast) area += `L${x(place)} ${HEIGHT}Z`;
  }
  return { d, area };
}
