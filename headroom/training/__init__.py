"""One optimizer step: forward, loss, backward, update, in micro-batches, compiled or replayed,
and its evaluation. It refuses a model that could not be trained or logged.

Front doors: averaging, build, choose_step, cuda_graph, evaluation, losses, micro_batches, optim,
optimizer_step, own_model, plan.
"""
