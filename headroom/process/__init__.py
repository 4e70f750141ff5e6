"""A process and its surroundings: how it starts and ends, its signals, its children, Prefect's
server and tasks, and secrets that none of these may show. Of a run it knows what its folder says.
"""
