"""The API server of the embedded nodes, on a real TCP port: pods, nodes, events, what makes pods and
the other resources of store.py, for their agents and for kubectl.

Owns the objects and their history (`ObjectStore`), the token (`ApiAccess`) and the faults that tests inject
(`ApiFaults`). Called in process by the embedded kubelets and schedulers, over HTTP by agents, extenders and kubectl. Open
server.py first.
"""
