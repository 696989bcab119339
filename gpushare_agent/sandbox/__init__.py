"""The embedded node of `gpushare-agent sandbox` and of the tests: our own kubelet, API server, container runtime and
scheduler on real sockets. The agent is the real one, a child process.

Owns everything below the state directory and the child processes; each folder names its classes: api, kubelet, runtime,
scheduler. Called by command.py, run.py and tests. Open node.py first, then behaviour.py for what a Kubernetes
version changes, controller.py for what people do with a running sandbox, and pod_controllers.py for what
makes pods.

Others import: nothing.
"""
