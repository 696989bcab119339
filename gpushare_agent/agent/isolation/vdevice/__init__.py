"""The vDevice directory of each container, mounted at /etc/vcuda: `virtual_manager` prepares, refreshes and removes them,
`reconcile` compares and writes, `server` answers RegisterVDevice (its other side: agent/commands/vdevice.py).
Format: docs/reference/vdevice.md."""
