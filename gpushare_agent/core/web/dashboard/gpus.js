// Each GPU as two bars, compute and memory, cut into its containers' shares, with what is in use inside each share.

import { arrange, h, set, vary, write } from "./dom.js";
import * as format from "./format.js";
import { isCordoned, isUnhealthy, kindOf, outOfService } from "./health.js";
import { makeCurve } from "./history.js";
import { read } from "./reading.js";

const OPEN_UP_TO = 4; // shares whose list is open from the start
const CHANGES = { unhealthy: "Unhealthy", recovered: "Healthy", cordoned: "Cordoned", uncordoned: "Uncordoned" };
const NOTHING = "nothing while the GPU is out of service";

/** What one container has of one GPU. Ratios of the share are null where the driver reports nothing. */
function shareOf(key, container, allocation, gpu) {
  const { usage } = allocation;
  const coresUsed = usage && usage.sm_ratio !== null ? usage.sm_ratio * gpu.cores.capacity : null;
  const memoryUsed = usage ? usage.memory_bytes : null;
  return {
    key,
    name: `${container.namespace}/${container.pod}`,
    container: container.container,
    pod: container.pod,
    cores: allocation.cores,
    memory: allocation.memory_bytes,
    coresUsed,
    memoryUsed,
  };
}

/** Names each share by its pod, and by its container too where the pod has several on this GPU. */
function named(shares) {
  const counts = new Map();
  for (const { name } of shares) counts.set(name, (counts.get(name) ?? 0) + 1);
  return shares.map((share) => ({ ...share, label: counts.get(share.name) > 1 ? `${share.pod}/${share.container}` : share.pod }));
}

const isOver = (used, limit) => used !== null && used > limit * 1.02 + 0.5;

class Bar {
  constructor(label, meaning = null) {
    this.parts = new Map(); // key -> elements
    this.value = h("span", { class: "measure-value" });
    this.bar = h("div", { class: "bar", role: "img" });
    this.element = h("div", { class: "measure" },
      h("div", { class: "measure-head" }, h("span", { class: "measure-name", title: meaning }, label), this.value), this.bar);
  }

