"""One training from a plan to facts: the step in micro-batches, compiled or replayed, the loop
around it, its evaluation, its checkpoints, and the forecast of its memory. It refuses a model that
could not be trained or logged, and to go on from a file that is not, byte for byte, what was
written.
"""
