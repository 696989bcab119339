"""The host side of isolation hami-core: `caches` prepares and removes each container's cache file, `limits` writes changed
limits into it and `locks` frees the locks of killed processes there; `files` is the layout, `region` the bounded reads and
writes.
"""
