"""Names of the GPUs for CDI: `specs` ensures that every GPU has one, `files` reads and writes the spec directories."""
