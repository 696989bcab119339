// What is in use on each node, as its agent says it through the API server: of the nodes in sight every few seconds, of the
// others now and then, for the sums of namespaces. Only while the page is in sight, and of few nodes at once.

const SEEN_MS = 10000;
const OTHER_MS = 60000;
const FAILED_MS = 30000; // without the right to it every answer is an error
const AT_ONCE = 4; // a browser has six connections to a server: the rest of the page needs some of them, however slow agents are
const FAILED_AT_ONCE = 2; // of those that did not answer last time: they take long, and the others need their turn
const OTHERS = 10; // nodes out of sight each time, every five seconds: a large cluster's go round in minutes
const STALE_S = 30;
const GONE_S = 900; // older than this it says nothing any more
const MOST_GPUS = 256;
const MOST_CONTAINERS = 4096;
const MOST_TEXTS = 16;
const MOST_CHARACTERS = 300;

export class Uses {
  /** `ask` gives an agent's document of a node; `onUse` is called after each answer. */
  constructor(ask, onUse) {
    Object.assign(this, { ask, onUse });
    this.nodes = new Map(); // name -> {at, askedAt, problem, gpus, namespaces, mig}
    this.seen = new Set();
    this.running = this.failed = 0; // asked now, and how many of them did not answer last time
    this.queue = [];
  }

  isSeen(name) {
    return this.seen.has(name);
  }

  see(name, isSeen) {
    if (isSeen) this.seen.add(name);
    else this.seen.delete(name);
    if (isSeen) this.read([name]);
  }

  /** Forgets all but these nodes; `names` is a set. */
  keep(names) {
    for (const known of [this.seen, this.nodes]) for (const name of known.keys()) if (!names.has(name)) known.delete(name);
  }

  /** Null where it is not known; with its age in seconds. */
  of(name) {
    const use = this.nodes.get(name);
    const age = (Date.now() - use?.at) / 1000;
    return use?.gpus && age < GONE_S ? { ...use, age, isStale: age > STALE_S && (this.isSeen(name) || Boolean(use.problem)) } : null;
  }

  problem(name) {
    return this.nodes.get(name)?.problem ?? "";
  }

  /** Asks those of the nodes that are due. */
  read(names) {
    if (document.hidden) return;
    const due = names.filter((name) => this.#isDue(name) && !this.queue.includes(name));
    const others = due.filter((name) => !this.isSeen(name)).sort((one, two) => this.#askedAt(one) - this.#askedAt(two));
    this.queue.push(...due.filter((name) => this.isSeen(name)), ...others.slice(0, OTHERS));
    this.#start();
  }

  #start() {
    while (this.running < AT_ONCE) {
      const place = this.queue.findIndex((name) => !this.problem(name) || this.failed < FAILED_AT_ONCE);
      if (place < 0) return;
      this.#next(...this.queue.splice(place, 1));
    }
  }

  #askedAt(name) {
    return this.nodes.get(name)?.askedAt ?? -Infinity;
  }

  #isDue(name) {
    const use = this.nodes.get(name);
    const period = use?.problem ? FAILED_MS : this.isSeen(name) ? SEEN_MS : OTHER_MS;
    return !use?.isRunning && Date.now() - this.#askedAt(name) >= period;
  }

  async #next(name) {
    const hasFailed = Boolean(this.problem(name));
    const before = this.nodes.get(name) ?? {};
    const asked = { askedAt: Date.now(), isRunning: true };
    this.nodes.set(name, { ...before, ...asked });
    this.running += 1;
    this.failed += hasFailed;
    let found;
    try {
      found = usesOrProblem(await this.ask(name));
    } catch (error) {
      found = { problem: error.message.slice(0, MOST_CHARACTERS) };
    }
    this.running -= 1;
    this.failed -= hasFailed;
    // A node that has gone meanwhile is not kept.
    if (this.nodes.has(name)) this.nodes.set(name, { ...this.nodes.get(name), ...found, isRunning: false });
    this.onUse(name);
    if (document.hidden) this.queue = [];
    this.#start();
  }
}

function usesOrProblem(document) {
  try {
    return { ...usesIn(document), problem: "" };
  } catch {
    // The engine's own words, such as "null (reading 'slice')", help nobody.
    return { problem: "its agent's answer has another form than this page reads: use the agent's own version" };
  }
}

/** What the page shows of an agent's document; numbers that cannot be are left out or cut. */
function usesIn({ at, agent, gpus, containers, mig_gpus: onDemand }) {
  const behind = agent?.sampled_at ? (bounded(at - agent.sampled_at, GONE_S) ?? 0) : 0;
  const found = { at: Date.now() - 1000 * behind, gpus: new Map(), namespaces: new Map() };
  const sizes = new Map();
  for (const { uuid, memory, usage } of gpus.slice(0, MOST_GPUS)) {
    const capacity = bounded(memory?.capacity_bytes, Number.MAX_SAFE_INTEGER) ?? 0;
    sizes.set(uuid, capacity);
    found.gpus.set(uuid, { sm: bounded(usage?.sm_ratio, 1), memory: bounded(usage?.memory_used_bytes, capacity) });
  }
  for (const { namespace, gpus: shares } of containers.slice(0, MOST_CONTAINERS)) {
    const sums = found.namespaces.get(namespace) ?? { cores: null, memory: null };
    for (const { uuid, usage } of shares.slice(0, MOST_GPUS)) {
      const sm = bounded(usage?.sm_ratio, 1);
      sums.cores = plus(sums.cores, sm === null ? null : 100 * sm);
      sums.memory = plus(sums.memory, bounded(usage?.memory_bytes, sizes.get(uuid) ?? 0));
    }
    found.namespaces.set(String(namespace), sums);
  }
  found.mig = (onDemand ?? []).slice(0, MOST_GPUS).map((gpu) =>
    [`GPU ${gpu.index} (${gpu.name})`, gpu.cordoned && `cordoned: ${gpu.cordoned}`, gpu.health_reason, ...(gpu.texts ?? []).slice(0, MOST_TEXTS)]
      .filter(Boolean).map((text) => String(text).slice(0, MOST_CHARACTERS)).join(" · "));
  return found;
}

/** What is not known, as the compute under MPS, is no zero. */
export const plus = (sum, more) => (more === null ? sum : sum + more);

const bounded = (value, most) => (Number.isFinite(value) && value >= 0 ? Math.min(value, most) : null);
