"""A run as Prefect's flow sees it: opened, published, tried again, and called from Python."""
