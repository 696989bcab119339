// The page of all nodes: what is allocated where, and why pods wait. Reads its server every few seconds while it is in sight.

import { arrange, byId, h, set, vary, write } from "./dom.js";
import * as format from "./format.js";
import { isCordoned, isUnhealthy, kindOf } from "./health.js";
import { startTheme } from "./theme.js";

const PERIOD_MS = 5000;
const SILENT_S = 180; // a watch sends something each minute
const SHOWN_NODES = 100; // drawn at once; the filters find the others

const views = new Map(); // node's name -> NodeView
const entries = new Map(); // waiting pod's UID -> entry
let cluster = null; // {nodes, waiting, head}
let answeredAt = Date.now();

async function read(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.text()).slice(0, 200)}`);
  return answer.json();
}

async function readCluster() {
  const nodes = [];
  let head = {};
  for (let after = ""; after !== null; after = head.next_after) {
    head = await read(`api/v1/cluster${after && `?after=${encodeURIComponent(after)}`}`);
    nodes.push(...head.nodes);
  }
  return { head, nodes, waiting: await read("api/v1/waiting") };
}

async function refresh() {
  try {
    cluster = await readCluster();
    answeredAt = Date.now();
    draw();
    drawLink("");
  } catch (error) {
    drawLink(error.message);
  }
  setTimeout(whenInSight, PERIOD_MS);
}

function whenInSight() {
  if (!document.hidden) refresh();
  else document.addEventListener("visibilitychange", whenInSight, { once: true });
}

function drawLink(problem) {
  const { not_listed: missing = [], silent_seconds: silent = null } = cluster?.head ?? {};
  let [state, text] = ["good", "● Live"];
  if (problem) [state, text] = ["bad", `✕ No contact for ${format.duration((Date.now() - answeredAt) / 1000)}`];
  else if (missing.length) [state, text] = ["warn", `No list of ${missing.join(" and ")} yet: see the terminal`];
  else if (silent > SILENT_S) [state, text] = ["warn", `Stale: API server silent for ${format.duration(silent)}`];
  set(byId("live"), "data-state", state);
  set(byId("live"), "title", problem);
  write(byId("live"), text);
  set(document.body, "data-link", state);
}

function draw() {
  const { head, nodes, waiting } = cluster;
  write(byId("facts"), `gpushare-agent ${head.version} · GPUs allocated, not their use: a node's own dashboard has that`);
  drawNamespaces(nodes, waiting.pods);
  const namespace = byId("namespace").value;
  drawSummary(nodes, waiting.count);
  drawWaiting(waiting, namespace);
  drawNodes(nodes, namespace, byId("filter").value.trim().toLowerCase());
  set(document.body, "data-ready", true);
}

const namespaceOf = (reservation) => reservation.pod.slice(0, reservation.pod.indexOf("/"));
const ofNamespace = (node, namespace) => node.reservations.filter((one) => !namespace || namespaceOf(one) === namespace);

function drawNamespaces(nodes, waiting) {
  const chosen = byId("namespace").value;
  const names = new Set([chosen, ...waiting.map((pod) => pod.namespace), ...nodes.flatMap((node) => node.reservations.map(namespaceOf))]);
  names.delete("");
  const wanted = ["", ...[...names].sort(format.compareTexts)];
  if (wanted.join() === byId("namespace").dataset.shown) return;
  byId("namespace").dataset.shown = wanted.join();
  byId("namespace").replaceChildren(...wanted.map((name) => h("option", { value: name, selected: name === chosen }, name || "all")));
}

const coresOf = (gpu) => gpu.cores.allocated;
const memoryOf = (gpu) => gpu.memory.allocated_bytes;

function drawSummary(nodes, waiting) {
  const gpus = nodes.flatMap((node) => node.gpus);
  const total = (value) => gpus.reduce((sum, gpu) => sum + value(gpu), 0);
  const [cores, allCores, memory] = [total(coresOf), total((gpu) => gpu.cores.capacity), total(memoryOf)];
  const capacity = total((gpu) => gpu.memory.capacity_bytes);
  const [unhealthy, out] = [gpus.filter(isUnhealthy).length, gpus.filter(isCordoned).length];
  const free = gpus.filter((gpu) => gpu.is_healthy && !coresOf(gpu) && !memoryOf(gpu)).length;
  const pods = nodes.reduce((sum, node) => sum + node.reservations.length, 0);
  const tiles = [
    ["Nodes", nodes.length, ""],
    ["GPUs", gpus.length, [unhealthy && `${unhealthy} unhealthy`, out && `${out} cordoned`].filter(Boolean).join(", ") || `${free} free`, unhealthy ? "bad" : out ? "warn" : null],
    ["Pods with GPUs", pods, ""],
    ["Waiting pods", waiting, "", waiting ? "warn" : null],
    ["Compute allocated", allCores ? format.percent(cores / allCores) : "–", `${cores} of ${allCores} GPU cores`],
    ["Memory allocated", capacity ? format.percent(memory / capacity) : "–", format.bytesOf(memory, capacity)],
  ];
  byId("summary").replaceChildren(...tiles.map(([name, value, detail, kind]) =>
    h("div", { class: "tile", "data-kind": kind }, h("dt", {}, name), h("dd", {}, h("strong", {}, value), h("span", { class: "quiet" }, detail)))));
}

