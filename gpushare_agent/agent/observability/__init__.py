"""Shows the node to operators and programs: usage, metrics, web port, dashboard, debug pages, display socket.

State owned: the current round of usage (UsageSampling), its past (UsageHistory), what is kept of it and of each GPU's
changes over a restart (SavedPast), what containers had and used (Consumption), the snapshot that everything is made from
(SnapshotCache), counters (AgentMetrics), listeners (WebServer, DisplayServer). The agent's composition builds and subscribes
all of it.
Open first: node_snapshot.py (what is shown; core/node_report/documents.py is its format), then http/server.py (where).
/metrics has gpu-manager's four series from metrics/node.py (`_requested`, `_used_as_gpu_manager_shows_it`);
docs/reference/formats.md, section 8.

Others import: metrics.agent, part.
"""
