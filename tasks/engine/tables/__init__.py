"""CSV, TSV and Parquet: read in blocks, typed, encoded. It refuses what cannot be learnt from, by
row and column.

Front doors: column_gathering, columns_table, encoding, read_tables, running_statistics.
"""
