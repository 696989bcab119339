"""`gpushare-agent check`: probes of the node, each a function from the settings to findings. Open check.py first."""
