"""Built-in models, models of the user's own, and what travels with a logged model. It refuses
files of a model that are not as they were logged.
"""
