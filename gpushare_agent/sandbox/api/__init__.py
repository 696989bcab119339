"""The API server of the embedded nodes, on a real TCP port: pods, nodes, events, what makes pods and
the other kinds of kinds.py, for their agents and for kubectl.

Owns the objects and their history (`ObjectStore`) and the token (`ApiAccess`). Called in process by the embedded kubelets
and schedulers, over HTTP by agents, extenders and kubectl. Open server.py first.
"""
