// The dashboard: joins the node's store with the parts of the page. Draws once per frame at most, and only what changed.

import { GpuView } from "./gpus.js";
import { ContainerTable } from "./containers.js";
import { Decisions } from "./decisions.js";
import { arrange, byId, h, keepClear, set, write } from "./dom.js";
import { compareTexts } from "./format.js";
import { isUnhealthy } from "./health.js";
import { History, spanText } from "./history.js";
import { huesOf } from "./hues.js";
import { isOfCluster, Store } from "./store.js";
import { Summary } from "./summary.js";
import { startChoice, startTheme } from "./theme.js";
import { TopologyView } from "./topology.js";

const COMPACT_ABOVE = 8; // GPUs in use, whose curves and lists would push the containers out of sight
const MANY = 40; // containers from which on bars jump instead of gliding: gliding hundreds of them costs every frame

const views = new Map(); // GPU's uuid -> GpuView
const store = new Store(draw, drawLink);
const summary = new Summary(store);
const history = new History(store);
const table = new ContainerTable(store, history);
const decisions = new Decisions(store);
const topology = new TopologyView(store);
let huesOfPods = new Map(); // pod's UID -> hue
const podOf = (key) => key.split("/", 1)[0];
const hues = { of: (key) => huesOfPods.get(podOf(key)) ?? 0 }; // 0: it is on no GPU
const unhealthy = new Set(); // uuids of the GPUs whose containers' rows say that it failed
let inOrder = new Map(); // key -> container, by namespace, pod and container

function draw(changed) {
  let { everything } = changed;
  if (everything || changed.containers.size) {
    inOrder = sorted();
    const before = huesOfPods;
    huesOfPods = huesOf([...containersByGpu().values()].map((found) => found.map(([key]) => podOf(key))));
    everything ||= [...before].some(([uid, hue]) => (huesOfPods.get(uid) ?? hue) !== hue);
  }
  for (const uuid of changed.gpus) checkHealth(uuid, changed);
  summary.draw();
  drawGpus(everything ? null : new Set([...changed.gpus, ...changed.shares]));
  drawMigGpus();
  table.draw(everything ? null : changed.containers, changed.used, hues);
  drawEmpty();
  if (everything || changed.decisions.length) decisions.draw();
  if (everything || changed.gpus.size) topology.draw();
  if (everything || (changed.sampled && history.isDue())) readPast();
  else if (changed.sampled && history.sample()) drawPast();
  announce(changed.decisions);
  set(document.body, "data-ready", true);
}

/** A GPU that failed, or works again, changes the rows of its containers. */
function checkHealth(uuid, changed) {
  const gpu = store.gpus.get(uuid);
  if (!gpu || unhealthy.has(uuid) === isUnhealthy(gpu)) return;
  if (!unhealthy.delete(uuid)) unhealthy.add(uuid);
  for (const [key, container] of store.containers) if (container.gpus.some((share) => share.uuid === uuid)) changed.containers.add(key);
}

function sorted() {
  const order = (one) => `${one.namespace}/${one.pod}/${one.container}`;
  return new Map([...store.containers].sort(([, one], [, two]) => compareTexts(order(one), order(two))));
}

/** `uuids` are those to draw, null for all. */
function drawGpus(uuids) {
  const gpus = [...store.gpus.values()].sort((one, two) => one.index - two.index);
  if (!uuids) {
    for (const uuid of views.keys()) if (!store.gpus.has(uuid)) views.delete(uuid);
    for (const gpu of gpus) if (!views.has(gpu.uuid)) views.set(gpu.uuid, new GpuView());
  }
  set(document.body, "data-many", store.containers.size > MANY);
  const on = containersByGpu();
  const isFree = (gpu) => !on.has(gpu.uuid) && !(gpu.unattributed.length);
  const elements = (some) => some.map((gpu) => views.get(gpu.uuid).element);
  const used = gpus.filter((gpu) => views.has(gpu.uuid) && !isFree(gpu));
  arrange(byId("gpus"), elements(used));
  byId("compact-choice").hidden = used.length <= COMPACT_ABOVE;
  drawCompact();
  arrange(byId("gpus-free"), elements(gpus.filter((gpu) => views.has(gpu.uuid) && isFree(gpu))));
  for (const gpu of gpus) if (!uuids || uuids.has(gpu.uuid)) views.get(gpu.uuid)?.draw(gpu, on.get(gpu.uuid) ?? [], hues, store.node.agent.sampled_at);
}

