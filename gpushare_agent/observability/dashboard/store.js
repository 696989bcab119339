// The node as the stream sends it: one document, patched in place. The views are notified of changes, once per frame.

const REOPEN_MS = 3000;
const SILENT_MS = 45000; // nothing at all for so long: the connection is dead, whatever the browser believes
const KEPT_DECISIONS = 100;

export const keyOf = (container) => `${container.pod_uid}/${container.container}`;

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
    this.#forget();
  }

  start() {
    this.#open();
    setInterval(() => {
      if (this.source && Date.now() - this.receivedAt > SILENT_MS) this.#reopen();
    }, 5000);
  }

  /** The node's time now, seconds. */
  now() {
    return Date.now() / 1000 - this.clockAhead;
  }

  #open() {
    this.receivedAt = Date.now();
    this.source = new EventSource("api/v1/stream");
    this.source.addEventListener("node", (event) => this.#receive(event, (value) => this.#take(value)));
    this.source.addEventListener("patch", (event) => this.#receive(event, (value) => this.#patch(value)));
    this.source.addEventListener("error", () => {
      this.#linked("lost");
      if (this.source.readyState === EventSource.CLOSED) this.#reopen(); // refused: the browser itself would give up
    });
  }

  #reopen() {
    this.source.close();
    this.source = null;
    this.#linked("lost");
    setTimeout(() => this.#open(), REOPEN_MS);
  }

  #receive(event, take) {
    this.receivedAt = Date.now();
    take(JSON.parse(event.data));
    this.#linked("live");
    this.#schedule();
  }

  #linked(state) {
    if (this.link.state === state) return;
    this.link = { state, since: Date.now() };
    this.onLink(this.link);
  }

  #take(node) {
    this.clockAhead = Date.now() / 1000 - node.at;
    this.node = node;
    this.gpus = new Map(node.cards.map((gpu) => [gpu.uuid, gpu]));
    this.containers = new Map(node.containers.map((container) => [keyOf(container), container]));
    this.decisions = node.decisions;
    this.changed.everything = true;
  }

  #patch(patch) {
    const node = this.node;
    if (!node) return;
    node.at = patch.at;
    for (const name of ["schema", "node", "resources", "topology"]) {
      if (name in patch) {
        node[name] = patch[name];
        this.changed.everything = true;
      }
    }
    Object.assign(node.agent, patch.agent ?? {});
    for (const [uuid, fields] of Object.entries(patch.cards ?? {})) this.#patchGpu(uuid, fields);
    for (const [key, container] of Object.entries(patch.containers ?? {})) this.#putContainer(key, container);
    for (const [uuid, values] of Object.entries(patch.card_use ?? {})) this.#patchGpuUse(uuid, values);
    for (const [key, uses] of Object.entries(patch.container_use ?? {})) this.#patchContainerUse(key, uses);
    for (const name of patch.gone ?? []) this.#remove(name);
    if (patch.decisions) {
      this.decisions = [...patch.decisions, ...this.decisions].slice(0, KEPT_DECISIONS);
      this.changed.decisions = patch.decisions;
    }
    this.changed.sampled ||= "sampled_at" in (patch.agent ?? {}) || "card_use" in patch;
  }

  #patchGpu(uuid, fields) {
    if (!this.gpus.has(uuid)) this.changed.everything = true;
    this.gpus.set(uuid, { ...this.gpus.get(uuid), ...fields });
    this.changed.gpus.add(uuid);
  }

  #patchGpuUse(uuid, values) {
    const gpu = this.gpus.get(uuid);
    if (!gpu?.usage) return;
    this.node.use_fields.card.forEach((name, place) => (gpu.usage[name] = values[place] ?? null));
    this.changed.gpus.add(uuid);
  }

  #putContainer(key, container) {
    for (const share of [...(this.containers.get(key)?.cards ?? []), ...container.cards]) this.changed.shares.add(share.uuid);
    this.containers.set(key, container);
    this.changed.containers.add(key);
  }

  #patchContainerUse(key, uses) {
    const container = this.containers.get(key);
    if (!container) return;
    for (const [index, ...values] of uses) {
      const share = container.cards.find((one) => one.index === index);
      if (!share?.usage) continue;
      this.node.use_fields.container.forEach((name, place) => (share.usage[name] = values[place] ?? null));
      this.changed.gpus.add(share.uuid);
    }
    this.changed.used.add(key);
  }

  #remove(name) {
    for (const share of this.containers.get(name)?.cards ?? []) this.changed.shares.add(share.uuid);
    if (this.gpus.delete(name)) this.changed.everything = true;
    if (this.containers.delete(name)) this.changed.containers.add(name);
  }

  #forget() {
    this.changed = {
      everything: false, // draw all of it again
      sampled: false,
      gpus: new Set(), // whose numbers or state changed
      shares: new Set(), // GPUs whose shares came, went or changed size
      containers: new Set(), // came, went or changed more than their use
      used: new Set(), // containers whose use changed
      decisions: [],
    };
  }

  #schedule() {
    if (this.isScheduled) return;
    this.isScheduled = true;
    // A hidden tab draws no frames; the timer keeps its numbers true without a pile of work at its return.
    const draw = () => {
      if (!this.isScheduled) return;
      this.isScheduled = false;
      const changed = this.changed;
      this.#forget();
      this.onChange(changed);
    };
    requestAnimationFrame(draw);
    if (document.hidden) setTimeout(draw, 1000);
  }
}
