"""A run as its files say it, of a training that played no flow."""

import json
from pathlib import Path
from typing import Any

from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import RunConfig
from headroom.training.plan import make_plan
from headroom.training.trainer import train
from tests.run_folders import append_lines, make_event, make_line


def record_training(
    folder: Path,
    device: str,
    *,
    end_step: Any = None,
    check_stop: Any = lambda: None,
    **sections: Any,
) -> Path:
    """Train on that device and leave settings, log and checkpoints in the folder; return it. A
    folder that is there is gone on with."""
    data_set = {"cache": str(folder.parent / "data")}
    config = RunConfig.model_validate({"device": {"name": device}, "data": data_set, **sections})
    data = prepare_dataset(config.data, batch_size=config.train.batch_size, seed=config.train.seed)
    resumes = folder.is_dir()
    folder.mkdir(exist_ok=True)
    append_lines(folder, make_event("begin", {}, unix_ms=1))
    (folder / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    train(
        make_plan(config, detect_best_device(device), data),
        folder=folder,
        log=lambda metrics, step: append_lines(folder, make_line(metrics, step, unix_ms=1)),
        end_step=end_step,
        check_stop=check_stop,
        resumes=resumes,
    )
    return folder
