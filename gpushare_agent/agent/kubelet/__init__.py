"""Everything that is exchanged with the kubelet: device-plugin servers and their registration, PodResources, its checkpoint.

State owned: `PodResourcesGate` (open admission calls and Lists), `DeviceTable` (the devices that ListAndWatch sends),
`Registrar` and `ResourceRegistrar` (the kubelet with which a resource is registered), `PluginEndpoint` (a plugin's
socket), `KubeletFacts` (the kubelet's version), `StaticPods` (the last answer), `ServingLock` and `Handover` (which of two
agents serves). What a call is answered is decided in admission, the handler of `device_plugin`. Every PodResources List
passes `PodResourcesGate` in pod_resources.py, which decides when one may be sent. Open device_plugin.py first.

Others import: device_plugin, device_table, handover, pod_resources, records, registration, static_pods.
"""
