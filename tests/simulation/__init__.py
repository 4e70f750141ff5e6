"""A deterministic simulation of the record: see histories.py."""
