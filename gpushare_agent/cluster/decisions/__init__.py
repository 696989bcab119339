"""What goes on the node's object, and what a node's annotations mean: pure functions, raw objects in, values out."""
