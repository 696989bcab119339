// Which colour a pod has: by a hash of its UID, so that it is the same on every GPU and page, in every browser. Where another
// pod on one of its GPUs has that colour, the later UID takes the next one that is free there.
// The colour is a help to the eye and never the only carrier: each share also has its number or name.

const HUES = 24;
const STEP = 7; // far apart on the wheel, and each hue is reached

/** By UID; `gpus` are the UIDs of the pods on each GPU of a node. */
export function huesOf(gpus) {
  const taken = new Map(); // UID -> the colours that each of its GPUs has already
  for (const uids of gpus) {
    const onGpu = new Set();
    for (const uid of new Set(uids)) taken.set(uid, [...(taken.get(uid) ?? []), onGpu]);
  }
  const hues = new Map();
  for (const uid of [...taken.keys()].sort()) {
    const onGpus = taken.get(uid);
    let hue = hash(uid) % HUES;
    for (let tried = 1; onGpus.some((onGpu) => onGpu.has(hue)) && tried < HUES; tried += 1) hue = (hue + STEP) % HUES;
    onGpus.forEach((onGpu) => onGpu.add(hue));
    hues.set(uid, hue);
  }
  return hues;
}

/** FNV-1a, its bits mixed once more: UIDs that differ in one place get unlike colours. */
function hash(text) {
  let value = 0x811c9dc5;
  for (let place = 0; place < text.length; place += 1) value = Math.imul(value ^ text.charCodeAt(place), 0x01000193);
  value = Math.imul(value ^ (value >>> 15), 0x2c1b3c6d);
  return (value ^ (value >>> 12)) >>> 0;
}
