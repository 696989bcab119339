"""Isolation mps: `edits` is what a container gets, `control` asks the control daemon; `supervision` and `daemon` run it for
`gpushare-agent mps`."""
