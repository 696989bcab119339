"""The commands of a node: check, cdi, driver-volume, driver-devices, vdevice, mps, cordon; what `run` takes from a former
DaemonSet.

State: `MpsSupervision` lives as long as its command. Called by gpushare_agent/commands.py. Open first: check.py.

Others import: former_daemonset.
"""
