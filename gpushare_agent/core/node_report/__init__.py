"""A node's report about itself: the annotations of its Node, and the documents of its web port. Programs meet here.

The agent writes them; extender, `kubectl gpushare` and sandbox read them (docs/reference/formats.md, docs/reference/api.md).
Open first: annotations.py.
"""
