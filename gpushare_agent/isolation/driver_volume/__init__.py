"""The driver's libraries and programs, copied from the host for containers: `libraries` finds them, isolation/decisions/
driver_volume.py plans the volume, `directory` writes it. Used by the command driver-volume; docs/how-to/driver-volume.md."""
