// The table of all containers with an allocation: sorted by any column, filtered by a text, redrawn row by row.

import { arrange, byId, h, set, vary, write } from "./dom.js";
import * as format from "./format.js";
import { isUnhealthy } from "./health.js";
import { Opened } from "./opened.js";

const RESORT_MS = 5000;

/** Kinds of states; any other word is why a container does not run, such as CrashLoopBackOff. */
const STATES = {
  Running: "good", Succeeded: "", Completed: "", Pending: "warn", Init: "warn", ContainerCreating: "warn", PodInitializing: "warn", Terminating: "warn",
};

const PAID = "What it paid, as libgpushare counts: of several containers that compute the driver's samples name one.";

const MPS = "The driver counts the compute of MPS's clients in the process of their server: see the GPU's.";

const usedCores = (container) => sum(container, (share) => share.usage?.sm_ratio, 100);
const usedMemory = (container) => sum(container, (share) => share.usage?.memory_bytes, 1);

/** Null where no GPU reports it. */
function sum(container, value, factor) {
  const known = container.gpus.map(value).filter((one) => one !== null && one !== undefined);
  return known.length ? known.reduce((total, one) => total + one * factor, 0) : null;
}

const COLUMNS = [
  { id: "namespace", name: "Namespace", value: (one) => one.namespace },
  { id: "pod", name: "Pod", value: (one) => one.pod },
  { id: "container", name: "Container", value: (one) => one.container },
  { id: "gpu", name: "GPU", value: (one) => one.gpus.map((share) => String(share.index).padStart(3, "0")).join(" ") },
  { id: "cores", name: "GPU cores", value: (one) => one.cores, isNumber: true },
  { id: "compute", name: "GPU cores in use", value: usedCores, isLive: true },
  { id: "memory", name: "Memory", value: (one) => one.memory_bytes, isNumber: true },
  { id: "used", name: "Memory in use", value: usedMemory, isLive: true },
  { id: "isolation", name: "Isolation", value: (one) => one.isolation },
  { id: "state", name: "State", value: (one) => one.phase },
];

export class ContainerTable {
  constructor(store, history) {
    this.store = store;
    this.history = history;
    this.rows = new Map(); // key -> row
    this.limits = new Map(); // who limits what, as a key -> its element
    this.sortedBy = COLUMNS[1];
    this.direction = 1;
    this.filter = "";
    this.sortedAt = 0;
    this.headings = COLUMNS.map((column) => this.#heading(column));
    this.body = h("tbody", { onkeydown: (event) => this.#move(event) });
    this.element = h("table", { class: "containers" },
      h("caption", { class: "unseen" }, "Containers with GPUs allocated, their limits and their use. The buttons in the heading sort. A pod's button shows its processes; arrow keys go from pod to pod."),
      h("thead", {}, h("tr", {}, this.headings)), this.body);
    byId("containers-table").append(this.element);
    byId("filter").addEventListener("input", (event) => {
      this.filter = event.target.value.trim().toLowerCase();
      this.arrange();
    });
    this.#showOrder();
  }

  #heading(column) {
    const button = h("button", { type: "button", onclick: () => this.#sortBy(column) }, column.name);
    return h("th", { scope: "col", class: `col-${column.id}`, "data-number": column.isNumber }, button);
  }

  #sortBy(column) {
    this.direction = this.sortedBy === column ? -this.direction : column.isNumber || column.isLive ? -1 : 1;
    this.sortedBy = column;
    this.#showOrder();
    this.arrange();
  }

  #showOrder() {
    COLUMNS.forEach((column, place) => {
      const order = this.direction > 0 ? "ascending" : "descending";
      set(this.headings[place], "aria-sort", column === this.sortedBy ? order : "none");
    });
  }

  /** `keys` are the containers where more than the use changed; null for all. */
  draw(keys, used, hues) {
    const { containers } = this.store;
    for (const key of this.rows.keys()) if (!containers.has(key)) this.rows.delete(key);
    for (const key of keys ?? containers.keys()) if (containers.has(key)) this.#row(key).draw(containers.get(key), hues.of(key), this.store);
    if (!keys || keys.size) this.#drawLimits();
    if (keys) for (const key of used) if (this.rows.has(key)) this.rows.get(key).drawUse(containers.get(key));
    if (!keys || keys.size) this.arrange();
    else this.#sortAgain();
  }

  /** What is not limited, once for all containers that share it: rows would repeat it. */
  #drawLimits() {
    const groups = new Map();
    for (const one of this.store.containers.values()) {
      if (!one.kept?.not_kept.length || one.is_whole) continue;
      const key = JSON.stringify([one.isolation, one.kept]);
      groups.set(key, { ...one, count: (groups.get(key)?.count ?? 0) + 1 });
    }
    for (const key of this.limits.keys()) if (!groups.has(key)) this.limits.delete(key);
    const texts = this.store.node.agent.not_kept_texts ?? {};
    arrange(byId("not-limited"), [...groups].sort(([one], [two]) => compare(one, two)).map(([key, group]) => this.#limits(key, group, texts)));
  }

  #limits(key, { isolation, kept, count }, texts) {
    if (!this.limits.has(key)) {
      const what = kept.not_kept.map((term) => texts[term] ?? term);
      const summary = h("summary");
      const element = h("details", { class: "quiet" }, summary,
        h("p", {}, `Memory is limited by ${kept.memory_by}, compute by ${kept.compute_by}. Not limited: ${what.join("; ")}.`));
      this.limits.set(key, { summary, element });
    }
    const { summary, element } = this.limits.get(key);
    write(summary, `${isolation}: ${format.count(kept.not_kept.length, "thing", "things")} not limited in ${format.count(count, "container", "containers")}`);
    return element;
  }

  #row(key) {
    if (!this.rows.has(key)) this.rows.set(key, new Row(() => this.#toggle(key)));
    return this.rows.get(key);
  }

  #toggle(key) {
    const row = this.rows.get(key);
    row.opened = row.opened ? null : new Opened(key, COLUMNS.length, this.history);
    set(row.button, "aria-expanded", String(Boolean(row.opened)));
    row.opened?.draw(this.store.containers.get(key));
    this.#stopAt(row.button);
    this.arrange();
  }

  /** Of hundreds of rows one is a stop of the tabulator. */
  #move(event) {
    const buttons = [...this.body.querySelectorAll(".opener")];
    const place = buttons.indexOf(event.target) + { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!event.target.matches(".opener") || !buttons[place]) return;
    event.preventDefault();
    this.#stopAt(buttons[place]);
    buttons[place].focus();
  }

  #stopAt(button) {
    for (const one of this.body.querySelectorAll(".opener")) set(one, "tabindex", one === button ? 0 : -1);
  }

