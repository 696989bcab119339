"""Dynamic Resource Allocation: gives pods GPUs through ResourceClaims.

The scheduler places a claim by the ResourceSlice that this folder publishes; the kubelet then calls the DRA driver here,
which charges the claim in the ledger, prepares the host and writes a CDI spec. A GPU belongs to the device plugins or to
claims.

State owned: `Claims` (prepared claims, their record on the disk, their part of the ledger), `SlicePublisher` (the slice).
Called by: agent. Open first: claims.py.

Others import: part.
"""
