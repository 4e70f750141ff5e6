"""What every room shares: units, facts, nested tensors, threads, clocks, random seeds, and code
found by its import path. It knows no setting and no device.

Front doors: facts, field_types, file_lock, host_memory, import_paths, nested, raw_inputs, scores,
secret_names, seeds, structured_inputs, timing, units.
"""
