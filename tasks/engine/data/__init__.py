"""From a source to a prepared data set: labelled, split, encoded and scaled; and what a person
should doubt in it. It refuses what holds no rows to learn from or to validate on.

Front doors: own_data, preparation, run_warnings.
"""
