"""Real GPUs through NVML: `driver.NvmlDriver` is the asyncio side; the other modules block, in its threads."""