  refreshOpened() {
    for (const row of this.rows.values()) row.opened?.refresh();
  }

  /** By a number that changes each second, but not while the table is in use. */
  #sortAgain() {
    if (!this.sortedBy.isLive || Date.now() - this.sortedAt < RESORT_MS) return;
    if (this.element.matches(":hover") || this.element.contains(document.activeElement)) return;
    this.arrange();
  }

  arrange() {
    this.sortedAt = Date.now();
    const shown = [...this.store.containers].filter(([key]) => this.rows.get(key)?.matches(this.filter));
    const values = new Map(shown.map(([key, container]) => [key, this.sortedBy.value(container)]));
    shown.sort(([a, one], [b, two]) => this.direction * compare(values.get(a), values.get(b)) || compareNames(one, two));
    const elements = shown.map(([key]) => this.rows.get(key)).flatMap((row) => [row.element, row.opened?.element]);
    arrange(this.body, elements.filter(Boolean));
    if (!this.body.querySelector(".opener[tabindex='0']")) this.#stopAt(this.body.querySelector(".opener"));
    const all = this.store.containers.size;
    const count = format.count(all, "container", "containers");
    write(byId("containers-count"), this.filter ? `${shown.length} of ${count}` : all ? count : "");
    byId("containers-table").hidden = !shown.length;
    const none = byId("containers-unmatched");
    none.hidden = shown.length > 0 || !all;
    write(none, `No container has “${this.filter}” in its pod, namespace, GPU, isolation or state.`);
  }
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null) return -1;
  if (b === null) return 1;
  return typeof a === "string" ? format.compareTexts(a, b) : a - b;
}

const nameOf = (one) => `${one.namespace}/${one.pod}/${one.container}`;
const compareNames = (one, two) => compare(nameOf(one), nameOf(two));

