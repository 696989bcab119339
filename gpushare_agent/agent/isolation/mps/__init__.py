"""Isolation mps: `edits` is what a container gets, `control` asks the control daemon; `supervision` runs it for
`gpushare-agent mps`."""
