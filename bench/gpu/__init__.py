"""What the isolations keep on a real GPU: `nox -s gpu`, on a machine with an NVIDIA GPU and nothing else.

pack.py gathers on a machine with a network what the run needs, run.py measures with it where there is none by the steps of
steps.py, tenants.py and driver.py, report.py writes what was measured. Only the standard
library until the packed wheels are installed, then pynvml too.
docs/how-to/measure-on-a-gpu.md.
"""