// --- waiting pods ---

function drawWaiting({ count, pods }, namespace) {
  const shown = pods.filter((pod) => !namespace || pod.namespace === namespace);
  const known = new Set(pods.map((pod) => pod.uid));
  for (const uid of entries.keys()) if (!known.has(uid)) entries.delete(uid);
  arrange(byId("waiting"), shown.map(waitingEntry));
  byId("waiting-empty").hidden = shown.length > 0;
  write(byId("waiting-empty"), namespace ? `No pod of namespace ${namespace} waits for GPUs.` : "No pod waits for GPUs.");
  write(byId("waiting-count"), count ? `${format.count(shown.length, "pod", "pods")}${count > pods.length ? ` of the first ${pods.length} of ${count}` : ""}` : "");
}

function waitingEntry(pod) {
  let entry = entries.get(pod.uid);
  if (!entry) {
    const [message, nodes] = [h("p"), h("div")];
    const details = h("details", {},
      h("summary", {},
        h("span", { class: "outcome", "data-kind": "warn" }, "Waiting"),
        h("span", { class: "decision-name" }, `${pod.namespace}/${pod.pod}`),
        h("span", { class: "decision-result" }, [...pod.requests.map(format.request), pod.more_requests && `${pod.more_requests} more`].filter(Boolean).join(" + "))),
      h("div", { class: "decision-body" }, message, nodes));
    details.addEventListener("toggle", () => details.open && showNodes(nodes, pod.uid));
    entry = { element: h("li", { class: "waits", "data-uid": pod.uid }, details), message };
    entries.set(pod.uid, entry);
  }
  write(entry.message, pod.message ? `The scheduler: ${pod.message}` : "The scheduler has said nothing yet.");
  return entry.element;
}

async function showNodes(place, uid) {
  try {
    const { nodes, count } = await read(`api/v1/waiting?uid=${encodeURIComponent(uid)}`);
    const rows = nodes.flatMap((node) => [
      h("tr", { class: "of-node" }, h("th", { scope: "rowgroup", colspan: 4 }, node.name, h("span", { class: "quiet" }, ` ${node.verdict}`))),
      ...node.gpus.map((gpu) => h("tr", { "data-chosen": gpu.verdict === "fits" },
        h("th", { scope: "row" }, `GPU ${gpu.label}`),
        h("td", { "data-number": true }, `${gpu.free_cores}/100 cores`),
        h("td", { "data-number": true }, format.bytes(gpu.free_bytes)),
        h("td", {}, gpu.verdict === "fits" ? "✓ fits" : gpu.verdict))),
    ]);
    place.replaceChildren(
      table("Every GPU, for the pod's largest container", ["GPU", "Compute free", "Memory free", "Verdict"], rows),
      count > nodes.length ? h("p", { class: "quiet" }, `and ${count - nodes.length} more nodes`) : "");
  } catch (error) {
    place.replaceChildren(h("p", {}, `The GPUs cannot be shown: ${error.message}`));
  }
}

function table(name, headings, rows) {
  return h("div", { class: "scrolling", tabindex: 0, role: "region", "aria-label": name },
    h("table", { class: "candidates of-gpus" }, h("caption", {}, name),
      h("thead", {}, h("tr", {}, headings.map((heading, place) => h("th", { scope: "col", "data-number": place === 1 || place === 2 }, heading)))),
      h("tbody", {}, rows)));
}

// --- nodes ---

function drawNodes(nodes, namespace, text) {
  const names = new Set(nodes.map((node) => node.name));
  for (const name of views.keys()) if (!names.has(name)) views.delete(name);
  const matching = nodes.filter((node) => (!namespace || ofNamespace(node, namespace).length) && (!text || textOf(node).includes(text)));
  const shown = matching.slice(0, SHOWN_NODES);
  for (const node of shown) if (!views.has(node.name)) views.set(node.name, new NodeView(node.name));
  for (const node of shown) views.get(node.name).draw(node, namespace);
  arrange(byId("nodes"), shown.map((node) => views.get(node.name).element));
  const part = matching.length > shown.length ? `, the first ${shown.length} are shown` : "";
  write(byId("nodes-count"), `${matching.length < nodes.length ? `${matching.length} of ` : ""}${format.count(nodes.length, "node", "nodes")}${part}`);
  byId("nodes-empty").hidden = shown.length > 0;
  const where = namespace ? ` with a pod of namespace ${namespace}` : "";
  write(byId("nodes-empty"), nodes.length ? `No node${where}${text ? ` has “${text}” in its name, GPU model or pods` : ""}.` : "No node offers GPUs: is the agent installed?");
}

