"""What runs, in which order: a flow a file, read top to bottom. No class, no torch."""
