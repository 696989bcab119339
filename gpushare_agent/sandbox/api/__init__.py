"""The API server of the embedded nodes, on a real TCP port: pods, nodes, events, config maps, leases,
and the claims, classes and slices of resource.k8s.io.

Owns the objects and their history (`ObjectStore`), the token (`ApiAccess`) and the faults that tests inject (`ApiFaults`).
Called in process by the embedded kubelets and schedulers, over HTTP by agents and extenders. Open server.py first.
"""
