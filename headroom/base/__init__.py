"""What every room shares: units, facts, raw inputs, nested tensors, threads, locks, secrets,
scores, random seeds, names of the record, and code found by its import path. It knows no setting
and no device.
"""
