// Which colour a pod has: chosen by a hash of its UID alone, so that it is the same on every GPU and page, in every browser,
// and whichever pods come and go. Two pods on one GPU may therefore have the same colour.
// The colour is a help to the eye and never the only carrier: each share also has its number or name.

export const HUES = 24;

/** Of a pod's UID. */
export const hueOf = (uid) => hash(uid) % HUES;

/** Of a container's key, UID/CONTAINER. */
export const hues = { of: (key) => hueOf(key.split("/", 1)[0]) };

/** FNV-1a, its bits mixed once more: UIDs that differ in one place get unlike colours. */
function hash(text) {
  let value = 0x811c9dc5;
  for (let place = 0; place < text.length; place += 1) value = Math.imul(value ^ text.charCodeAt(place), 0x01000193);
  value = Math.imul(value ^ (value >>> 15), 0x2c1b3c6d);
  return (value ^ (value >>> 12)) >>> 0;
}
