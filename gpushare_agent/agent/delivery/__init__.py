"""What containers get of a GPU: its devices by one way or another, their names for CDI, and the driver's files. It limits
nothing: that is isolation/.

`device_lists` has one function for each strategy. `cdi_specs` ensures that every GPU has a name for CDI, `cdi_files` reads
and writes the spec directories. The driver's libraries and programs are copied from the host for containers:
`host_libraries` finds them, `volume_plan` decides what goes where, `volume_directory` writes it (command driver-volume;
docs/how-to/driver-volume.md).

State owned: `CdiWatch` (the agent's own CDI spec), `DriverDirectory` (driver volumes on disk), `ControlNodes` (which nodes
were missing). Called by: admission, dra (edits), isolation (the driver under its libraries), commands. Open first:
device_lists.py, cdi_specs.py, volume_plan.py.

Others import: cdi_specs, device_lists, device_nodes, elf, host_libraries, volume_config, volume_directory,
volume_plan.
"""
