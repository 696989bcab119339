"""The host side of isolation hami-core: `caches` prepares and removes each container's cache file, `files` is the layout."""
