"""The API server's client on raw JSON: configuration and library, session, lists and watches, single objects, parsing."""
