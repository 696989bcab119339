"""What a node says of itself: the annotations of its Node, and the documents of its web port. The door between programs.

The agent writes them; extender, `kubectl gpushare` and sandbox read them (docs/reference/formats.md, docs/reference/api.md).
Open first: annotations.py.
"""
