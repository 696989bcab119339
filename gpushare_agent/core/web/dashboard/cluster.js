// The page of all nodes: what is allocated where, and why pods wait. Reads its server every few seconds while it is in sight.

import { arrange, byId, h, set, vary, write } from "./dom.js";
import * as format from "./format.js";
import { isCordoned, isUnhealthy, kindOf } from "./health.js";
import { read } from "./reading.js";
import { startTheme } from "./theme.js";

const PERIOD_MS = 5000;
const SLOW_MS = 30000; // a large cluster's answer is made in slices, and an agent's comes through the API server
const SILENT_S = 100; // a watch sends something each minute
const NODES_ASKED = 8; // open nodes whose agents are asked for the use, each time
const SHOWN_NODES = 100; // drawn at once; the filters find the others

const views = new Map(); // node's name -> NodeView
const entries = new Map(); // waiting pod's UID -> entry
let cluster = null; // {nodes, waiting, head}
let answeredAt = Date.now();

const readJson = async (path) => (await read(path, {}, SLOW_MS)).json();

async function readCluster() {
  const nodes = [];
  let head = {};
  for (let after = ""; after !== null; after = head.next_after) {
    head = await readJson(`api/v1/cluster${after && `?after=${encodeURIComponent(after)}`}`);
    nodes.push(...head.nodes);
  }
  return { head, nodes, waiting: await readJson("api/v1/waiting") };
}

