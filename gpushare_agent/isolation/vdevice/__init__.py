"""The vDevice directory of each container, mounted at /etc/vcuda: `virtual_manager` prepares, refreshes and removes them,
`reconcile` compares and writes, `server` answers RegisterVDevice (its other side: cli/vdevice.py).
Format: docs/reference/vdevice.md."""
