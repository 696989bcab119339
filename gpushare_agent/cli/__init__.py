"""The command lines `gpushare-agent` and `kubectl gpushare`: subcommands, argument handling, output, shell completion.

Owns no state beyond one process: `Invocation` is one call of a `Command`; `MpsSupervision` and the sandbox's parts live as
long as their command. Called by __main__.py and the console scripts. Open main.py first: its table and that of
view_commands.py (top, inspect, explain, defragment, dashboard) have every command; command_line.py parses and runs
them. render_*.py are pure: documents in, tables out.

Others import: main.
"""
