"""One training from facts to facts: the loop, what it reads off and what is left of it. It
refuses to log a model that predicts otherwise than it was trained to.

Front doors: admission, check_training, forecast, loop, loop_forecast, oom_report, shared_model,
trainer.
"""
