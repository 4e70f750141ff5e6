"""Find the loader of models that version 0.1 logged with code of their own: MLflow looks for it
here, and a process that has imported this project does not take the model's code.
"""

from tasks.engine.models.predictor import _load_pyfunc as _load_pyfunc
