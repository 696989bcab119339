"""Pure rules: which state an event or a poll puts a GPU in (health), and which GPU an operator names (cordon)."""
