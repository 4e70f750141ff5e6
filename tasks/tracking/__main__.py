"""`python -m tasks.tracking FOLDER` sends what a run left there while MLflow was away."""

from __future__ import annotations

import sys
from pathlib import Path

from tasks.tracking.mlflow_sender import send_folder

if len(sys.argv) != 2:
    sys.exit("usage: python -m tasks.tracking FOLDER")
sys.exit(send_folder(Path(sys.argv[1])))
