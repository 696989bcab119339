"""What any asyncio service could use: supervision of tasks, gRPC servers, sockets, files, logs, back-off and rates.

State: LogWriter (the queue of log lines, one per process), DaemonThread (the blocking call under way), ReportOnce,
TokenBucket, and the servers' connections. Knows nothing of GPUs, pods or settings; everybody imports it. Open supervision.py
first, which has the rules for tasks.

Others import: backoff, bounded_grpc, daemon_thread, directories, grpc_codec, grpc_server, h2_frames, log_writer, logs,
peer_credentials, pid_namespaces, process, rate, report_once, sockets, supervision, tcp_listeners, watch_path, wire_build,
wire_scan.
"""
