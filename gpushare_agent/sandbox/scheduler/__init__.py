"""The embedded schedulers: one that counts resources and allocates claims, and one that asks a scheduler extender as
kube-scheduler does.

Own the pods that wait or are being bound. Run by node.py. Open scheduler.py first.
"""
