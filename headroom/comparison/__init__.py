"""Several runs side by side: those that are to be trained, a grid of them or what a search draws,
their processes, what their runs have measured, and what differs, in numbers, words and pictures;
and candidates that are judged against a base one after another.
"""
