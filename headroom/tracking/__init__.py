"""All that knows MLflow: the journal of a run, the process that sends it, stores and logged
models. Only that process imports mlflow, and one that compares runs; never one that trains.
"""
