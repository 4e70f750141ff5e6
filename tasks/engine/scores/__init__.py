"""How good answers are: the figures of an evaluation, and those of each class. It
leaves out what some rows do not define.

Front doors: by_class, figures, kept_rows.
"""
