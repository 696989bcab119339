"""The parts that several programs share: values, placement, the API server's client, settings, and what nodes report.
Imports no program.

Everything here is for everybody. Open first: model/names.py, then placement/gpu_account.py.
"""
