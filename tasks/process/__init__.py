"""A process and its surroundings: signals, standard streams, forks, its home, its start anew, and
secrets that none of these may show. It knows nothing of a run.

Front doors: children, forks, home, prefect_http, redaction, restart, run_task, signals.
"""
