"""The account of a loop that a framework runs: a file for each framework, imported by its users
alone.

Front doors: accelerate, lightning, transformers, ultralytics.
"""
