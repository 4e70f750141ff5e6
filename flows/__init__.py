"""What runs, in which order: a flow a file, read top to bottom; and the commands that need no flow:
new, runs, stop. No class, no torch.
"""
