"""What a run is asked to do: its sections, its file, its flags, and a sentence for whatever is
wrong there. It refuses unknown names and bad values all at once.
"""
