// Whether a GPU is in service, and why not. A cordon is no fault: a GPU may have either, or both.

export const isCordoned = (gpu) => Boolean(gpu.cordoned);

/** Something is wrong with the GPU itself. Agents of other versions report no reason to the cluster: there a cordoned GPU is cordoned alone. */
export const isUnhealthy = (gpu) => Boolean(gpu.health_reason) || (!gpu.is_healthy && !isCordoned(gpu));

/** What is out of service, in words; empty where nothing is. */
export const outOfService = (gpu) => [isUnhealthy(gpu) && "unhealthy", isCordoned(gpu) && "cordoned"].filter(Boolean).join(", ");

/** `bad`, `warn` or `good`: the worst of it. */
export const kindOf = (gpu) => (isUnhealthy(gpu) ? "bad" : isCordoned(gpu) ? "warn" : "good");
