"""The writers of everything that the agent puts on pods and nodes, and the pods of this node.

State: PodStore (the pods of this node), PodAnnotations (pods to compare with the ledger), NodeFieldsWriter (the node as last
read), RejectedPods (rejected pods to delete), RuntimeClasses (handlers that pods name).
Who patches what: pod_annotations.py the annotations of pods, node_fields.py labels, annotations, capacity and taint of the
node; core/kube/events.py writes Events. The extender patches the pods that it binds in extender/bind.py.
The agent builds and runs these; admission reads the pods and reports to the writers. Open pod_store.py first.

Others import: part, pod_annotations, pod_store, runtime_classes.
"""
