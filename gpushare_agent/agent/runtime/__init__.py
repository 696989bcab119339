"""The container runtime and the kernel: which containers run, where their cgroups are, and the owner of a process.

State: Cgroups (where each container's cgroup was last), RuntimeClient (one CRI connection and the endpoint chosen),
ProcessOwners (the owners of the last read). Nothing here changes the node.
Isolation, usage sampling, admission's garbage collection and `gpushare-agent check` call it. Open cgroups.py first; the
formats of /proc/<pid>/cgroup are in cgroup_paths.py.

Others import: cgroup_paths, cgroups, cri, machine, node_probes.
"""
