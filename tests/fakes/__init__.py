"""One fake of each outside system. The API server's and the kubelet's are the sandbox's own."""
