"""Built-in models, models of the user's own, and what travels with a logged model. It refuses
files of a model that are not as they were logged.

Front doors: builtin, checksums, model_folder, parameter_patterns, predictor, user_model.
"""
