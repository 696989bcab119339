"""The decisions of an admission as plain functions over values: no asyncio, os, time or logging. No state.

In the order of a call: identity (which container), ledger (what is free for it), decide (the `Decision` on
one container: plan has which GPU and IDs, container_edits the answer). claim_users finds the
pods of a claim, resize plans a live resize; recovery and garbage compare the allocation cache with the kubelet's records.
"""
