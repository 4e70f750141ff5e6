"""The command lines of the flows: flags, files, words, exit codes. It answers --help and bad
settings before anything slow is imported.
"""
