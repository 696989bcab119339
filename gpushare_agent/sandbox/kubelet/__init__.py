"""The embedded kubelet: device manager, PodResources, registration, the lifecycle of pods.

Owns the known pods (`EmbeddedKubelet`), the allocated device IDs (`DeviceManager`, `DeviceRecords`) and the log of calls
(`CallLog`). node.py opens it; what a Kubernetes version changes is in behaviour.py. Open kubelet.py first.
"""
