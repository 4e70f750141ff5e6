"""The command lines of the flows: flags, files, words, exit codes. It answers --help and bad
settings before anything slow is imported.

Front doors: compare_command, from_python, predict_command, tidy_command, train_command.
"""
