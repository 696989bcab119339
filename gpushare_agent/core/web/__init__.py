"""The web page's files, and who may open pages for debugging: the same for a node and for the cluster's dashboard.

Open first: page.py.
"""
