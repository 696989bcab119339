"""Isolation vcuda, TKEStack's control library in the container: `edits` is what a container gets, `part` what runs on the
node, `check` its probes. Its files and its socket are those of isolation/vdevice."""
