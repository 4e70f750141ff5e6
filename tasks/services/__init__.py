"""Servers on this machine: Prefect's of a single run, the service of a night, that of a team. It
ends only what it started.

Front doors: local_prefect, processes, serve.
"""
