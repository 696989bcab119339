// Which colour a container has: chosen by a hash of its key, so that it is the same after a reload and in every browser; on a
// GPU each has another colour as long as there are enough, and then the rarest one.
// The colour is a help to the eye and never the only carrier: each share also has its number.

export const HUES = 8;

export class Hues {
  constructor() {
    this.given = new Map(); // key -> hue
  }

  /** Assigns a colour to each container; returns the keys of containers with a new colour. The result depends only on the
   * set of containers: the first key keeps its own colour, one that would equal it goes on to the next. */
  update(containers) {
    const [before, used] = [this.given, new Map()]; // GPU -> count per hue
    this.given = new Map();
    for (const key of [...containers.keys()].sort()) {
      const counts = containers.get(key).gpus.map(({ uuid }) => countsOf(used, uuid));
      const hue = rarest(counts, hash(key) % HUES);
      for (const one of counts) one[hue] += 1;
      this.given.set(key, hue);
    }
    return [...this.given.keys()].filter((key) => before.get(key) !== this.given.get(key));
  }

  of(key) {
    return this.given.get(key) ?? 0;
  }
}

function countsOf(used, uuid) {
  if (!used.has(uuid)) used.set(uuid, new Array(HUES).fill(0));
  return used.get(uuid);
}

/** Of the colours that are rarest on these GPUs the first one from `wanted` on. */
function rarest(counts, wanted) {
  const sums = Array.from({ length: HUES }, (_, hue) => counts.reduce((sum, one) => sum + one[hue], 0));
  const least = Math.min(...sums);
  let hue = wanted;
  while (sums[hue] > least) hue = (hue + 1) % HUES;
  return hue;
}

/** FNV-1a, its bits mixed once more: UIDs that differ in one place get unlike colours. */
function hash(text) {
  let value = 0x811c9dc5;
  for (let place = 0; place < text.length; place += 1) value = Math.imul(value ^ text.charCodeAt(place), 0x01000193);
  value = Math.imul(value ^ (value >>> 15), 0x2c1b3c6d);
  return (value ^ (value >>> 12)) >>> 0;
}
