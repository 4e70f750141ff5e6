"""CSV, TSV and Parquet: read in blocks, typed, encoded. It refuses what cannot be learnt from, by
row and column.

Front doors: columns, columns_table, csv_blocks, encoding, parquet, read_tables.
"""
