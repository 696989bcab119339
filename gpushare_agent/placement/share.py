"""A share of one card: the fullest card that still fits (binpack), or the emptiest (spread)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gpushare_agent.placement.request import CardRequest, CardState

SharePolicy = Literal["binpack", "spread"]


def has_room(card: CardState, request: CardRequest) -> bool:
    return card.healthy and card.free_cores >= request.cores and card.free_blocks >= request.blocks


def choose_share(fitting: Sequence[CardState], share_policy: SharePolicy) -> CardState:
    """The card of a non-empty list that the policy prefers: by free cores, then by free memory, then by index."""
    sign = 1 if share_policy == "binpack" else -1
    return min(fitting, key=lambda card: (sign * card.free_cores, sign * card.free_blocks, card.index))
