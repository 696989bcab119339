"""Files by which programs meet that import nothing of each other: vDevice directories, and simulated GPUs.

The agent writes the first and reads the second; the sandbox and its containers do the opposite (docs/reference/formats.md).
Open first: vdevice.py.
"""
