// The node's document, read every few seconds while the page is in sight. The views are notified of what has changed.

import { read } from "./reading.js";

/** On the page of all nodes every answer goes through the API server, which serves others. */
export const isOfCluster = /\/nodes\/[^/]+\/$/.test(location.pathname);
export const PERIOD_MS = isOfCluster ? 5000 : 2000;
const KEPT_DECISIONS = 100;
const READ_DECISIONS = 50;

export const keyOf = (container) => `${container.pod_uid}/${container.container}`;

const areSame = (one, two) => JSON.stringify(one) === JSON.stringify(two);

/** The container without the numbers of its use. */
const exceptUse = (container) => ({
  ...container,
  gpus: container.gpus.map(({ usage, ...share }) => ({ ...share, pids: usage && usage.pids })),
});

export class Store {
  constructor(onChange, onLink) {
    this.onChange = onChange;
    this.onLink = onLink;
    this.node = null;
    this.gpus = new Map(); // uuid -> GPU
    this.containers = new Map(); // key -> container
    this.decisions = []; // newest first
    this.link = { state: "waiting", since: Date.now() };
    this.clockAhead = 0; // seconds that this machine's clock is ahead of the node's
    this.tag = ""; // ETag of `node`
  }

  start() {
    this.#poll();
  }

  /** The node's time now, seconds. */
  now() {
    return Date.now() / 1000 - this.clockAhead;
  }

  async #poll() {
    try {
      let problem = "";
      const answers = await this.#readAll().catch((error) => {
        problem = error.message;
      });
      if (!answers) {
        this.tag = ""; // the next answer is a whole document: of another agent, or with what was missed
        this.#linked("lost", problem);
        return;
      }
      const changed = this.#take(answers);
      this.#linked("live");
      if (changed) this.onChange(changed);
    } finally {
      setTimeout(() => this.#pollInSight(), PERIOD_MS);
    }
  }

  #pollInSight() {
    if (!document.hidden) this.#poll();
    else document.addEventListener("visibilitychange", () => this.#pollInSight(), { once: true });
  }

  /** `node` is null where it has not changed; `isAnother`: of an agent that has started since. */
  async #readAll() {
    const headers = this.tag ? { "If-None-Match": this.tag } : {};
    const answer = await read("api/v1/node", headers);
    const node = answer.status === 304 ? null : await answer.json();
    const isAnother = node !== null && node.agent.started_at !== this.node?.agent.started_at;
    const after = isAnother ? 0 : (this.decisions[0]?.number ?? 0);
    const { decisions } = await (await read(`api/v1/decisions?limit=${READ_DECISIONS}&after=${after}`)).json();
    return { node, tag: answer.headers.get("ETag") ?? "", isAnother, decisions };
  }

  #linked(state, problem = "") {
    if (this.link.state === state && this.link.problem === problem) return;
    this.link = { state, since: this.link.state === state ? this.link.since : Date.now(), problem };
    this.onLink(this.link);
  }

  /** What has changed, null for nothing. */
  #take({ node, tag, isAnother, decisions }) {
    const changed = noChange();
    this.tag = tag;
    this.decisions = [...decisions, ...(isAnother ? [] : this.decisions)].slice(0, KEPT_DECISIONS);
    if (!isAnother) changed.decisions = decisions;
    if (node) this.#takeNode(node, isAnother, changed);
    return node || decisions.length ? changed : null;
  }

  #takeNode(node, isAnother, changed) {
    const old = this.node;
    this.clockAhead = Date.now() / 1000 - node.at;
    this.node = node;
    const whole = ["schema", "node", "resources", "topology"];
    changed.everything = isAnother || this.link.state !== "live" || whole.some((name) => !areSame(old[name], node[name]));
    changed.sampled = old?.agent.sampled_at !== node.agent.sampled_at;
    this.#takeGpus(node.gpus, changed);
    this.#takeContainers(node.containers, changed);
  }

  #takeGpus(gpus, changed) {
    const before = this.gpus;
    this.gpus = new Map(gpus.map((gpu) => [gpu.uuid, gpu]));
    changed.everything ||= !areSame([...before.keys()], [...this.gpus.keys()]);
    for (const [uuid, gpu] of this.gpus) if (!areSame(before.get(uuid), gpu)) changed.gpus.add(uuid);
  }

  #takeContainers(containers, changed) {
    const before = this.containers;
    this.containers = new Map(containers.map((container) => [keyOf(container), container]));
    for (const key of new Set([...before.keys(), ...this.containers.keys()])) {
      const [was, is] = [before.get(key), this.containers.get(key)];
      if (areSame(was, is)) continue;
      const shares = [...(was?.gpus ?? []), ...(is?.gpus ?? [])];
      if (was && is && areSame(exceptUse(was), exceptUse(is))) {
        changed.used.add(key);
        for (const share of shares) changed.gpus.add(share.uuid);
      } else {
        changed.containers.add(key);
        for (const share of shares) changed.shares.add(share.uuid);
      }
    }
  }
}

const noChange = () => ({
  everything: false, // draw all of it again
  sampled: false,
  gpus: new Set(), // whose numbers or state changed
  shares: new Set(), // GPUs whose shares came, went or changed size
  containers: new Set(), // came, went or changed more than their use
  used: new Set(), // containers whose use changed
  decisions: [],
});
