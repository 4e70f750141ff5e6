"""Servers on this machine: Prefect's of a desk, the service of a night, that of a team, the runs
they lost. It ends only what it started.

Front doors: crashed_flow_runs, keeper, local_prefect, prefect_http, processes, service_down,
service_up, team_hosts, team_stores.
"""
