"""Isolation vcuda: `edits` is what a container gets, its vDevice directory; `virtual_manager` prepares, refreshes and
removes them, `reconcile` compares and writes, `server` answers RegisterVDevice, `client` is the other side, inside a
container. Format: docs/reference/vdevice.md."""
