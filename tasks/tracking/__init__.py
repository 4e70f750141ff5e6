"""All that knows MLflow: the journal of a run, the process that sends it, stores and logged models.
Only that process imports mlflow, and one that compares runs; never one that trains.

Front doors: journal, journal_lines, mlflow_pages, mlflow_store, model_store, past_runs,
query_runs, send_later, where.
"""
