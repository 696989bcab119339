"""Isolation gpushare: libgpushare (native/gpushare), the project's own library in the container. `edits` is what a container
gets, `files` its files on the host, `format` what lies in them; `observed` writes what the driver shows of it."""
