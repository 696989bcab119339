"""The commands for a person with a kubeconfig: top, inspect, explain, defragment, and the page of all nodes.

`gpushare-agent` has them too, about the node where it runs. They read agents' documents and the API server; what would let a
pod start, and which moves free GPUs, is in decisions/. render_top.py is pure: documents in, tables out. Called by
gpushare_agent/commands.py and kubectl itself. Open first: view_commands.py, its table.

Others import: agent_client, plugin, render_top, view_commands.
"""
