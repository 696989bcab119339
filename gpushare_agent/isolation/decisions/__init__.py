"""Pure rules: an isolation's container edits (none, vcuda, mps, hami_core), device lists, the CDI spec, the driver volume's
plan, and the claim of a RegisterVDevice message. `request.py` is the interface of every isolation."""
