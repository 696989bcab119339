"""Isolation driver: `edits` is what a container gets, `limits` keeps the driver's memory limits of the cgroups of containers
with a share."""
