"""The driver's libraries and programs, copied from the host for containers: `libraries` finds them, `plan` decides what goes
where, `directory` writes it. Used by the command driver-volume; docs/how-to/driver-volume.md."""
