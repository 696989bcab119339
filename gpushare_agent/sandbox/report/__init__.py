"""The report on the embedded nodes: one JSON document.

Owns the last reading of each vDevice directory (`VDeviceReader`). Called by controller.py and the command line.
Open document.py first.
"""
