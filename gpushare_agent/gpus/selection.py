"""Which card a person means: an index, a UUID, or the beginning of one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpushare_agent.model.gpus import Card

PREFIX = "GPU-"


def cards_meant(text: str, cards: Sequence[Card]) -> list[Card]:
    """One card where it is clear, none where no card is meant, several where more of the UUID is needed.

    Digits alone are an index. A UUID may be without its `GPU-`, in any case of letters, and cut short.
    """
    wanted = text.strip().lower()
    if not wanted:
        return []
    if wanted.isdecimal():
        return [card for card in cards if str(card.index) == (wanted.lstrip("0") or "0")]
    exact = [card for card in cards if card.uuid.lower() == wanted]
    begins = [card for card in cards if card.uuid.lower().startswith((wanted, PREFIX.lower() + wanted))]
    return exact or sorted(begins, key=lambda card: card.index)
