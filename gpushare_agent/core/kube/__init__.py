"""The API server's client on raw JSON: configuration and library, session, lists and watches, single objects, parsing; an
informer over it, and Events.

State: KubeSession (the HTTP client), Informer (what is listed and watched), EventRecorder (Events that are queued). Open
client.py first.
"""