function textOf(node) {
  return [node.name, node.model, node.pool, ...node.gpus.map((gpu) => gpu.name), ...node.reservations.map((one) => one.pod)].join("\n").toLowerCase();
}

class NodeView {
  constructor(name) {
    this.facts = h("span", { class: "quiet" });
    this.badge = h("span", { class: "badge" });
    this.strip = h("span", { class: "strip", role: "img" });
    this.body = h("div", { class: "node-body" });
    this.details = h("details", {},
      h("summary", {}, h("span", { class: "node-name" }, name), this.facts, this.strip, this.badge), this.body);
    this.element = h("li", { class: "panel node", "data-node": name }, this.details);
    this.details.addEventListener("toggle", () => this.#drawBody());
  }

  draw(node, namespace) {
    Object.assign(this, { node, namespace });
    const { gpus } = node;
    const [unhealthy, out] = [gpus.filter(isUnhealthy).length, gpus.filter(isCordoned).length];
    const own = ofNamespace(node, namespace).length;
    const facts = [gpus[0]?.name || node.model, format.count(gpus.length, "GPU", "GPUs"), `${gpus.reduce((sum, gpu) => sum + coresOf(gpu), 0)}/${gpus.reduce((sum, gpu) => sum + gpu.cores.capacity, 0)} GPU cores`,
      `${format.count(own, "pod", "pods")}${namespace ? ` of ${namespace}` : ""}`, node.is_exact ? "" : "GPUs not reported: capacity divided evenly"];
    write(this.facts, facts.filter(Boolean).join(" · "));
    set(this.badge, "data-kind", unhealthy ? "bad" : out ? "warn" : "good");
    write(this.badge, unhealthy ? `✕ ${unhealthy} unhealthy` : out ? `‖ ${out} cordoned` : "✓ Healthy");
    set(this.strip, "aria-label", gpus.map((gpu) => `GPU ${format.gpuLabel(gpu)}: ${coresOf(gpu)}/${gpu.cores.capacity} cores allocated`).join(", "));
    while (this.strip.children.length > gpus.length) this.strip.lastElementChild.remove();
    gpus.forEach((gpu, place) => {
      const cell = this.strip.children[place] ?? this.strip.appendChild(h("i"));
      vary(cell, "--used", (Math.max(coresOf(gpu) / 100, memoryOf(gpu) / (gpu.memory.capacity_bytes || 1))).toFixed(2));
      set(cell, "data-kind", kindOf(gpu));
    });
    this.#drawBody();
  }

  /** Only while it is open, and only where something has changed: the keyboard may be in it. */
  #drawBody() {
    const { node, namespace } = this;
    const state = JSON.stringify([node, namespace]);
    if (!this.details.open || state === this.drawn) return;
    this.drawn = state;
    const pods = ofNamespace(node, namespace);
    const rows = node.gpus.map((gpu) => h("tr", { "data-gpu": gpu.index },
      h("th", { scope: "row" }, `GPU ${format.gpuLabel(gpu)}`),
      h("td", { "data-number": true }, `${coresOf(gpu)}/${gpu.cores.capacity} cores`),
      h("td", { "data-number": true }, format.bytesOf(memoryOf(gpu), gpu.memory.capacity_bytes)),
      h("td", {}, isUnhealthy(gpu) ? h("span", { class: "badge", "data-kind": "bad" }, "✕ Unhealthy") : gpu.cordoned ? h("span", { class: "badge", "data-kind": "warn" }, `‖ Cordoned: ${gpu.cordoned}`) : "Healthy"),
      h("td", {}, h("ul", {}, pods.filter((one) => String(gpu.index) in one.charges).map((one) => h("li", {}, podText(one, gpu.index)))))));
    const command = `kubectl -n gpushare-system port-forward $(kubectl -n gpushare-system get pod -o name -l app.kubernetes.io/name=gpushare-agent --field-selector spec.nodeName=${node.name}) 5678`;
    this.body.replaceChildren(
      table(`GPUs of ${node.name}`, ["GPU", "Compute allocated", "Memory allocated", "State", "Pods"], rows),
      h("p", { class: "quiet" }, "Use, history and admissions: this node's own dashboard, at ", h("a", { href: "http://localhost:5678/" }, "localhost:5678"), " with"),
      h("pre", { tabindex: 0 }, h("code", {}, command)));
  }
}

function podText(one, index) {
  const [cores, blocks, units, isWhole] = one.charges[index];
  const { memory_block_bytes: block, unit_bytes: unit } = cluster.head;
  const share = isWhole ? "whole GPU" : format.request({ cores, memory_bytes: blocks * block + units * unit });
  const unsure = { assumed: ", being bound", unplaced: ", not reported by its node: may be on any GPU" }[one.stage] ?? "";
  return `${one.pod}: ${share}${unsure}`;
}

startTheme();
byId("namespace").addEventListener("change", () => cluster && draw());
byId("filter").addEventListener("input", () => cluster && draw());
setInterval(() => byId("live").dataset.state === "bad" && drawLink(byId("live").title), 1000);
refresh();
