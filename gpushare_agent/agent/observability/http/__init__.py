"""The web port (server.py: page, API, metrics, /debug), on kit/http_server.py."""
