"""The frame of every command line: subcommands, argument handling, output, shell completion.

Owns no state beyond one process: `Invocation` is one call of a `Command`. Each program's commands are in its own folder;
gpushare_agent/commands.py and kubectl/view_commands.py list them. Open first: command_line.py.
"""
