"""One Prefect task a file: facts in, facts out, no tensor. And the forecast of memory that a person
asks for before there is a run.
"""
