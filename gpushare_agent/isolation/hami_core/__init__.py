"""The host side of isolation hami-core: `part` prepares each container's cache file and writes changed limits
into it, `region_watch` frees the locks of killed processes there and writes the host PIDs that others did not
find; `edits` is what a container gets, `files` its cache file and the shared region in it, `region_format` the layout."""
