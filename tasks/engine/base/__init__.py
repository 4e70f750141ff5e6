"""What every room shares: units, facts, raw inputs, nested tensors, threads, locks, secrets,
scores, random seeds, and code found by its import path. It knows no setting and no device.

Front doors: facts, figures, file_lock, import_paths, nested, python_state, raw_inputs, scores,
secret_names, secret_texts, seeds, threads, units.
"""
