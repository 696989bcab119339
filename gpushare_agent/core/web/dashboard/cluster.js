// The page of all nodes: what is allocated where and in use, and why pods wait. Reads its server every few seconds while it is
// in sight.

import { arrange, byId, h, keepClear, set, vary, write } from "./dom.js";
import * as format from "./format.js";
import { isCordoned, isUnhealthy, kindOf } from "./health.js";
import { huesOf } from "./hues.js";
import { read } from "./reading.js";
import { startTheme } from "./theme.js";
import { plus, Uses } from "./uses.js";

const PERIOD_MS = 5000;
const SLOW_MS = 30000; // a large cluster's answer is made in slices, and an agent's comes through the API server
const SILENT_S = 100; // a watch sends something each minute
const REMEDIES_MS = 30000; // those of an open pod are worked out again so often
const SHOWN_NODES = 100; // drawn at once, and with each press of the button below them
const SHOWN_NAMESPACES = 200;
const LONG = 90; // characters of a reason that three lines hold in any column

const views = new Map(); // node's name -> NodeView
const entries = new Map(); // waiting pod's UID -> entry
const namespaceRows = new Map(); // namespace -> row
const uses = new Uses((name) => readJson(`nodes/${encodeURIComponent(name)}/api/v1/node`), drawUses);
let cluster = null; // {nodes, waiting, namespaces, quota_problem, head}
let most = SHOWN_NODES;
let drawSums = null; // timer
let sortedBy = ["namespace", 1]; // of the namespaces: column and direction
let answeredAt = Date.now();

/** A node on which all GPUs are for MIG instances offers no share. */
const NO_SHARES = { model: "", pool: "", is_exact: true, gpus: [], reservations: [], unattributed: [] };

const readJson = async (path) => (await read(path, {}, SLOW_MS)).json();

async function readCluster() {
  const nodes = [];
  let head = {};
  for (let after = ""; after !== null; after = head.next_after) {
    head = await readJson(`api/v1/cluster${after && `?after=${encodeURIComponent(after)}`}`);
    nodes.push(...head.nodes);
  }
  const [waiting, mig] = [await readJson("api/v1/waiting"), (await readJson("api/v1/mig")).nodes];
  for (const node of nodes) node.mig_gpus = mig[node.name]?.mig_gpus ?? [];
  const known = new Set(nodes.map((node) => node.name));
  for (const [name, facts] of Object.entries(mig)) if (!known.has(name)) nodes.push({ ...NO_SHARES, name, ...facts });
  return { head, nodes, waiting, ...(await readJson("api/v1/namespaces")) };
}

