"""A process and its surroundings: signals, standard streams, forks, its home, its start anew, and
secrets that none of these may show. It knows nothing of a run.

Front doors: children, prefect_http, redaction, run_task, signals, startup.
"""
