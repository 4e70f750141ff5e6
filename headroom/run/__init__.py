"""The life of one run: its record, how it goes on, how it failed, whether it came out as well as
the last ones, what Prefect and a terminal show of it, and what is left of runs that died.
"""
