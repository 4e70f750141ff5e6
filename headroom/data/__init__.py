"""Sources that are files of arrays, tables, images or tokens, and the cache of prepared arrays. It
refuses every file that is not what it claims, by row and column.

Front doors: array_sources, arrays, columns, image_folders, images, prepared_cache, readers,
source_data, table_store, tables, tokens.
"""
