"""libgpushare (native/gpushare): the project's own library in the container. So far the files that agent and library share:
format.py."""
