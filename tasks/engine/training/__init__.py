"""One training from facts to facts: the loop, what it reads off and what is left of it. It refuses
to log a model that predicts otherwise than it was trained to.

Front doors: agreed_micro_batches, budget, check_training, loop, oom_files, peak_flops,
rank_facts, similar_runs, step_metrics, trainer.
"""
