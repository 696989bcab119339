"""Pure decisions about claims and slices: no asyncio, os, time or logging here."""
