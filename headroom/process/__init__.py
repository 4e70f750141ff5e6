"""A process and its surroundings: how it starts and ends, its signals, its children, and secrets
that none of these may show. Of a run it knows what its folder says.
"""
