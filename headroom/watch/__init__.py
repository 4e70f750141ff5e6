"""What a loop of optimizer steps takes: time phase by phase, memory owner by owner, how fast it is;
out of memory and a failed step in words; and the proof that all was given back. It never changes
what is computed, waits for the device at log points only, and leaves out what a device does not
tell.
"""
