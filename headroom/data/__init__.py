"""From a source (files of tables, arrays, images or tokens, or code of a user's own) to a prepared
data set, and from that to batches where the compute is. It refuses every file that is not what it
claims, by row and column, and what holds no rows to learn from or to validate on.
"""
