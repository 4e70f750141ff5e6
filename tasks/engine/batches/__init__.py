"""Prepared arrays or loaders become batches where the compute is. It refuses a batch that no loss
could take.

Front doors: batches, dataloaders, dataset_batches, prefetch.
"""
