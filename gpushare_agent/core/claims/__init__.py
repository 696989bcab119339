"""ResourceClaims of this driver as the API has them: what a claim asks and has, the devices of a slice. Pure.

The agent prepares them (agent/dra), the extender makes them of limits, the sandbox's scheduler allocates them. Open first:
claim.py.
"""
