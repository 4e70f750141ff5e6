"""Accounts for a loop of optimizer steps: where its time and its memory go, step by step, and how
fast it is. It never changes what is computed, and waits for the device at log points only.

Front doors: accounts, guard, logged_values, own_loop, phases, step_metrics, throughput.
"""
