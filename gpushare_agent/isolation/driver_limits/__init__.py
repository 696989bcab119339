"""Isolation driver: keeps the driver's memory limits of the cgroups of containers with a share; open limits.py."""
