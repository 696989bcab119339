"""Simulated GPUs: `driver.SimulatedDriver` answers as NVML does, from settings and two files."""
