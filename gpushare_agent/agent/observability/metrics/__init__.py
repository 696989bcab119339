"""/metrics: agent.py counts events, node.py and containers.py (gpu-manager's too) make series of states, text.py writes."""
