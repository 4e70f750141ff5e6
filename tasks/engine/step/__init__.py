"""One optimizer step: forward, loss, backward, update, in micro-batches, compiled or replayed, and
its evaluation. It refuses a model that could not be trained or logged.

Front doors: best_weights, build, choose_step, cpu_threads, cuda_graph, evaluation, losses,
micro_batches, nan_origin, optim, optimizer_step, own_model, own_optim, phases, plan, verdict.
"""
