// Numbers and moments as texts. Everything comes in base units (bytes, ratios 0..1, seconds, hertz, watts).

/** Orders texts as people do: pod-2 before pod-10. Made once: a comparison with options makes one each time. */
export const compareTexts = new Intl.Collator("en", { numeric: true }).compare;

const UNKNOWN = "–";
const GIB = 1024 ** 3;
const MIB = 1024 ** 2;

/** At most three digits: 80, 22.4, 0.35. */
function short(value) {
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return String(Number(value.toFixed(digits)));
}

export function bytes(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value >= GIB || value === 0) return `${short(value / GIB)} GiB`;
  return `${short(value / MIB)} MiB`;
}

/** `2.25 of 4 GiB`: both in the unit of the whole, unless that would hide a small part. */
export function bytesOf(part, whole) {
  if (part === null || part === undefined) return bytes(whole);
  if (whole < GIB || (part && part < GIB / 10)) return `${bytes(part)} of ${bytes(whole)}`;
  return `${short(part / GIB)} of ${short(whole / GIB)} GiB`;
}

export function percent(ratio) {
  return ratio === null || ratio === undefined ? UNKNOWN : `${Math.round(ratio * 100)} %`;
}

/** `2.7/5 GPU cores`: hundredths of one GPU, or of several together. */
export function coresOf(used, limit) {
  if (used === null) return cores(limit);
  return `${used < 9.95 ? Number(used.toFixed(1)) : Math.round(used)}/${short(limit)} GPU cores`;
}

export function cores(count) {
  return count === 1 ? "1 GPU core" : `${short(count)} GPU cores`;
}

export const celsius = (value) => (value === null || value === undefined ? UNKNOWN : `${Math.round(value)} °C`);

export function watts(value, limit) {
  if (value === null || value === undefined) return UNKNOWN;
  return limit ? `${Math.round(value)} / ${Math.round(limit)} W` : `${Math.round(value)} W`;
}

export function hertz(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return value >= 1e9 ? `${short(value / 1e9)} GHz` : `${Math.round(value / 1e6)} MHz`;
}

/** `PCIe in 18.7, out 9.34 GB/s`, decimal, as vendors count it. */
export function traffic(name, received = null, sent = null) {
  if (received === null || sent === null) return UNKNOWN;
  const [unit, unitName] = Math.max(received, sent) >= 1e9 ? [1e9, "GB/s"] : [1e6, "MB/s"];
  return `${name} in ${short(received / unit)}, out ${short(sent / unit)} ${unitName}`;
}

export function duration(seconds) {
  const rounded = Math.max(0, Math.round(seconds));
  if (rounded < 60) return `${rounded} s`;
  if (rounded < 3600) return `${Math.floor(rounded / 60)} min`;
  if (rounded < 86400) return `${Math.floor(rounded / 3600)} h`;
  return `${Math.floor(rounded / 86400)} d`;
}

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
export const moment = (seconds) => new Date(seconds * 1000).toLocaleString([], { hour12: false });

export function count(number, one, many) {
  return `${number} ${number === 1 ? one : many}`;
}

/** `power_cap` as words. */
export const words = (name) => name.replaceAll("_", " ");

/** What a container or pod requests. */
export function request({ cores, memory_bytes: memory }) {
  return [cores && count(cores, "GPU core", "GPU cores"), memory && bytes(memory)].filter(Boolean).join(", ") || "nothing";
}

/** How many cores of a GPU are allocated. A MIG instance that takes no shares has none, and is given whole. */
export const coresAllocated = (gpu) => (isGivenWhole(gpu) ? "given whole" : `${gpu.cores.allocated}/${gpu.cores.capacity} allocated`);

export const isGivenWhole = (gpu) => Boolean(gpu.mig) && !gpu.cores.capacity;

/** The index, of a MIG instance NVIDIA's name of it: 0:1. */
export const gpuLabel = (gpu) => gpu.mig?.label ?? String(gpu.index);

/** How many GPUs these are: one that MIG divides counts once, whatever instances it has. */
export const gpuCount = (gpus, divided = []) => new Set([...gpus.map((gpu) => gpuLabel(gpu).split(":")[0]), ...divided.map((gpu) => String(gpu.index))]).size;

export const gpuNames = (labels) => labels.map((label) => `GPU ${label}`).join(", ");
