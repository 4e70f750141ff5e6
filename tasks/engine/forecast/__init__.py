"""What a training will take, before anything is spent, and whether it is let in. It refuses a run
that would not fit.

Front doors: admission, forecast.
"""