class Row {
  constructor(onToggle) {
    this.opened = null;
    this.cells = COLUMNS.map((column) => h(column.id === "pod" ? "th" : "td", {
      class: `col-${column.id}`, "data-label": column.name, "data-number": column.isNumber, scope: column.id === "pod" ? "row" : null,
    }));
    this.meters = { compute: makeMeter("GPU cores in use"), used: makeMeter("Memory in use") };
    this.element = h("tr", {}, this.cells);
    this.#cell("compute").append(...this.meters.compute.parts);
    this.#cell("used").append(...this.meters.used.parts);
    this.button = this.#cell("pod").appendChild(h("button", { type: "button", class: "opener", "aria-expanded": "false", tabindex: -1, onclick: onToggle }));
    this.isolation = { name: h("span"), by: h("span", { class: "quiet kept" }) };
    this.#cell("isolation").append(this.isolation.name, this.isolation.by);
    this.state = this.#cell("state").appendChild(h("span", { class: "state" }));
  }

  #cell(id) {
    return this.cells[COLUMNS.findIndex((column) => column.id === id)];
  }

  draw(container, hue, { gpus }) {
    const labelOf = (share) => format.gpuLabel(gpus.get(share.uuid) ?? share);
    const unhealthy = container.gpus.filter((share) => gpus.has(share.uuid) && isUnhealthy(gpus.get(share.uuid))).map(labelOf);
    set(this.element, "class", `hue-${hue}`);
    set(this.element, "data-key", `${container.pod_uid}/${container.container}`);
    write(this.#cell("namespace"), container.namespace);
    write(this.button, container.pod);
    write(this.#cell("container"), container.kind === "main" ? container.container : `${container.container} (${container.kind})`);
    set(this.#cell("container"), "data-before", `${container.namespace}, `); // shown where a column does not fit
    write(this.#cell("gpu"), format.gpuNames(container.gpus.map(labelOf)) || "not on a GPU here");
    write(this.#cell("cores"), container.core_limit ? `${container.cores}, up to ${container.core_limit}` : container.cores);
    write(this.#cell("memory"), format.bytes(container.memory_bytes));
    this.#drawIsolation(container);
    write(this.state, unhealthy.length ? `${container.phase}, ${format.gpuNames(unhealthy)} unhealthy` : container.phase);
    set(this.state, "data-kind", unhealthy.length ? "bad" : STATES[container.phase] ?? "bad");
    this.text = [container.namespace, container.pod, container.container, this.#cell("gpu").textContent, this.isolation.name.textContent, this.isolation.by.textContent, this.state.textContent].join("\n").toLowerCase();
    this.drawUse(container);
  }

  /** The name; below it who limits what where that is not the isolation alone. */
  #drawIsolation({ is_whole: isWhole, isolation, kept }) {
    write(this.isolation.name, isWhole ? "whole GPU" : isolation || "not known");
    const hasLimits = kept && !isWhole;
    const isAlone = hasLimits && kept.memory_by === isolation && kept.compute_by === isolation;
    write(this.isolation.by, hasLimits && !isAlone ? `memory: ${kept.memory_by}, compute: ${kept.compute_by}` : "");
    set(this.isolation.by, "data-state", hasLimits && [kept.memory_by, kept.compute_by].includes("nobody") ? "warn" : null);
  }

  drawUse(container) {
    this.opened?.draw(container);
    const cores = usedCores(container);
    const has = (source) => container.gpus.some((share) => share.usage?.sm_source === source);
    const unknown = has("mps") ? "not known: MPS" : "–";
    const shown = cores === null ? unknown : format.coresOf(cores, container.cores) + (has("library") ? ", paid" : "");
    this.meters.compute.draw(cores, container.cores, shown);
    set(this.#cell("compute"), "title", has("mps") ? MPS : has("library") ? PAID : null);
    const memory = usedMemory(container);
    this.meters.used.draw(memory, container.memory_bytes, memory === null ? "–" : format.bytesOf(memory, container.memory_bytes));
  }

  matches(text) {
    return !text || this.text.includes(text);
  }
}

function makeMeter(label) {
  const text = h("span", { class: "meter-text" });
  const meter = h("span", { class: "meter", role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 }, h("i"));
  function draw(used, limit, shown) {
    const ratio = used === null || !limit ? 0 : used / limit;
    write(text, shown);
    set(meter, "aria-valuenow", Math.min(100, Math.round(ratio * 100)));
    set(meter, "aria-valuetext", used === null ? "not known" : `${shown}, ${format.percent(ratio)} of the limit`);
    set(meter, "data-over", ratio > 1.02);
    vary(meter, "--used", Math.min(1, ratio).toFixed(3));
  }
  return { parts: [meter, text], draw };
}
