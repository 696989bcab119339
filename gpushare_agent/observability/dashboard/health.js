// Whether a GPU is in service, and why not. A cordon is no fault: a GPU may have either, or both.

export const isCordoned = (gpu) => gpu.cordoned !== null;

/** Something is wrong with the GPU itself; a cordoned GPU is not offered and may be healthy. */
export const isIll = (gpu) => Boolean(gpu.health_reason) || (!gpu.is_healthy && !isCordoned(gpu));

/** `bad`, `warn` or `good`: the worst of it. */
export const kindOf = (gpu) => (isIll(gpu) ? "bad" : isCordoned(gpu) ? "warn" : "good");
