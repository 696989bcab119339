"""Which GPU or GPUs a container gets: share, fragment and link (docs/placement.md).

Plain functions over values: no clock, no randomness, no I/O. What is chosen depends neither on the order of the GPUs
given nor on anything that happened before.
"""

from gpushare_agent.placement.place import place
from gpushare_agent.placement.request import GpuRequest, GpuState, Placed, validate_request

__all__ = ["GpuRequest", "GpuState", "Placed", "place", "validate_request"]
