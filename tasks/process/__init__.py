"""A process and its surroundings: how it starts and ends, signals, children, and
secrets that none of these may show. It knows nothing of a run.

Front doors: children, command, prefect_http, redaction, run_task, signals.
"""
