"""The API server: its client, one informer, and the writers of everything that is put on pods and nodes.

State: PodStore (the pods of this node), Informer (what is listed and watched), PodAnnotations (pods to compare
with the ledger), NodeFieldsWriter (the node as last read), EventRecorder (Events that are queued), RejectedPods (rejected
pods to delete), KubeSession (the HTTP client).
Who patches what: pod_annotations.py the annotations of pods, node_fields.py labels, annotations, capacity and taint of the
node; events.py writes Events. The extender patches the pods that it binds in extender/bind.py.
The agent and the extender build and run these; admission reads the pods and reports to the writers. Open informer.py first.

Others import: events, informer, kube.budgets, kube.claims, kube.client, kube.configuration, kube.objects, kube.pods,
kube.scheduling, kube.session, node_annotations, part, pod_annotations, pod_store.
"""
