"""What every room shares: units, facts, raw inputs, nested tensors, threads, locks, secrets,
scores, random seeds, names of the record, and code found by its import path. It knows no setting
and no device.

Front doors: facts, file_lock, import_paths, names, nested, python_state, raw_inputs, scores,
secret_names, secret_texts, seeds, threads, units.
"""
