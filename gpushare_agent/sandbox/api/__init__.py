"""The API server of the embedded nodes, on a real TCP port. It serves pods, nodes, events, what makes pods and
the other kinds of kinds.py to the nodes' agents and to kubectl.

Owns the objects and their history (`ObjectStore`) and the token (`ApiAccess`). Called in process by the embedded kubelets
and schedulers, over HTTP by agents, extenders and kubectl. Open server.py first.
"""
