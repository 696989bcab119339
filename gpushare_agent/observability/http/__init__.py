"""The web port (server.py: page, API, stream, metrics) and the debug listener (debug_server.py), on kit/http_server.py."""
