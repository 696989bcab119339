"""Values and names that several capabilities share: pods, containers, GPUs, allocations, resources, errors. Pure.

No state. Imported by every folder; open names.py (what existing programs expect) and errors.py (errors by the caller's next
move) first.
"""
