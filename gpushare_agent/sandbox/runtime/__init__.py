"""The embedded container runtime: processes in cgroups, CDI, and CRI for the agent.

Owns the containers, their processes and the cgroup tree (`ContainerRuntime`) and the CRI socket (`cri_socket`). Called by
the embedded kubelet. Open containers.py first.
"""