function drawCompact() {
  set(byId("gpus"), "data-compact", !byId("compact-choice").hidden && byId("compact").checked);
}

function containersByGpu() {
  const found = new Map();
  for (const [key, container] of inOrder) {
    for (const { uuid } of container.gpus) {
      if (!found.has(uuid)) found.set(uuid, []);
      found.get(uuid).push([key, container]);
    }
  }
  return found;
}

async function readPast() {
  await history.load();
  history.sample();
  drawPast();
}

function drawPast() {
  if (history.span === "recent") write(byId("recent-span"), spanText(history.seconds()));
  for (const [uuid, view] of views) view.drawPast(history.gpus.get(uuid) ?? { sm: [], memory: [] }, history.points, history.seconds());
}

/** GPUs on which MIG instances are made on demand: also those that have none are to be seen. */
function drawMigGpus() {
  const texts = (store.node.mig_gpus ?? []).map((gpu) =>
    [`GPU ${gpu.index} (${gpu.name})`, gpu.cordoned && `cordoned: ${gpu.cordoned}`, gpu.health_reason, ...gpu.texts].filter(Boolean).join(" · "));
  const list = byId("mig-gpus");
  while (list.children.length > texts.length) list.lastElementChild.remove();
  texts.forEach((text, place) => write(list.children[place] ?? list.appendChild(h("li")), text));
}

function drawEmpty() {
  const gpus = byId("gpus-empty");
  gpus.hidden = store.gpus.size > 0 || store.node.mig_gpus?.length > 0;
  write(gpus, "The driver lists no GPU on this node. The agent's log has the reason; it tries again by itself.");
  const containers = byId("containers-empty");
  const { resources } = store.node;
  const wanted = `${resources.vcore} ${resources.vmemory} ${store.containers.size > 0}`;
  if (containers.dataset.shown === wanted) return;
  containers.dataset.shown = wanted;
  containers.hidden = store.containers.size > 0;
  containers.replaceChildren(
    h("p", {}, h("strong", {}, "No pod has a share yet."), " One with these limits appears here as soon as it is admitted:"),
    h("pre", { tabindex: 0 }, h("code", {}, `resources:\n  limits:\n    ${resources.vcore}: 30       # GPU cores, 1/100 of a GPU each\n    ${resources.vmemory}: 16     # blocks of ${resources.memory_block_bytes / 1048576} MiB`)),
    h("p", {}, "For a try: ", h("code", {}, "kubectl apply -f manifests/samples/share.yaml")));
}

/** For screen readers: only what matters, not every number. */
function announce(fresh) {
  const refused = fresh.filter((one) => one.outcome === "refused");
  if (refused.length) write(byId("spoken"), refused.map((one) => `Refused: ${one.namespace}/${one.pod}, ${one.reason}`).join(". "));
}

function drawLink(link) {
  summary.drawLink();
  if (!store.node && link.problem) write(byId("node-facts"), link.problem);
  if (link.state === "lost") write(byId("spoken"), "The connection to the agent is lost. Trying again.");
  if (link.state === "live") write(byId("spoken"), "");
}

function chooseSpan(span) {
  history.choose(span);
  if (store.node) readPast();
  table.refreshOpened();
}

startTheme();
startChoice("span", chooseSpan);
keepClear();
byId("compact").addEventListener("change", drawCompact);
byId("all-nodes").hidden = !isOfCluster;
byId("own-paths").hidden = isOfCluster; // which are no part of what is read through the API server
store.start();
