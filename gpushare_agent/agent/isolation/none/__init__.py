"""Isolation none: `edits` says that a container gets nothing besides its GPUs."""
