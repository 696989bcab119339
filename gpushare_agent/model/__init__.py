"""Values and names shared by every layer. No I/O, no clock, no asyncio."""
