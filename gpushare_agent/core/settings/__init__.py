"""The settings: one frozen tree from flags, variables, a YAML file and defaults, with the place of each value.

Owns no state: `load_settings` makes a `LoadedSettings` (the tree `Settings` and its sources) and keeps nothing. Called by
cli/; the composition hands each part its section. Open tree.py first: it joins the sections of sections.py, nvidia.py and
node_configuration.py. sources.py has the sources, which pydantic-settings merges, nvidia_plugin.py the configuration of
NVIDIA's plugin; settings.py orders them and words mistakes, reference.py makes `--help` and docs/reference/settings.md.
"""
