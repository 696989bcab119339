"""The decisions of an admission as plain functions over values: no asyncio, os, time or logging. No state.

In the order of a call: identity (which container), ledger and reuse (what is free for it), hints, plan (which GPU and IDs),
container_edits (the answer), explain (why). recovery and garbage compare the allocation
cache with the kubelet's records; offered_devices decides what ListAndWatch withholds.
"""
