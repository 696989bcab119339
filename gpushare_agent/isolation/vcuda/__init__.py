"""Isolation vcuda: `edits` is what a container gets, its vDevice directory; `virtual_manager` prepares, refreshes and
removes them, `reconcile` compares and writes, `server` answers RegisterVDevice (its other side: cli/vdevice.py).
Format: docs/reference/vdevice.md."""
