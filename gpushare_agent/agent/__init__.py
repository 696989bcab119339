"""The node agent: four sides joined, started in order, and ended together.

Open composition.py first: `build` joins the sides (kubelet, GPUs, API server, observability; and the isolations in use), and
`_Subscriptions` lists who hears of what. agent.py has the order of start, the signals (SIGHUP starts a new life with new
settings) and the end. node.py names the states that several sides read. Called by `gpushare-agent run` alone.

Others import: agent, auto_isolation, values.
"""
