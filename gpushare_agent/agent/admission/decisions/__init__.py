"""The decisions of an admission as plain functions over values: no asyncio, os, time or logging. No state.

In the order of a call: identity (which container), ledger (what is free for it), decide (the `Decision` on one container,
and the check of what the kubelet then allocates), container_edits (the answer). resize plans a live resize; recovery
compares the allocation cache with the kubelet's records.
"""
