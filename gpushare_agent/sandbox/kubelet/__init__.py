"""The embedded kubelet: device manager, PodResources, registration, the lifecycle of pods.

Owns the known pods (`EmbeddedKubelet`) and the allocated device IDs (`DeviceManager`, `DeviceRecords`). Who wants to know
its calls is a `CallObserver`. node.py opens it; what a Kubernetes version changes is in behaviour.py. Open kubelet.py first.
"""
