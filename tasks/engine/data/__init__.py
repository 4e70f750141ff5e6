"""From a source to a prepared data set, and what a person should doubt in it: the way to files,
tables and batches. It refuses what holds no rows to learn from or to validate on.

Front doors: own_data, preparation, run_warnings.
"""
