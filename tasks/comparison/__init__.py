"""Several runs side by side: the grid of those that are to be trained, their processes, what their
runs have measured, and what differs, in numbers, words and pictures.

Front doors: cells, grid, measured, page, pictures.
"""
