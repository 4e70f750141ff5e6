"""Servers on this machine: Prefect's of a single run, and the service of a night. It ends only what
it started.
"""
