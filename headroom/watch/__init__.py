"""Memory, measured and explained: what the allocator tells and what the host has left, whose the
bytes are, operation by operation, when memory ran out, and the proof that all was given back. It
calls an allocator by its public functions where there are any, and leaves out what a device does
not tell.

Front doors: allocation_log, allocators, holders, host_memory, kernel_memory, leaks,
memory_by_owner, memory_meter, out_of_memory, pinned_memory, simulated_allocator, snapshot.
"""
