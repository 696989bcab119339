"""Isolation gpushare: libgpushare (native/gpushare), the project's own library in the container. `edits` is what a container
gets, `files` its files on the host, `format` their contents; `observed` writes what the driver shows of it."""