async function refresh() {
  try {
    cluster = await readCluster();
    answeredAt = Date.now();
    draw();
    drawLink("");
    readUses();
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
  const { not_listed: missing = [], silent_seconds: silent = null, lost = null } = cluster?.head ?? {};
  let [state, text] = ["good", "● Live"];
  if (problem) [state, text] = ["bad", `✕ No contact for ${format.duration((Date.now() - answeredAt) / 1000)}`];
  else if (missing.length) [state, text] = ["warn", `No list of ${missing.join(" and ")} yet: see the terminal`];
  else if (lost) [state, text] = ["warn", `Stale: no answer of the API server for ${format.duration(lost.seconds)}`];
  else if (silent > SILENT_S) [state, text] = ["warn", `Stale: API server silent for ${format.duration(silent)}`];
  set(byId("live"), "data-state", state);
  set(byId("live"), "title", problem || lost?.why);
  write(byId("live"), text);
  set(document.body, "data-link", state);
}

function draw() {
  const { head, nodes, waiting } = cluster;
  write(byId("facts"), `gpushare-agent ${head.version} · a GPU core is 1/100 of a GPU's compute · an open node has its GPUs' use`);
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

const listed = (...parts) => parts.filter(Boolean).join(", ");
const coresOf = (gpu) => gpu.cores.allocated;
const memoryOf = (gpu) => gpu.memory.allocated_bytes;

function drawSummary(nodes, waiting) {
  const gpus = nodes.flatMap((node) => node.gpus);
  const total = (value) => gpus.reduce((sum, gpu) => sum + value(gpu), 0);
  const [cores, allCores, memory] = [total(coresOf), total((gpu) => gpu.cores.capacity), total(memoryOf)];
  const capacity = total((gpu) => gpu.memory.capacity_bytes);
  const [unhealthy, out] = [gpus.filter(isUnhealthy).length, gpus.filter(isCordoned).length];
  const serving = nodes.filter((node) => node.is_ready && !node.is_cordoned).flatMap((node) => node.gpus);
  const free = serving.filter((gpu) => gpu.is_healthy && !coresOf(gpu) && !memoryOf(gpu)).length;
  const [notReady, closed] = [nodes.filter((node) => !node.is_ready).length, nodes.filter((node) => node.is_cordoned).length];
  const pods = nodes.reduce((sum, node) => sum + node.reservations.length, 0);
  const tiles = [
    ["Nodes", nodes.length, listed(notReady && `${notReady} not ready`, closed && `${closed} cordoned`), notReady ? "bad" : closed ? "warn" : null],
    ["GPUs", nodes.reduce((sum, node) => sum + format.gpuCount(node.gpus, node.mig_gpus), 0), listed(unhealthy && `${unhealthy} unhealthy`, out && `${out} cordoned`) || `${free} free`, unhealthy ? "bad" : out ? "warn" : null],
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
    const [message, mistake, nodes] = [h("p"), h("p", { class: "reason", "data-kind": "bad" }), h("div")];
    const details = h("details", {},
      h("summary", {},
        h("span", { class: "outcome", "data-kind": "warn" }, "Waiting"),
        h("span", { class: "decision-name" }, `${pod.namespace}/${pod.pod}`),
        h("span", { class: "decision-result" }, [...(pod.requests.length ? pod.requests.map(format.request) : [pod.asked]), pod.more_requests && `${pod.more_requests} more`].filter(Boolean).join(" + "))),
      h("div", { class: "decision-body" }, mistake, message, nodes));
    details.addEventListener("toggle", () => details.open && showNodes(nodes, pod));
    entry = { element: h("li", { class: "waits", "data-uid": pod.uid }, details), message, mistake };
    entries.set(pod.uid, entry);
  }
  write(entry.message, pod.message ? `The scheduler: ${pod.message}` : "The scheduler has said nothing yet.");
  write(entry.mistake, pod.mistake);
  return entry.element;
}

/** As `kubectl gpushare explain` says it. */
function remedies({ fits, changes, other_reasons: others, not_checked: unchecked, ignored }) {
  const refused = Object.entries(others).map(([text, count]) => `${text} (${format.count(count, "node", "nodes")})`).join("; ");
  return [
    fits && h("p", {}, `It fits ${fits}: the scheduler has not tried again yet, or has another reason.`),
    changes.length > 0 && h("p", {}, "To start now, one of:"),
    changes.length > 0 && h("ul", { class: "changes" }, changes.map((change) => h("li", {}, change.text))),
    refused && h("p", {}, `Nodes with room on their GPUs are refused: ${refused}`),
    ignored && h("p", {}, `Ignored: ${ignored}`),
    unchecked.length > 0 && h("p", { class: "quiet" }, `Not checked: ${unchecked.join("; ")}`),
  ].filter(Boolean);
}

async function showNodes(place, pod) {
  try {
    const answer = await readJson(`api/v1/waiting?uid=${encodeURIComponent(pod.uid)}`);
    const { nodes, count } = answer;
    const rows = nodes.flatMap((node) => [
      h("tr", { class: "of-node" }, h("th", { scope: "rowgroup", colspan: 4 }, node.name, h("span", { class: "quiet" }, ` ${node.verdict}`))),
      ...node.gpus.map((gpu) => h("tr", { "data-chosen": gpu.verdict === "fits" },
        h("th", { scope: "row" }, `GPU ${gpu.label}`),
        h("td", { "data-number": true, "data-label": "GPU cores free" }, `${gpu.free_cores}/100`),
        h("td", { "data-number": true, "data-label": "Memory free" }, format.bytes(gpu.free_bytes)),
        h("td", {}, gpu.verdict === "fits" ? "✓ fits" : gpu.verdict))),
    ]);
    place.replaceChildren(
      ...remedies(answer),
      !count ? "" : table(`Every GPU, for the largest container of ${pod.namespace}/${pod.pod}`, ["GPU", "GPU cores free", "Memory free", "Verdict"], h("tbody", {}, rows)),
      count > nodes.length ? h("p", { class: "quiet" }, `and ${count - nodes.length} more nodes`) : "");
  } catch (error) {
    place.replaceChildren(h("p", {}, `The GPUs cannot be shown: ${error.message}`));
  }
}

function table(name, headings, body) {
  return h("div", { class: "scrolling", tabindex: 0, role: "region", "aria-label": name },
    h("table", { class: "candidates of-gpus" }, h("caption", {}, name),
      h("thead", {}, h("tr", {}, headings.map((heading, place) => h("th", { scope: "col", "data-number": place === 1 || place === 2 }, heading)))),
      body));
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
    this.badges = h("span", { class: "badges" });
    this.strip = h("span", { class: "strip", role: "img" });
    this.rows = h("tbody");
    this.unknown = h("p", { class: "quiet", hidden: true });
    this.body = h("div", { class: "node-body" },
      h("p", {}, h("a", { href: `nodes/${encodeURIComponent(name)}/` }, `Dashboard of ${name}`), h("span", { class: "quiet" }, ": its containers, history and admissions")),
      table(`GPUs of ${name}`, ["GPU", "GPU cores", "Memory", "State", "Pods"], this.rows), this.unknown);
    this.uses = new Map(); // GPU's UUID -> its use, where the node's agent has been asked
    this.details = h("details", {},
      h("summary", {}, h("span", { class: "node-name" }, name), this.facts, this.strip, this.badges), this.body);
    this.element = h("li", { class: "panel node", "data-node": name }, this.details);
    this.details.addEventListener("toggle", () => {
      this.#drawBody();
      this.readUse();
    });
  }

  draw(node, namespace) {
    Object.assign(this, { node, namespace });
    const { gpus } = node;
    const [unhealthy, out] = [gpus.filter(isUnhealthy).length, gpus.filter(isCordoned).length];
    const own = ofNamespace(node, namespace).length;
    const facts = [gpus[0]?.name || node.model, format.count(format.gpuCount(gpus, node.mig_gpus), "GPU", "GPUs"), `${gpus.reduce((sum, gpu) => sum + coresOf(gpu), 0)}/${gpus.reduce((sum, gpu) => sum + gpu.cores.capacity, 0)} GPU cores allocated`,
      `${format.count(own, "pod", "pods")}${namespace ? ` of ${namespace}` : ""}`, node.is_exact ? "" : "GPUs not reported: capacity divided evenly"];
    write(this.facts, facts.filter(Boolean).join(" · "));
    const badges = [
      !node.is_ready && ["bad", "✕ Node not ready"], node.is_cordoned && ["warn", "‖ Node cordoned"],
      unhealthy && ["bad", `✕ ${format.count(unhealthy, "GPU", "GPUs")} unhealthy`], out && ["warn", `‖ ${format.count(out, "GPU", "GPUs")} cordoned`],
    ].filter(Boolean);
    this.badges.replaceChildren(...(badges.length ? badges : [["good", "✓ Healthy"]]).map(badge));
    set(this.strip, "aria-label", gpus.map((gpu) => `GPU ${format.gpuLabel(gpu)}: GPU cores ${format.coresAllocated(gpu)}`).join(", "));
    while (this.strip.children.length > gpus.length) this.strip.lastElementChild.remove();
    gpus.forEach((gpu, place) => {
      const cell = this.strip.children[place] ?? this.strip.appendChild(h("i"));
      vary(cell, "--used", (Math.max(coresOf(gpu) / 100, memoryOf(gpu) / (gpu.memory.capacity_bytes || 1))).toFixed(2));
      set(cell, "data-kind", kindOf(gpu));
    });
    this.#drawBody();
  }

  /** Of its agent, through the API server; while it is open. What is not answered is not known, and it is said why. */
  async readUse() {
    if (!this.details.open || this.isReading) return;
    this.isReading = true;
    let problem = "";
    try {
      const { gpus } = await readJson(`nodes/${encodeURIComponent(this.node.name)}/api/v1/node`);
      this.uses = new Map(gpus.map((gpu) => [gpu.uuid, gpu.usage]));
    } catch (error) {
      this.uses = new Map();
      problem = `The use of these GPUs is not known: ${error.message}`;
    }
    this.isReading = false;
    this.unknown.hidden = !problem;
    write(this.unknown, problem);
    this.#drawBody();
  }

  /** Only while it is open, and the rows alone: the keyboard may be in the rest. */
  #drawBody() {
    const { node, namespace } = this;
    const state = JSON.stringify([node, namespace, [...this.uses]]);
    if (!this.details.open || state === this.drawn) return;
    this.drawn = state;
    const pods = ofNamespace(node, namespace);
    this.rows.replaceChildren(...node.gpus.map((gpu) => this.#row(gpu, pods.filter((one) => String(gpu.index) in one.charges))));
  }

  #row(gpu, pods) {
    const use = this.uses.get(gpu.uuid);
    const parts = (allocated, value, text) => [part(allocated), use && value !== null && part(`${text(value)} in use`)];
    return h("tr", { "data-gpu": gpu.index },
      h("th", { scope: "row" }, `GPU ${format.gpuLabel(gpu)}`),
      h("td", { "data-number": true, "data-label": "GPU cores" }, parts(format.coresAllocated(gpu), use?.sm_ratio, format.percent)),
      h("td", { "data-number": true, "data-label": "Memory" }, parts(`${format.bytesOf(memoryOf(gpu), gpu.memory.capacity_bytes)} allocated`, use?.memory_used_bytes, format.bytes)),
      h("td", {}, states(gpu)),
      h("td", {}, pods.length ? h("ul", {}, pods.map((one) => h("li", {}, podText(one, gpu.index)))) : null));
  }
}

/** The use on open nodes, of a few: each is asked of an agent through the API server. */
function readUses() {
  [...views.values()].filter((view) => view.details.open).slice(0, NODES_ASKED).forEach((view) => view.readUse());
}

const part = (text) => h("span", { class: "part" }, text);
const badge = ([kind, text]) => h("span", { class: "badge", "data-kind": kind }, text);

/** Each with its reason, where one is known. A node reports that a GPU is cordoned, and mostly not why. */
function states(gpu) {
  const [unhealthy, why] = [isUnhealthy(gpu), gpu.cordoned === "cordoned" ? "" : gpu.cordoned];
  return [
    unhealthy && badge(["bad", "✕ Unhealthy"]),
    unhealthy && gpu.health_reason && h("p", { class: "reason", "data-kind": "bad" }, gpu.health_reason),
    isCordoned(gpu) && badge(["warn", `‖ Cordoned${why && `: ${why}`}`]),
    !unhealthy && !isCordoned(gpu) && "Healthy",
  ];
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
