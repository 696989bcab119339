// What the opened row of a container shows: the curve of its use, and its processes. Both are asked for while it is open alone.

import { h, write } from "./dom.js";
import * as format from "./format.js";
import { makeCurve, readCurves } from "./history.js";
import { read } from "./reading.js";

const AGAIN_MS = 120000;
const SHARED_MS = 5000;

let asked = { at: -SHARED_MS, answer: null }; // the node with its processes: rows that are opened together ask once

function readProcesses() {
  if (Date.now() - asked.at >= SHARED_MS) asked = { at: Date.now(), answer: read("api/v1/node?processes=true").then((answer) => answer.json()) };
  return asked.answer;
}

export class Opened {
  constructor(key, columns, history) {
    [this.key, this.history, this.readAt, this.pids] = [key, history, 0, ""];
    this.curve = makeCurve("cores of its share", "memory of its share");
    this.title = h("p", { class: "quiet", role: "status" });
    this.list = h("ul", { class: "processes" });
    this.element = h("tr", { class: "opened" }, h("td", { colspan: columns }, h("div", {}, this.curve.element, h("div", {}, this.title, this.list))));
  }

  /** Asks again where its processes are others, and from time to time. */
  draw(container) {
    const pids = JSON.stringify(container.gpus.map(({ usage }) => usage?.pids));
    if (pids === this.pids && Date.now() - this.readAt < AGAIN_MS) return;
    [this.pids, this.container] = [pids, container];
    this.refresh();
  }

  refresh() {
    this.readAt = Date.now();
    this.#drawCurve();
    this.#drawProcesses().catch((error) => write(this.title, `Its processes are not known: ${error.message}`));
  }

  async #drawCurve() {
    const { cores, memory_bytes: memory } = this.container;
    const found = await readCurves(this.history.span, `only=containers&container=${encodeURIComponent(this.key)}`);
    const of = (values = [], whole) => values.map((value) => (value === null ? null : value / (whole || 1)));
    const curve = found.containers?.[this.key] ?? {};
    const points = curve.sm_ratio?.length ?? this.history.points;
    this.curve.draw({ sm: of(curve.sm_ratio, cores / 100), memory: of(curve.memory_bytes, memory) }, points, points * (found.step_seconds ?? this.history.step));
  }

  async #drawProcesses() {
    const node = await readProcesses();
    const { pod_uid: uid, container: name } = this.container;
    const gpus = node.containers.find((one) => one.pod_uid === uid && one.container === name)?.gpus ?? [];
    const onGpu = gpus.length > 1 ? (gpu) => `, GPU ${gpu.index}` : () => "";
    const texts = gpus.flatMap((gpu) => (gpu.usage?.processes ?? []).map((one) => `${processText(one)}${onGpu(gpu)}`));
    write(this.title, texts.length ? `${format.count(texts.length, "process", "processes")} at ${format.clock(node.at)}` : "No process of it is on a GPU.");
    this.list.replaceChildren(...texts.map((text) => h("li", {}, text)));
  }
}

function processText({ pid, pid_in_container: inner, command, memory_bytes: memory, sm_ratio: sm }) {
  return `PID ${inner ?? `${pid} of the host`}: ${command ?? "not known"}, ${format.bytes(memory)}, SM ${format.percent(sm)}`;
}