  /** `shares` are {key, number, hue, size, used, name, text}: size of the GPU and used of the share are ratios. */
  draw(shares, other, value, label) {
    write(this.value, value);
    set(this.bar, "aria-label", label);
    const known = new Set(shares.map((share) => share.key));
    for (const key of this.parts.keys()) if (!known.has(key)) this.parts.delete(key);
    arrange(this.bar, [...shares.map((share) => this.#part(share)), ...this.#other(other)]);
  }

  #part(share) {
    let part = this.parts.get(share.key);
    if (!part) {
      const fill = h("i", { class: "fill" });
      const number = h("b", { class: "share-number" });
      const name = h("span", { class: "share-name" });
      const element = h("div", { class: "share" }, fill, h("span", { class: "share-label" }, number, name));
      part = { element, fill, number, name };
      this.parts.set(share.key, part);
    }
    set(part.element, "class", `share hue-${share.hue}${share.isOver ? " over" : ""}`);
    set(part.element, "title", share.text);
    vary(part.element, "--size", share.size.toFixed(4));
    vary(part.fill, "--used", Math.min(1, share.used ?? 0).toFixed(3));
    write(part.number, share.number);
    write(part.name, share.name);
    return part.element;
  }

  #other(other) {
    if (!other || other.size <= 0) return [];
    this.otherPart ??= h("div", { class: "share other" });
    vary(this.otherPart, "--size", other.size.toFixed(4));
    set(this.otherPart, "title", other.text);
    return [this.otherPart];
  }
}

export class GpuView {
  constructor() {
    this.title = h("h3");
    this.name = h("span", { class: "gpu-name" });
    this.badge = h("span", { class: "badge" });
    this.cordon = h("span", { class: "badge", "data-kind": "warn", hidden: true }, "‖ Cordoned");
    this.reason = h("p", { class: "reason", "data-kind": "bad", hidden: true });
    this.cordonReason = h("p", { class: "reason", "data-kind": "warn", hidden: true });
    this.compute = new Bar("GPU cores", "each 1/100 of a GPU's compute");
    this.memory = new Bar("Memory");
    this.curve = makeCurve();
    this.stats = h("ul", { class: "stats", "aria-label": "State of the GPU" });
    this.legend = h("ol", { class: "legend" });
    this.legendTitle = h("summary");
    this.shares = h("details", { class: "shares" }, this.legendTitle, this.legend);
    this.unattributedList = h("ul", { class: "unattributed" });
    this.unattributedTitle = h("summary");
    this.unattributed = h("details", { class: "shares", hidden: true }, this.unattributedTitle, this.unattributedList);
    this.changesList = h("ol");
    this.changes = h("details", { class: "changes", ontoggle: () => this.#readChanges() }, h("summary", {}, "Changes of state, Xids"), this.changesList);
    this.rows = new Map();
    this.free = h("p", { class: "gpu-free" });
    this.element = h("article", { class: "gpu" },
      h("header", { class: "gpu-head" }, h("div", { class: "gpu-title" }, this.title, this.name),
        h("div", { class: "badges" }, this.badge, this.cordon)),
      this.reason, this.cordonReason, this.free, this.compute.element, this.memory.element, this.curve.element,
      this.stats, this.shares, this.unattributed, this.changes);
  }

  /** The whole GPU again; unchanged parts are not touched. */
  draw(gpu, containers, hues, sampledAt) {
    this.uuid = gpu.uuid;
    write(this.title, `GPU ${format.gpuLabel(gpu)}`);
    set(this.title, "id", `gpu-${gpu.index}`);
    set(this.element, "aria-labelledby", `gpu-${gpu.index}`);
    set(this.element, "data-uuid", gpu.uuid);
    write(this.name, gpu.name);
    set(this.name, "title", `${gpu.uuid}, ${gpu.bus_id}`);
    this.#drawHealth(gpu);
    const shares = named(containers.flatMap(([key, container]) =>
      container.gpus.filter((allocation) => allocation.uuid === gpu.uuid).map((allocation) => shareOf(key, container, allocation, gpu))));
    write(this.free, freeText(gpu));
    this.#drawCompute(gpu, shares, hues);
    this.#drawMemory(gpu, shares, hues);
    this.#drawStats(gpu, sampledAt);
    this.#drawLegend(shares, hues);
    this.#drawUnattributed(gpu);
  }

  drawPast(rows, points, seconds) {
    this.curve.draw(rows, points, seconds);
  }

  /** Asked for when they are opened, and when the state changes meanwhile. */
  async #readChanges() {
    if (!this.changes.open) return;
    let texts;
    try {
      const { changes } = await (await read("api/v1/changes")).json();
      texts = (changes[this.uuid] ?? []).map(changeText);
    } catch (error) {
      texts = [`Not known: ${error.message}`];
    }
    this.changesList.replaceChildren(...(texts.length ? texts : ["None is known"]).map((text) => h("li", {}, text)));
  }

  #drawHealth(gpu) {
    const [unhealthy, out] = [isUnhealthy(gpu), isCordoned(gpu)];
    this.badge.hidden = out && !unhealthy;
    set(this.badge, "data-kind", unhealthy ? "bad" : "good");
    write(this.badge, unhealthy ? "✕ Unhealthy" : "✓ Healthy");
    this.cordon.hidden = !out;
    this.reason.hidden = !gpu.health_reason;
    write(this.reason, gpu.health_reason);
    this.cordonReason.hidden = !out;
    write(this.cordonReason, out ? `Cordoned: ${gpu.cordoned}` : "");
    if ((this.element.dataset.kind ?? kindOf(gpu)) !== kindOf(gpu)) this.#readChanges();
    set(this.element, "data-kind", kindOf(gpu));
  }

