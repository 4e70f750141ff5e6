"""Rows in, predictions out. It refuses what the model could not take by the head of a file."""
