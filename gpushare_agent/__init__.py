"""A node agent that lets pods share NVIDIA GPUs."""

__version__ = "2.0.0a1"
