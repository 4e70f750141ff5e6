"""Where MLflow looks for the loader of models that version 0.1 logged with code of their own, which
a process that has this project's already does not take.
"""

from tasks.engine.models.predictor import _load_pyfunc as _load_pyfunc
