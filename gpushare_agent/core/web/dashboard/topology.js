// How the GPUs are connected, as a drawing: the PCIe tree above the GPUs, NVLinks below them; and as a table for reading.

import { byId, h, s } from "./dom.js";
import { gpuLabel } from "./format.js";
import { kindOf } from "./health.js";

const LEAF = { width: 44, height: 30, gap: 14 };
const SMALL_LEAF = { width: 32, height: 30, gap: 6 };
const MANY_GPUS = 10;
const LEVEL = 46;
const ARC_ROOM = 16;
const WORDS = {
  NV: "NVLink", PIX: "one PCIe switch", PXB: "several PCIe switches", PHB: "the CPU's PCIe bridge", NODE: "one NUMA node", SYS: "the link between CPUs",
};

export class TopologyView {
  constructor(store) {
    this.store = store;
  }

  draw() {
    const { topology } = this.store.node;
    const gpus = [...this.store.gpus.values()].sort((a, b) => a.index - b.index);
    const state = JSON.stringify([topology, gpus.map((gpu) => [gpu.index, gpuLabel(gpu), kindOf(gpu)])]);
    if (state === this.drawn) return;
    this.drawn = state;
    const place = byId("topology");
    if (gpus.length < 2) {
      place.replaceChildren(h("p", { class: "empty" }, `${gpus.length ? "One" : "No"} GPU, nothing to draw.`));
      return;
    }
    const wasOpen = place.querySelector("details")?.open ?? false;
    const byIndex = new Map(gpus.map((gpu) => [gpu.index, gpu]));
    // Without those that MIG divides, which are not listed.
    const links = topology.links.map((row, a) => row.map((word, b) => (byIndex.has(a) && byIndex.has(b) ? word : "")));
    const name = (index) => `GPU ${gpuLabel(byIndex.get(index) ?? { index })}`;
    const description = spoken(topology.tree, links, name);
    place.replaceChildren(
      h("div", { class: "scrolling", tabindex: 0, role: "region", "aria-label": "Drawing of the topology" }, drawing({ tree: topology.tree, links }, gpus, description, name)),
      outline(topology.tree, byIndex, name),
      h("p", { class: "quiet" }, linkText(links)),
      h("details", { open: wasOpen }, h("summary", {}, "All links as a table"), matrix(links, name)));
  }
}

