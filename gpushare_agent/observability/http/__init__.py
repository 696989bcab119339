"""The web port (server.py: page, API, metrics) and the debug listener (debug_server.py), on kit/http_server.py."""