  #drawCompute(gpu, shares, hues) {
    const { capacity, allocated } = gpu.cores;
    const used = gpu.usage ? gpu.usage.sm_ratio : null;
    const value = `${format.coresAllocated(gpu)} · ${used === null ? "use not known" : `${format.percent(used)} in use`}`;
    const parts = shares.map((share, place) => ({
      ...this.#place(share, place, hues),
      size: capacity ? share.cores / capacity : 1, // a MIG instance without cores is given whole
      used: share.coresUsed === null ? null : share.coresUsed / (share.cores || 1),
      isOver: isOver(share.coresUsed, share.cores),
      text: `${place + 1}: ${share.name} (${share.container}), ${computeText(share)}`,
    }));
    const free = format.isGivenWhole(gpu) ? "none" : format.cores(capacity - allocated);
    this.compute.draw(parts, null, value, spoken("GPU cores", value, parts, outOfService(gpu) ? NOTHING : free));
  }

  #drawMemory(gpu, shares, hues) {
    const { capacity_bytes: capacity, allocated_bytes: allocated } = gpu.memory;
    const used = gpu.usage ? gpu.usage.memory_used_bytes : null;
    const value = `${format.bytesOf(allocated, capacity)} allocated · ${used === null ? "use not known" : `${format.bytes(used)} in use`}`;
    const parts = shares.map((share, place) => ({
      ...this.#place(share, place, hues),
      size: capacity ? share.memory / capacity : 0,
      used: share.memoryUsed === null ? null : share.memoryUsed / (share.memory || 1),
      isOver: isOver(share.memoryUsed, share.memory),
      text: `${place + 1}: ${share.name} (${share.container}), ${memoryText(share)}`,
    }));
    const bytes = gpu.unattributed.reduce((sum, one) => sum + (one.memory_bytes ?? 0), 0);
    const free = Math.max(0, capacity - allocated);
    const other = { size: capacity ? Math.min(bytes, free || bytes) / capacity : 0, text: `Processes of no container here: ${format.bytes(bytes)}` };
    const label = spoken("Memory", value, parts, outOfService(gpu) ? NOTHING : format.bytes(free)) + (bytes ? ` ${other.text}.` : "");
    this.memory.draw(parts, other, value, label);
  }

  #place(share, place, hues) {
    return { key: share.key, number: place + 1, hue: hues.of(share.key), name: share.label };
  }

  /** Of NVLink the driver counts bytes: the rate is that of the time since the sample before. */
  #links({ nvlink_received_bytes_total: received = null, nvlink_sent_bytes_total: sent = null }, at) {
    const before = this.counted;
    if (before?.at === at) return this.linkText;
    this.counted = { at, received, sent };
    const isKnown = before && received !== null && received >= before.received && sent >= before.sent && at > before.at;
    const rateOf = (now, then) => (now - then) / (at - before.at);
    const rates = isKnown && before.received !== null ? [rateOf(received, before.received), rateOf(sent, before.sent)] : [];
    this.linkText = received === null ? "–" : rates.length ? format.traffic("NVLink", ...rates) : "NVLink …";
    return this.linkText;
  }

  #drawStats(gpu, sampledAt) {
    const { usage } = gpu;
    const texts = !usage
      ? [["use", isUnhealthy(gpu) ? "No use is known while the GPU is lost" : "The driver has reported no use of this GPU yet"]]
      : [
          ["temperature", format.celsius(usage.temperature_celsius)],
          ["power", format.watts(usage.power_watts, usage.power_limit_watts)],
          ["SM clock", format.hertz(usage.sm_clock_hertz)],
          ["PCIe traffic", format.traffic("PCIe", usage.pcie_received_bytes_per_second, usage.pcie_sent_bytes_per_second)],
          ["NVLink traffic", this.#links(usage, sampledAt)],
        ];
    if (gpu.numa !== null) texts.push(["NUMA node", `NUMA ${gpu.numa}`]);
    if (usage?.ecc_uncorrected_total) texts.push(["errors", format.count(usage.ecc_uncorrected_total, "uncorrected ECC error", "uncorrected ECC errors")]);
    const items = texts.filter(([, text]) => text !== "–").map(([name, text]) => ({ text, name, kind: name === "errors" ? "warn" : null }));
    for (const reason of usage?.throttle_reasons ?? []) items.push({ text: `slowed: ${format.words(reason)}`, name: "throttled", kind: "warn" });
    while (this.stats.children.length > items.length) this.stats.lastElementChild.remove();
    items.forEach((item, place) => {
      const element = this.stats.children[place] ?? this.stats.appendChild(h("li"));
      write(element, item.text);
      set(element, "title", item.name);
      set(element, "data-kind", item.kind);
    });
  }

  #drawLegend(shares, hues) {
    const isFirst = this.count === undefined;
    if (isFirst || (this.count <= OPEN_UP_TO) !== (shares.length <= OPEN_UP_TO)) this.shares.open = shares.length <= OPEN_UP_TO;
    this.count = shares.length;
    this.shares.hidden = !shares.length;
    write(this.legendTitle, format.count(shares.length, "container", "containers"));
    const known = new Set(shares.map((share) => share.key));
    for (const key of this.rows.keys()) if (!known.has(key)) this.rows.delete(key);
    arrange(this.legend, shares.map((share, place) => this.#legendRow(share, place, hues)));
  }

  #legendRow(share, place, hues) {
    let row = this.rows.get(share.key);
    if (!row) {
      const [number, name, compute, memory] = [h("b", { class: "share-number" }), h("span", { class: "legend-name" }), h("span", { class: "legend-use" }), h("span", { class: "legend-use" })];
      row = { number, name, compute, memory, element: h("li", {}, number, name, h("span", { class: "legend-uses" }, compute, memory)) };
      this.rows.set(share.key, row);
    }
    set(row.element, "class", `hue-${hues.of(share.key)}`);
    write(row.number, place + 1);
    write(row.name, share.label);
    set(row.name, "title", `${share.name}, container ${share.container}`);
    write(row.compute, computeText(share));
    write(row.memory, memoryText(share));
    return row.element;
  }

  #drawUnattributed(gpu) {
    const count = gpu.unattributed.length;
    this.unattributed.hidden = !count;
    if (!count) return;
    write(this.unattributedTitle, `${format.count(count, "process", "processes")} of no container here`);
    const texts = gpu.unattributed.map((one) =>
      `PID ${one.pid} (${one.kind}): ${format.bytes(one.memory_bytes)}${one.sm_ratio === null ? "" : `, SM ${format.percent(one.sm_ratio)}`}`);
    if (count > texts.length) texts.push(`and ${count - texts.length} smaller ones`);
    while (this.unattributedList.children.length > texts.length) this.unattributedList.lastElementChild.remove();
    texts.forEach((text, place) => write(this.unattributedList.children[place] ?? this.unattributedList.appendChild(h("li")), text));
  }
}

