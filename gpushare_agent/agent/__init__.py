"""The node agent: its parts joined, started in order, and ended together.

Open composition.py first: `build` makes the Node (node.py) and joins the parts, which their own folders build, and
`_Subscriptions` lists who hears of what. program.py has the order of start, the signals (SIGHUP reloads the
settings) and the end. Called by `gpushare-agent run` alone.

Others import: commands.former_daemonset, gpus.part, isolation.part, program.
"""
