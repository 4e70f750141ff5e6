"""Sources that are files of arrays, tables, images or tokens; how rows are split, labelled and
encoded; the cache of prepared arrays. It refuses every file that is not what it claims, by row
and column.

Front doors: arrays, columns, encoding, image_folders, images, prepared_cache, row_parts, scaling,
source_data, table_files, table_rows, tables, targets, tokens.
"""
