"""MIG instances on demand: makes them for claims, keeps them to be used again, destroys what nobody needs.

State owned: `MigInstances` (which claim has which place, what this agent made, with its record on the disk).
Called by: agent, dra. Open first: instances.py.

Others import: instances, records.
"""
