"""Prefect's servers on this machine: the one of a desk, the service of a night, the runs they lost.
It ends only what it started.

Front doors: crashed_flow_runs, local_prefect, prefect_http, processes, service_down, service_up.
"""
