"""The choice of a container's GPUs: share, fragment and link (docs/explanation/placement.md); and why it gets none.

Pure functions over values: no clock, no randomness, no I/O, no state. The result depends neither on the order of the GPUs
nor on anything that happened before. Called by agent/admission/decisions/decide.py, extender/decisions/pod_plan.py and,
through the latter, simulation. Open `place.py` first for the choice, `gpu_account.py` for what counts as free and why a
request does not fit, `gpu_choice.py` for which GPUs a pod accepts, `topology.py` for the tree of links, `fragmentation.py`
for policy fgd, which the extender and simulation have, `first_fit.py` for kube-scheduler's choice for claims, which the
sandbox and simulation have.
"""

from gpushare_agent.core.placement.gpu_account import GpuAccount
from gpushare_agent.core.placement.place import Placed, place, validate_request

__all__ = ["GpuAccount", "Placed", "place", "validate_request"]
