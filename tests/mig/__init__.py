"""Tests of MIG instances on demand."""
