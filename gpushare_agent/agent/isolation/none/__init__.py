"""Isolation none: `edits` says that a container gets nothing but its GPUs."""