function changeText({ at, what, reason, count }) {
  const text = CHANGES[what] ? `${CHANGES[what]}: ${reason}` : reason;
  return `${format.moment(at)} · ${text}${count > 1 ? `, ${count} times` : ""}`;
}

/** Of a GPU that no container has. */
function freeText(gpu) {
  if (outOfService(gpu)) return `Not offered: ${outOfService(gpu)}`;
  const memory = format.bytes(gpu.memory.capacity_bytes - gpu.memory.allocated_bytes);
  if (!format.isGivenWhole(gpu)) return `Free: ${format.cores(gpu.cores.capacity - gpu.cores.allocated)}, ${memory}`;
  return gpu.memory.allocated_bytes ? "Given whole" : `Free: ${memory}, given whole`;
}

function computeText(share) {
  return `${format.coresOf(share.coresUsed, share.cores)}${isOver(share.coresUsed, share.cores) ? ", over its share" : ""}`;
}

function memoryText(share) {
  return `${format.bytesOf(share.memoryUsed, share.memory)}${isOver(share.memoryUsed, share.memory) ? ", over its share" : ""}`;
}

function spoken(name, value, parts, free) {
  return `${name}: ${value}. ${parts.map((part) => part.text).join("; ")}${parts.length ? ". " : ""}Free: ${free}.`;
}
