// Which colour a container has: one that its neighbours on its cards have not, as rare on the node as can be; it keeps it
// as long as it lives.
// The colour is a help to the eye and never the only carrier: each share also has its number.

export const HUES = 8;
const NODE = "node";
const FAR = 10_000; // a neighbour on the same card weighs more than all others together

export class Hues {
  constructor() {
    this.given = new Map(); // key -> hue
  }

  /** Looks at all containers, in their order. */
  update(containers) {
    for (const key of this.given.keys()) if (!containers.has(key)) this.given.delete(key);
    const used = new Map([[NODE, new Array(HUES).fill(0)]]); // card, or the node -> count per hue
    for (const [key, hue] of this.given) this.#note(used, containers.get(key), hue);
    for (const [key, container] of containers) {
      if (this.given.has(key)) continue;
      const hue = this.#rarest(used, container);
      this.given.set(key, hue);
      this.#note(used, container, hue);
    }
  }

  of(key) {
    return this.given.get(key) ?? 0;
  }

  #note(used, container, hue) {
    used.get(NODE)[hue] += 1;
    for (const { uuid } of container.cards) {
      if (!used.has(uuid)) used.set(uuid, new Array(HUES).fill(0));
      used.get(uuid)[hue] += 1;
    }
  }

  #rarest(used, container) {
    const counts = used.get(NODE).map((count) => count / FAR);
    for (const { uuid } of container.cards) (used.get(uuid) ?? []).forEach((count, hue) => (counts[hue] += count));
    return counts.indexOf(Math.min(...counts));
  }
}
