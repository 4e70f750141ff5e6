"""Memory, measured and explained: what the allocator tells, whose the bytes are, operation by
operation, and the proof that all was given back. It calls an allocator by its public functions
where there are any, and leaves out what a device does not tell.

Front doors: allocation_log, allocator_stats, caching_allocator, leaks, memory_by_owner,
memory_meter, pinned_memory.
"""
