"""Which card or cards a container gets: share, fragment and link (docs/placement.md).

Plain functions over values: no clock, no randomness, no I/O. What is chosen depends neither on the order of the cards
given nor on anything that happened before.
"""

from gpushare_agent.placement.place import place
from gpushare_agent.placement.request import CardRequest, CardState, Placed, validate_request

__all__ = ["CardRequest", "CardState", "Placed", "place", "validate_request"]
