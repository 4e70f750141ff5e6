"""What a training that ends half-way goes on from: its whole state, copied off the device between
two steps and written behind them. It refuses to read a file that is not, byte for byte, what was
written, and reads nothing that could be code.

Front doors: checkpoint_files, checkpoints, compatibility, kept_steps, training_state.
"""
