"""What would let a waiting pod start, and which moves free whole GPUs: over a view of the cluster. No clock, no I/O."""