async function refresh() {
  try {
    cluster = await readCluster();
    answeredAt = Date.now();
    draw();
    drawLink("");
    uses.read(cluster.nodes.filter((node) => node.reservations.length || isSeen(node)).map((node) => node.name));
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
  write(byId("facts"), `gpushare-agent ${head.version} · a GPU core is 1/100 of a GPU's compute`);
  drawNamespaces(nodes, waiting.pods);
  const namespace = byId("namespace").value;
  drawSummary(nodes, waiting.count);
  const text = byId("filter").value.trim().toLowerCase();
  drawWaiting(waiting, namespace, text);
  drawTotals(namespace);
  drawNodes(nodes, namespace, text);
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
const sumOf = (items, value) => items.reduce((sum, one) => sum + value(one), 0);

/** How many GPUs of a node are entirely free, for a pod that comes now. */
const freeOf = (node) => (node.is_ready && !node.is_cordoned ? node.gpus.filter((gpu) => gpu.is_healthy && !coresOf(gpu) && !memoryOf(gpu)).length : 0);

function drawSummary(nodes, waiting) {
  const gpus = nodes.flatMap((node) => node.gpus);
  const total = (value) => gpus.reduce((sum, gpu) => sum + value(gpu), 0);
  const [cores, allCores, memory] = [total(coresOf), total((gpu) => gpu.cores.capacity), total(memoryOf)];
  const capacity = total((gpu) => gpu.memory.capacity_bytes);
  const [unhealthy, out] = [gpus.filter(isUnhealthy).length, gpus.filter(isCordoned).length];
  const free = nodes.reduce((sum, node) => sum + freeOf(node), 0);
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

function drawWaiting({ count, pods, claims_problem: unlisted }, namespace, text) {
  const shown = pods.filter((pod) => (!namespace || pod.namespace === namespace) && `${pod.namespace}/${pod.pod}`.toLowerCase().includes(text));
  const known = new Set(pods.map((pod) => pod.uid));
  for (const uid of entries.keys()) if (!known.has(uid)) entries.delete(uid);
  arrange(byId("waiting"), shown.map(waitingEntry));
  byId("waiting-empty").hidden = shown.length > 0;
  write(byId("waiting-empty"), `No pod${namespace && ` of namespace ${namespace}`} ${text && `with “${text}” in its name `}waits for GPUs.`);
  write(byId("waiting-count"), `${count ? `${format.count(shown.length, "pod", "pods")}${count > pods.length ? ` of the first ${pods.length} of ${count}` : ""}` : ""}${unlisted && ` without those that wait for MIG instances: ${unlisted}`}`);
}

function waitingEntry(pod) {
  let entry = entries.get(pod.uid);
  if (!entry) {
    const [message, mistake, nodes] = [h("p"), h("p", { class: "reason", "data-kind": "bad" }), h("div")];
    const [age, why] = [h("span", { class: "outcome", "data-kind": "warn" }), h("span", { class: "why quiet" })];
    const details = h("details", {},
      h("summary", {},
        age,
        h("span", { class: "decision-name" }, `${pod.namespace}/${pod.pod}`),
        h("span", { class: "decision-result" }, [...(pod.requests.length ? pod.requests.map(format.request) : [pod.asked]), pod.more_requests && `${pod.more_requests} more`].filter(Boolean).join(" + ")), why),
      h("div", { class: "decision-body" }, mistake, message, nodes));
    details.addEventListener("toggle", () => details.open && showNodes(entry, pod));
    entry = { element: h("li", { class: "waits", "data-uid": pod.uid }, details), details, nodes, message, mistake, age, why };
    entries.set(pod.uid, entry);
  }
  const seconds = (Date.now() - Date.parse(pod.since)) / 1000;
  write(entry.age, Number.isNaN(seconds) ? "Waiting" : `Waiting ${format.duration(seconds)}`);
  write(entry.why, pod.reason);
  write(entry.message, pod.message ? `The scheduler: ${pod.message}` : "The scheduler has said nothing yet.");
  write(entry.mistake, pod.mistake);
  entry.mistake.hidden = !pod.mistake;
  // What would help changes with the cluster; not while somebody is in it.
  if (entry.details.open && Date.now() - entry.readAt > REMEDIES_MS && !entry.nodes.matches(":hover, :focus-within")) showNodes(entry, pod);
  return entry.element;
}

/** What `kubectl gpushare explain` says, line by line; two of the lines are above already, and follow the cluster. */
const remedies = (lines) => h("dl", { class: "remedies" }, lines.filter(([name]) => !["scheduler", "mistake"].includes(name)).map(([name, texts]) =>
  h("div", {}, h("dt", {}, name), texts.map((text) => h("dd", {}, text)))));

async function showNodes(entry, pod) {
  const place = entry.nodes;
  entry.readAt = Date.now();
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
      remedies(answer.lines),
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

// --- namespaces ---

const COLUMNS = [
  { id: "namespace", name: "Namespace" },
  { id: "pods", name: "Pods" },
  { id: "waiting", name: "Waiting" },
  { id: "cores", name: "GPU cores", text: (one) => String(one.cores) },
  { id: "usedCores", name: "Cores used", text: (one) => (one.usedCores === null ? "–" : String(Math.round(one.usedCores))) },
  { id: "memory", name: "Memory", text: (one) => format.bytes(one.memory) },
  { id: "usedMemory", name: "Memory used", text: (one) => format.bytes(one.usedMemory) },
  { id: "full", name: "Quota used" },
];
const headings = COLUMNS.map((column) => h("th", { scope: "col", "data-number": !["namespace", "full"].includes(column.id) },
  h("button", { type: "button", onclick: () => sortNamespaces(column.id) }, column.name)));
const totals = h("tbody");

function sortNamespaces(id) {
  sortedBy = [id, sortedBy[0] === id ? -sortedBy[1] : id === "namespace" ? 1 : -1];
  drawTotals(byId("namespace").value);
}

/** Of each namespace that has pods, waits, or has a quota. */
function sumsOfNamespaces() {
  const found = new Map();
  const sumsOf = (name) => {
    if (!found.has(name)) found.set(name, { namespace: name, pods: 0, waiting: 0, cores: 0, usedCores: null, memory: 0, usedMemory: null, limits: null, full: null });
    return found.get(name);
  };
  for (const { namespace, cores, memory_bytes: memory, pools, limits } of cluster.namespaces) {
    const parts = (limits ?? []).map(([what, used, allowed]) => [used && !allowed ? Infinity : used / (allowed || 1), allowed ? `${used} of ${allowed} ${what}` : `${used || "no"} ${what}, none allowed`]);
    parts.sort(([one], [two]) => two - one);
    Object.assign(sumsOf(namespace), { cores, memory, limits: limits && parts.map(([, text]) => text), pools, full: parts[0]?.[0] ?? null });
  }
  for (const pod of cluster.waiting.pods) sumsOf(pod.namespace).waiting += 1;
  for (const node of cluster.nodes) {
    for (const one of node.reservations) sumsOf(namespaceOf(one)).pods += 1;
    for (const [name, used] of uses.of(node.name)?.namespaces ?? []) {
      if (!found.has(name)) continue;
      sumsOf(name).usedCores = plus(sumsOf(name).usedCores, used.cores);
      sumsOf(name).usedMemory = plus(sumsOf(name).usedMemory, used.memory);
    }
  }
  return [...found.values()];
}

function drawTotals(namespace) {
  const all = sumsOfNamespaces();
  const [id, direction] = sortedBy;
  const order = (one, two) => (id === "namespace" ? 0 : direction * ((one[id] ?? -1) - (two[id] ?? -1) || 0)) || (id === "namespace" ? direction : 1) * format.compareTexts(one.namespace, two.namespace);
  const shown = all.filter((one) => !namespace || one.namespace === namespace).sort(order).slice(0, SHOWN_NAMESPACES);
  const known = new Set(all.map((one) => one.namespace));
  for (const name of namespaceRows.keys()) if (!known.has(name)) namespaceRows.delete(name);
  COLUMNS.forEach((column, place) => set(headings[place], "aria-sort", column.id === id ? (direction > 0 ? "ascending" : "descending") : "none"));
  arrange(totals, shown.map(namespaceRow));
  byId("totals-title").parentElement.parentElement.hidden = !all.length;
  const asked = cluster.nodes.filter((node) => node.reservations.length);
  const silent = asked.filter((node) => !uses.of(node.name)).length;
  write(byId("totals-count"), [
    format.count(all.length, "namespace", "namespaces"), shown.length < all.length && !namespace && `the first ${shown.length} are shown`,
    silent && `in use: without ${silent} of ${format.count(asked.length, "node", "nodes")}, which have not answered`,
    cluster.quota_problem ? `quota not known: ${cluster.quota_problem}` : cluster.quota_note && `quota: ${cluster.quota_note}`,
  ].filter(Boolean).join(" · "));
}

function namespaceRow(one) {
  let row = namespaceRows.get(one.namespace);
  if (!row) {
    const cells = COLUMNS.slice(1, -1).map((column) => h("td", { "data-number": true, "data-label": column.name }));
    const [fill, percent, limits] = [h("i"), h("span", { class: "meter-text" }), h("span", { class: "quiet" })];
    const meter = h("span", { class: "meter", "aria-hidden": "true" }, fill);
    row = { cells, fill, meter, percent, limits, element: h("tr", {}, h("th", { scope: "row" }, one.namespace), cells, h("td", { "data-label": "Quota" }, meter, percent, limits)) };
    namespaceRows.set(one.namespace, row);
  }
  COLUMNS.slice(1, -1).forEach((column, place) => write(row.cells[place], column.text ? column.text(one) : one[column.id]));
  row.meter.hidden = row.percent.hidden = one.full === null;
  vary(row.fill, "--used", Math.min(1, one.full ?? 0).toFixed(3));
  set(row.meter, "data-over", one.full > 1);
  write(row.percent, one.full === Infinity ? "over" : format.percent(one.full));
  const listed = one.limits && [...one.limits.slice(0, 3), one.limits.length > 3 && `${one.limits.length - 3} more`, one.pools?.length && `pools ${one.pools.join(", ")}`].filter(Boolean).join("; ");
  write(row.limits, cluster.quota_problem ? "not known" : listed || "no limit");
  return row.element;
}

// --- nodes ---

const usedOf = (node) => {
  const use = uses.of(node.name);
  const known = node.gpus.map((gpu) => use?.gpus.get(gpu.uuid)?.sm ?? null).filter((sm) => sm !== null);
  return known.length ? sumOf(known, (sm) => sm) / known.length : null;
};
const allocatedOf = (node) => sumOf(node.gpus, coresOf) / (sumOf(node.gpus, (gpu) => gpu.cores.capacity) || 1);
const troubleOf = (node) => 4 * !node.is_ready + 3 * node.gpus.some(isUnhealthy) + 2 * node.is_cordoned + node.gpus.some(isCordoned);
const awaitedOf = (node) => cluster.waiting.pods.filter((pod) => pod.nominated_node === node.name).length;

/** The higher comes first; nodes that are alike, by name. */
const ORDERS = { name: () => 0, free: freeOf, allocated: allocatedOf, use: (node) => usedOf(node) ?? -1, state: troubleOf, waiting: awaitedOf };
const KINDS = {
  all: [() => true, ""], problems: [troubleOf, " with a problem"], free: [freeOf, " with a free GPU"],
};

function drawNodes(nodes, namespace, text) {
  const names = new Set(nodes.map((node) => node.name));
  for (const name of views.keys()) if (!names.has(name)) forget(name);
  uses.keep(names);
  const [isOfKind, words] = KINDS[byId("kind").value];
  const matching = nodes.filter((node) => (!namespace || ofNamespace(node, namespace).length) && (!text || textOf(node).includes(text)) && isOfKind(node));
  const value = new Map(matching.map((node) => [node.name, ORDERS[byId("order").value](node)]));
  // What moves away under the pointer or the keyboard cannot be pressed: then the order stays, except for new nodes.
  const kept = new Map(byId("nodes").matches(":hover, :focus-within") && byId("nodes").dataset.order === byId("order").value ? [...byId("nodes").children].map((one, place) => [one.dataset.node, place]) : []);
  const place = (node) => kept.get(node.name) ?? (kept.size ? Infinity : 0);
  const compare = (one, two) => (place(one) - place(two) || 0) || value.get(two.name) - value.get(one.name) || format.compareTexts(one.name, two.name);
  const shown = matching.sort(compare).slice(0, most);
  set(byId("nodes"), "data-order", byId("order").value);
  for (const node of shown) if (!views.has(node.name)) views.set(node.name, new NodeView(node.name));
  for (const node of shown) views.get(node.name).draw(node, namespace);
  arrange(byId("nodes"), shown.map((node) => views.get(node.name).element));
  byId("more").hidden = matching.length <= shown.length;
  const part = matching.length > shown.length ? `, the first ${shown.length} are shown` : "";
  write(byId("nodes-count"), `${matching.length < nodes.length ? `${matching.length} of ` : ""}${format.count(nodes.length, "node", "nodes")}${part}`);
  byId("nodes-empty").hidden = shown.length > 0;
  const where = `${words}${namespace ? ` with a pod of namespace ${namespace}` : ""}`;
  write(byId("nodes-empty"), nodes.length ? `No node${where}${text ? ` has “${text}” in its name, GPU model or pods` : ""}.` : "No node offers GPUs: is the agent installed?");
}

function textOf(node) {
  return [node.name, node.model, node.pool, ...node.gpus.map((gpu) => gpu.name), ...node.reservations.map((one) => one.pod)].join("\n").toLowerCase();
}

/** Which nodes are in sight: their use is read first and most often. */
const sight = new IntersectionObserver((changes) => {
  for (const { target, isIntersecting } of changes) uses.see(target.dataset.node, isIntersecting);
}, { rootMargin: "200px" });
const isSeen = (node) => uses.isSeen(node.name);

function forget(name) {
  sight.unobserve(views.get(name).element);
  views.delete(name);
}

/** A node's answer changes its tile at once, and the sums once for all answers of a moment. */
function drawUses(name) {
  views.get(name)?.drawUse();
  drawSums ??= setTimeout(() => {
    drawSums = null;
    drawTotals(byId("namespace").value);
  }, 250);
}

/** `8 × NVIDIA L4`, and what there is of others. An instance counts only where its GPU is not reported. */
function modelsOf({ gpus, mig_gpus: divided, model }) {
  const named = (items) => Map.groupBy(items, (gpu) => gpu.name || model || "GPU");
  const [own, onDemand] = [named(divided.length ? gpus.filter((gpu) => !gpu.mig) : gpus), named(divided)];
  return [...new Set([...own.keys(), ...onDemand.keys()])].map((name) => `${format.gpuCount(own.get(name) ?? [], onDemand.get(name))} × ${name}`);
}

class NodeView {
  constructor(name) {
    this.facts = h("span", { class: "quiet" });
    this.badges = h("span", { class: "badges" });
    this.strip = h("span", { class: "strip", role: "img" });
    this.rows = new Map(); // GPU's index -> row
    this.body = h("tbody");
    this.unknown = h("p", { class: "quiet", hidden: true });
    this.mig = h("ul", { class: "quiet" });
    this.details = h("details", {},
      h("summary", {}, h("span", { class: "node-name" }, name), this.badges, this.strip, this.facts),
      h("div", { class: "node-body" },
        h("p", {}, h("a", { href: `nodes/${encodeURIComponent(name)}/` }, `Dashboard of ${name}`), h("span", { class: "quiet" }, ": its containers, history and admissions")),
        table(`GPUs of ${name}`, ["GPU", "GPU cores", "Memory", "State", "Pods"], this.body), this.mig, this.unknown));
    this.element = h("li", { class: "panel node", "data-node": name }, this.details);
    this.details.addEventListener("toggle", () => this.#drawBody());
    sight.observe(this.element);
  }

  draw(node, namespace) {
    Object.assign(this, { node, namespace });
    const { gpus } = node;
    const [unhealthy, out, awaited] = [gpus.filter(isUnhealthy).length, gpus.filter(isCordoned).length, awaitedOf(node)];
    const badges = [
      !node.is_ready && ["bad", "✕ Node not ready"], node.is_cordoned && ["warn", "‖ Node cordoned"],
      unhealthy && ["bad", `✕ ${format.count(unhealthy, "GPU", "GPUs")} unhealthy`], out && ["warn", `‖ ${format.count(out, "GPU", "GPUs")} cordoned`],
      awaited && ["warn", `${format.count(awaited, "pod waits", "pods wait")} for it`],
    ].filter(Boolean);
    const wanted = badges.length ? badges : [["good", "✓ Healthy"]];
    once(this.badges, wanted, () => wanted.map(badge));
    this.hues = huesOf(gpus.map((gpu) => node.reservations.filter((one) => gpu.index in one.charges).map((one) => one.pod_uid)));
    const shares = gpus.map((gpu) => [kindOf(gpu), sharesOf(node, gpu).map(([uid, size]) => [this.hues.get(uid) ?? 0, size])]);
    once(this.strip, shares, () => shares.map(([kind, parts]) => h("i", { "data-kind": kind }, parts.map(([hue, size]) => {
      const part = h("b", { class: `hue-${hue}` });
      vary(part, "--size", size.toFixed(3));
      return part;
    }))));
    this.drawUse();
  }

  /** What is in use, as its agent said last; what is not answered is not known, and it is said why. */
  drawUse() {
    const { node, namespace } = this;
    const { gpus } = node;
    const [use, problem, used, own] = [uses.of(node.name), uses.problem(node.name), usedOf(node), ofNamespace(node, namespace).length];
    const facts = [
      ...modelsOf(node),
      `${sumOf(gpus, coresOf)}/${sumOf(gpus, (gpu) => gpu.cores.capacity)} allocated`,
      used === null ? problem && "use not known" : `${format.percent(used)} in use${use.isStale ? ` (${format.duration(use.age)} ago)` : ""}`,
      `${format.count(own, "pod", "pods").replace(" ", "\u00a0")}${namespace ? ` of ${namespace}` : ""}`, node.is_exact ? "" : "GPUs not reported: capacity divided evenly",
    ];
    write(this.facts, facts.filter(Boolean).join(" · "));
    set(this.element, "data-stale", use?.isStale);
    set(this.strip, "aria-label", gpus.map((gpu, place) => {
      const sm = use?.gpus.get(gpu.uuid)?.sm ?? null;
      vary(this.strip.children[place], "--used", (sm ?? 0).toFixed(3));
      return `GPU ${format.gpuLabel(gpu)}: ${format.coresAllocated(gpu)}${sm === null ? "" : `, ${format.percent(sm)} in use`}`;
    }).join("; "));
    this.unknown.hidden = !problem;
    write(this.unknown, problem && `The use of these GPUs ${use ? `is ${format.duration(use.age)} old` : "is not known"}: ${problem}`);
    this.#drawBody();
  }

  /** Only while it is open, and only what differs: the keyboard may be in it. */
  #drawBody() {
    if (!this.details.open) return;
    const { node, namespace } = this;
    const [pods, use] = [ofNamespace(node, namespace), uses.of(node.name)];
    const indexes = new Set(node.gpus.map((gpu) => gpu.index));
    for (const index of this.rows.keys()) if (!indexes.has(index)) this.rows.delete(index);
    arrange(this.body, node.gpus.map((gpu) => this.#row(gpu, pods.filter((one) => String(gpu.index) in one.charges), use?.gpus.get(gpu.uuid))));
    const mig = use?.mig.length ? use.mig : (node.mig_gpus ?? []).map((gpu) => `GPU ${gpu.index} (${gpu.name}): MIG on demand${outOfMig(gpu)}`);
    once(this.mig, mig, () => mig.map((text) => h("li", {}, text)));
  }

  #row(gpu, pods, use) {
    let row = this.rows.get(gpu.index);
    if (!row) {
      const cells = ["GPU cores", "Memory", null, null].map((label) => h("td", { "data-number": Boolean(label), "data-label": label }));
      row = { cells, element: h("tr", { "data-gpu": gpu.index }, h("th", { scope: "row" }, `GPU ${format.gpuLabel(gpu)}`), cells) };
      this.rows.set(gpu.index, row);
    }
    const [cores, memory, state, who] = row.cells;
    const parts = (cell, allocated, value, text) => {
      const texts = [allocated, value !== null && value !== undefined && `${text(value)} in use`].filter(Boolean);
      once(cell, texts, () => texts.map((one) => h("span", { class: "part" }, one)));
    };
    parts(cores, format.coresAllocated(gpu), use?.sm, format.percent);
    parts(memory, `${format.bytesOf(memoryOf(gpu), gpu.memory.capacity_bytes)} allocated`, use?.memory, format.bytes);
    once(state, [isUnhealthy(gpu), gpu.health_reason, gpu.cordoned], () => states(gpu));
    const texts = pods.map((one) => [this.hues.get(one.pod_uid), podText(one, gpu.index)]);
    once(who, texts, () => (texts.length ? [h("ul", {}, texts.map(([hue, text]) => h("li", {}, h("i", { class: `swatch hue-${hue}` }), text)))] : []));
    return row.element;
  }
}

/** Makes the children again only where what they show differs: the keyboard may be in one of them. */
function once(element, shown, make) {
  const wanted = JSON.stringify(shown);
  if (element.shown === wanted) return;
  element.shown = wanted;
  element.replaceChildren(...make().filter(Boolean));
}

/** What each pod has of a GPU, as parts of the bar: together as much as cores or memory, whichever is fuller. */
function sharesOf(node, gpu) {
  const capacity = gpu.memory.capacity_bytes || 1;
  const sizes = node.reservations.filter((one) => gpu.index in one.charges).map((one) => {
    const charge = one.charges[gpu.index];
    return [one.pod_uid, charge[3] ? 1 : Math.max(charge[0] / 100, memoryOfCharge(charge) / capacity)];
  });
  const full = Math.min(1, Math.max(coresOf(gpu) / (gpu.cores.capacity || 100), memoryOf(gpu) / capacity));
  const sum = sumOf(sizes, ([, size]) => size) || 1;
  // What only the agent names, such as a pod that was ended by force, has no pod here.
  return sizes.length ? sizes.map(([uid, size]) => [uid, (size / sum) * full]) : full ? [["", full]] : [];
}

function memoryOfCharge([, blocks, units]) {
  const { memory_block_bytes: block, unit_bytes: unit } = cluster.head;
  return blocks * block + units * unit;
}

const badge = ([kind, text]) => h("span", { class: "badge", "data-kind": kind }, text);
const outOfMig = (gpu) => [gpu.health_reason, gpu.cordoned && `cordoned: ${gpu.cordoned}`].filter(Boolean).map((why) => `, ${why}`).join("");

/** Each with its reason, where one is known. A node reports that a GPU is cordoned, and mostly not why. */
function states(gpu) {
  const [unhealthy, why] = [isUnhealthy(gpu), gpu.cordoned === "cordoned" ? "" : gpu.cordoned];
  return [
    unhealthy && badge(["bad", "✕ Unhealthy"]),
    unhealthy && gpu.health_reason && reason("bad", gpu.health_reason),
    isCordoned(gpu) && badge(["warn", "‖ Cordoned"]),
    isCordoned(gpu) && why && reason("warn", why),
    !unhealthy && !isCordoned(gpu) && "Healthy",
  ];
}

/** A long one is cut to three lines until it is opened; a screen reader has all of it. */
const reason = (kind, text) => (text.length <= LONG
  ? h("p", { class: "reason", "data-kind": kind }, text)
  : h("details", {}, h("summary", { class: "reason", "data-kind": kind }, h("span", {}, text))));

function podText(one, index) {
  const [cores, , , isWhole] = one.charges[index];
  const share = isWhole ? "whole GPU" : format.request({ cores, memory_bytes: memoryOfCharge(one.charges[index]) });
  const unsure = { assumed: ", being bound", unplaced: ", not reported by its node: may be on any GPU" }[one.stage] ?? "";
  return `${one.pod}: ${share}${unsure}`;
}

startTheme();
keepClear();
byId("totals").append(h("table", { class: "of-namespaces" },
  h("caption", { class: "unseen" }, "What each namespace has, uses and may have. The buttons in the heading sort."), h("thead", {}, h("tr", {}, headings)), totals));
for (const id of ["namespace", "kind", "order"]) byId(id).addEventListener("change", () => cluster && draw());
byId("filter").addEventListener("input", () => cluster && draw());
byId("more").addEventListener("click", () => {
  most += SHOWN_NODES;
  draw();
});
setInterval(() => byId("live").dataset.state === "bad" && drawLink(byId("live").title), 1000);
refresh();
