"""Tools for any asyncio service. They know nothing of GPUs, pods or settings; everybody imports them.

Tasks: supervision (rules for tasks in a TaskGroup; Reconciler, the loop of a level-triggered service; bounded and retried,
around what may be Unavailable; ReportOnce, a repeated condition is logged once), daemon_thread (blocking calls that may
hang), process (this process and the operating system).
Times: backoff (delays between tries), rate (a token bucket), fair_queue (a bounded queue for many tenants).
Logs: logs (the set-up, the thread that writes lines, the limit of what tenants cause).
JSON: json_schema (text from outside, read by msgspec Structs, exactly or leniently).
Files: state_file (one JSON file that outlives the process), directories (by descriptors, no links
followed), regular_file (whole files, never a pipe), watch_path (changes of one
directory), sockets (unix sockets in the file system).
Servers: grpc_server (corrected grpclib; a socket file of its own), bounded_grpc (the same for hostile peers), http_server
(bounded aiohttp), http_answers (what its answers share), tcp_listeners, peer_credentials (who connects).
gRPC messages: grpc_client (calls over a unix socket), grpc_codec (strict decoding), http2_costs (costs of h2 that
are left out), protobuf (the large messages by hand).

State: LogWriter (the queue of log lines, one per process), DaemonThread (the blocking call under way), ReportOnce,
TokenBucket, FairQueue, TenantLines (who logged how much), UnixChannel and the servers (their connections). Open
supervision.py first.
"""