function drawing({ tree, links }, gpus, description, name) {
  const order = leaves(tree);
  const size = order.length > MANY_GPUS ? SMALL_LEAF : LEAF;
  const depth = depthOf(tree);
  const top = 20;
  const leafTop = top + depth * LEVEL;
  const x = new Map(order.map((gpu, place) => [gpu, size.gap + place * (size.width + size.gap) + size.width / 2]));
  const arcs = nvlinks(links);
  const reach = Math.max(0, ...arcs.map(({ a, b }) => Math.abs(order.indexOf(a) - order.indexOf(b))));
  const height = leafTop + LEAF.height + 14 + (arcs.length ? 12 + reach * ARC_ROOM : 0);
  const width = order.length * (size.width + size.gap) + size.gap;
  const parts = [];
  branches(tree, 0, parts, { x, top, leafTop });
  const bottom = leafTop + LEAF.height;
  for (const { a, b, word } of arcs) {
    const [from, to] = [x.get(a), x.get(b)].sort((one, two) => one - two);
    const drop = bottom + 8 + Math.abs(order.indexOf(a) - order.indexOf(b)) * ARC_ROOM;
    parts.push(s("path", { class: "nvlink", d: `M${from} ${bottom}C${from} ${drop} ${to} ${drop} ${to} ${bottom}`, "stroke-width": 1 + Math.min(3, Number(word.slice(2)) / 6) },
      s("title", {}, `${name(a)} and ${name(b)}: ${word}`)));
  }
  for (const gpu of gpus) if (x.has(gpu.index)) parts.push(leaf(gpu, x.get(gpu.index), leafTop, size));
  return s("svg", { class: "topology", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": description }, parts);
}

function leaf(gpu, middle, top, size) {
  const kind = kindOf(gpu);
  const mark = { bad: " ✕", warn: " ‖", good: "" }[kind];
  return s("g", { class: "leaf", "data-kind": kind },
    s("rect", { x: middle - size.width / 2, y: top, width: size.width, height: size.height, rx: 6 }),
    s("text", { x: middle, y: top + LEAF.height / 2 + 5, "text-anchor": "middle" }, `${gpuLabel(gpu)}${mark}`),
    s("title", {}, `GPU ${gpuLabel(gpu)}`));
}

/** The same tree as a list, for where the drawing is too wide. */
function outline(branch, gpus, name, isTop = true) {
  const below = branch.children.length
    ? branch.children.map((child) => h("li", {}, outline(child, gpus, name, false)))
    : branch.gpus.map((index) => h("li", {}, name(index), h("span", { "data-kind": gpus.has(index) ? kindOf(gpus.get(index)) : "good" },
      { bad: " ✕ unhealthy", warn: " ‖ cordoned", good: "" }[gpus.has(index) ? kindOf(gpus.get(index)) : "good"])));
  return h("div", { class: isTop ? "outline" : null }, h("span", { class: "outline-kind" }, branch.kind),
    h("span", { class: "quiet" }, ` ${WORDS[branch.kind] ?? ""}`), h("ul", {}, below));
}

/** The line over a branch's children, its name in the middle, and the stems down to them. */
function branches(branch, level, parts, place) {
  const y = place.top + level * LEVEL;
  const points = branch.children.length
    ? branch.children.map((child) => ({ x: middle(child, place.x), y: place.top + (level + 1) * LEVEL }))
    : branch.gpus.map((gpu) => ({ x: place.x.get(gpu), y: place.leafTop }));
  for (const child of branch.children) branches(child, level + 1, parts, place);
  if (points.length < 2 && !branch.children.length) {
    for (const point of points) parts.unshift(s("path", { class: "stem", d: `M${point.x} ${y}V${point.y}` }));
    return;
  }
  const from = Math.min(...points.map((point) => point.x));
  const to = Math.max(...points.map((point) => point.x));
  parts.unshift(
    s("path", { class: "stem", d: `M${from} ${y}H${to}${points.map((point) => `M${point.x} ${y}V${point.y}`).join("")}` }));
  const centre = middle(branch, place.x);
  const width = branch.kind.length * 9 + 16;
  parts.push(
    s("g", { class: "branch" },
      s("rect", { x: centre - width / 2, y: y - 11, width, height: 22, rx: 11 }),
      s("text", { x: centre, y: y + 4.5, "text-anchor": "middle" }, branch.kind),
      s("title", {}, `${branch.kind}: connected by ${WORDS[branch.kind] ?? branch.kind}`)));
}

const leaves = (branch) => (branch.children.length ? branch.children.flatMap(leaves) : branch.gpus);
const depthOf = (branch) => 1 + Math.max(0, ...branch.children.map(depthOf));

function middle(branch, x) {
  const places = leaves(branch).map((gpu) => x.get(gpu));
  return (Math.min(...places) + Math.max(...places)) / 2;
}

/** The lines to draw. Where every GPU has the same link to every other, a sentence is clearer than 28 arcs. */
function nvlinks(links) {
  const found = pairs(links).filter(({ word }) => word.startsWith("NV"));
  return isFullMesh(links) ? [] : found;
}

function isFullMesh(links) {
  const all = pairs(links);
  return all.length > 1 && all.every(({ word }) => word.startsWith("NV") && word === all[0].word);
}

function pairs(links) {
  return links.flatMap((row, a) => row.flatMap((word, b) => (a < b && word ? [{ a, b, word }] : [])));
}

function linkText(links) {
  if (isFullMesh(links)) return `All GPUs are connected by NVLink (${pairs(links)[0].word}).`;
  const count = pairs(links).filter(({ word }) => word.startsWith("NV")).length;
  return count ? `${count} pairs of GPUs have NVLinks: the curves below the GPUs.` : "No two GPUs are connected by NVLink.";
}

function spoken(tree, links, name) {
  const of = (branch) => {
    const below = branch.children.length
      ? branch.children.map(of).join("; ")
      : branch.gpus.map(name).join(", ");
    return branch.children.length || branch.gpus.length > 1 ? `${branch.kind} (${below})` : below;
  };
  return `Topology: ${of(tree)}. ${linkText(links)}`;
}

function matrix(links, name) {
  const shown = links.map((_, index) => index).filter((index) => links[index][index]);
  return h("div", { class: "scrolling", tabindex: 0, role: "region", "aria-label": "Links between GPUs" },
    h("table", { class: "candidates" },
      h("caption", { class: "unseen" }, "Links between GPUs, as nvidia-smi names them"),
      h("thead", {}, h("tr", {}, h("td", {}), shown.map((index) => h("th", { scope: "col" }, name(index))))),
      h("tbody", {}, shown.map((one) => h("tr", {}, h("th", { scope: "row" }, name(one)), shown.map((other) => h("td", {}, one === other ? "·" : links[one][other])))))));
}
