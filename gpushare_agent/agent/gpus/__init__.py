"""The node's GPUs: what the driver reports, which of them are offered, and why the others are not.

State owned: `GpuInventoryState` (the GPUs and the health of each), `HealthStateWriter` (health.json of state_directory),
`ControlServer` (the socket of `cordon` and `uncordon`), `NvmlSession` and `NvmlEvents` (the opening of NVML, its event
set). Called by: agent (composition), which subscribes every listener to the inventory. Open first: inventory.py. Where an
Xid makes a GPU Unhealthy: core/model/gpu_health.py (`after_event`), called by `GpuInventoryState.note_events`, called
by `GpuWatch` in watch.py.

Others import: inventory, nvml.compute_mode, part, watch.
"""
