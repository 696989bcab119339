// The head of the page: the node's name, whether the page is current, and the node in a few numbers.

import { byId, h, set, vary, write } from "./dom.js";
import * as format from "./format.js";
import { isCordoned, isUnhealthy } from "./health.js";
import { PERIOD_MS } from "./store.js";

export class Summary {
  constructor(store) {
    this.store = store;
    this.tiles = new Map();
    setInterval(() => this.drawLink(), 1000);
  }

  draw() {
    const { node } = this.store;
    const { agent } = node;
    write(byId("node-name"), node.node);
    const driver = agent.driver_version ? `driver ${agent.driver_version}` : "driver version not known";
    const facts = [`gpushare-agent ${agent.version}`, agent.driver === "simulated" ? `${driver} (simulated GPUs)` : driver, `isolation ${agent.isolation}${agent.isolation_reason ? ` (chosen: ${agent.isolation_reason})` : ""}`];
    write(byId("node-facts"), facts.join(" · "));
    const bad = [...this.store.gpus.values()].filter(isUnhealthy).length;
    document.title = `${bad ? `(${bad} unhealthy) ` : ""}${node.node}: GPUs`;
    this.#drawReady(agent);
    this.drawLink();
    this.#drawTiles(bad);
  }

  #drawReady(agent) {
    const ready = byId("ready");
    set(ready, "data-state", agent.is_ready ? "good" : "bad");
    write(ready, agent.is_ready ? "✓ Ready" : "✕ Not ready");
    const notReady = agent.not_ready.map((reason) => ["bad", `Not ready: ${reason}.`]);
    const unavailable = agent.isolations.filter((one) => one.unavailable_reason);
    const texts = [...notReady, ...unavailable.map((one) => ["warn", `Shares of isolation ${one.name} are refused: ${one.unavailable_reason}.`])];
    const notices = byId("notices");
    while (notices.children.length > texts.length) notices.lastElementChild.remove();
    texts.forEach(([kind, text], place) => {
      const notice = notices.children[place] ?? notices.appendChild(h("p", { class: "notice" }));
      set(notice, "data-kind", kind);
      write(notice, text);
    });
  }

  /** Live, stale or lost. Also by the clock, because silence is no event. */
  drawLink() {
    const { link, node } = this.store;
    const live = byId("live");
    const [state, text] = this.#linkState(link, node);
    // Old states may be wrong: next to an old sample, or without an answer, nothing is said to be Ready.
    byId("ready").hidden = !node || link.state === "lost" || (state === "warn" && node.agent.is_ready && node.agent.sampled_at !== null);
    set(live, "data-state", state);
    set(live, "title", link.problem || null);
    write(live, text);
    set(document.body, "data-link", state);
  }

  #linkState(link, node) {
    if (link.state === "waiting") return ["waiting", "Connecting"];
    if (link.state === "lost") return ["bad", `✕ No contact for ${format.duration((Date.now() - link.since) / 1000)}`];
    const { sampled_at: sampledAt, sample_period_seconds: period } = node.agent;
    if (sampledAt === null) return ["warn", "Live, no use is sampled"];
    const age = this.store.now() - sampledAt;
    return age > Math.max(5, 3 * period) + PERIOD_MS / 1000 ? ["warn", `Stale: last sample ${format.duration(age)} ago`] : ["good", "● Live"];
  }

  #drawTiles(bad) {
    const gpus = [...this.store.gpus.values()];
    const total = (value) => gpus.reduce((sum, gpu) => sum + (value(gpu) ?? 0), 0);
    const known = gpus.filter((gpu) => gpu.usage);
    const [cores, coresAllocated] = [total((gpu) => gpu.cores.capacity), total((gpu) => gpu.cores.allocated)];
    const [memory, memoryAllocated] = [total((gpu) => gpu.memory.capacity_bytes), total((gpu) => gpu.memory.allocated_bytes)];
    const sm = known.length ? known.reduce((sum, gpu) => sum + (gpu.usage.sm_ratio ?? 0), 0) / known.length : null;
    const used = known.length ? total((gpu) => gpu.usage?.memory_used_bytes) : null;
    const pods = new Set([...this.store.containers.values()].map((one) => one.pod_uid)).size;
    const out = gpus.filter(isCordoned).length;
    const states = [bad && `${bad} unhealthy`, out && `${out} cordoned`].filter(Boolean);
    const state = states.join(", ") || (gpus.length ? "all healthy" : "");
    this.#tile("GPUs", String(format.gpuCount(gpus, this.store.node.mig_gpus)), state, null, bad ? "bad" : out ? "warn" : null);
    this.#tile("Pods", String(pods), format.count(this.store.containers.size, "container", "containers"), null);
    this.#tile("Compute allocated", cores ? format.percent(coresAllocated / cores) : "–", `${coresAllocated} of ${cores} GPU cores`, cores ? coresAllocated / cores : 0);
    this.#tile("Compute in use", format.percent(sm), "of all GPUs together", sm ?? 0);
    this.#tile("Memory allocated", memory ? format.percent(memoryAllocated / memory) : "–", format.bytesOf(memoryAllocated, memory), memory ? memoryAllocated / memory : 0);
    this.#tile("Memory in use", used === null ? "–" : format.percent(used / (memory || 1)), used === null ? "not known" : format.bytes(used), used === null ? 0 : used / (memory || 1));
  }

  #tile(name, value, detail, ratio, kind = null) {
    let tile = this.tiles.get(name);
    if (!tile) {
      tile = { value: h("strong"), detail: h("span", { class: "quiet" }), gauge: h("i", { class: "gauge", "aria-hidden": "true" }) };
      tile.element = h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, tile.value, tile.detail, ratio === null ? null : tile.gauge));
      this.tiles.set(name, tile);
      byId("summary").append(tile.element);
    }
    write(tile.value, value);
    write(tile.detail, detail);
    set(tile.element, "data-kind", kind);
    if (ratio !== null) vary(tile.gauge, "--used", Math.min(1, ratio).toFixed(3));
  }
}
