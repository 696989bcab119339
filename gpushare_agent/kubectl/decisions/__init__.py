"""Changes that would let a waiting pod start, and moves that free whole GPUs, from a view of the cluster. No clock, no
I/O."""
