"""A finished run, told from a plain dict: for a terminal, as Markdown, as a page, as pictures. It
invents nothing: what was not measured is not said.
"""
