// Whether a card is in service, and why not. An operator's cordon is no illness: a card may have either, or both.

export const isCordoned = (card) => card.cordoned !== null;

/** Something is wrong with the card itself; a cordoned card is offered to nobody and may be well. */
export const isIll = (card) => Boolean(card.health_reason) || (!card.is_healthy && !isCordoned(card));

/** `bad`, `warn` or `good`: the worst of it. */
export const kindOf = (card) => (isIll(card) ? "bad" : isCordoned(card) ? "warn" : "good");
