"""The flow of one prediction: find the model, detect the device, predict, give the memory back.

`python -m flows.predict` runs it from a command line; Prefect deployments run it by the entrypoint
`flows/predict.py:predict`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from headroom.process.first_signals import answer_first_interrupt

    answer_first_interrupt()  # before the imports that take time
    from headroom.process.command import exit_process, start_command

    start_command()
    # It answers --help and bad words before prefect is imported.
    from flows.cli.predict_command import main

    exit_process(main(sys.argv[1:]))

import tempfile
from dataclasses import asdict
from typing import Any

from prefect import flow

from headroom.prediction.request import make_order
from headroom.prefect_flows.flow_run import mark_begun
from headroom.settings.run_config import DeviceConfig
from tasks.detect_device import detect_device
from tasks.find_model import find_model
from tasks.predict_rows import predict_rows
from tasks.release_memory import release_memory


@flow(name="predict")
def predict(
    input: str,
    output: str,
    run: str = "latest",
    keep: list[str] | None = None,
    device: str = "auto",
    overwrite: bool = False,
    experiment: str | None = None,
    limit_mib: float | None = None,
) -> dict[str, Any]:
    """Predict every row of a file with a model that was trained here, into another file.

    Args:
        input: The rows, of what the ending tells: a table, arrays, or in txt a text a line.
        output: The predictions, a row each, in order: csv, tsv, parquet, npy or jsonl.
        run: latest, a run's id, models:/NAME@ALIAS, models:/NAME/VERSION or models:/MODEL_ID.
        keep: Columns of the input that go to the output too.
        device: Where to predict: auto, gpu, cpu, cuda, cuda:1, ...
        overwrite: True if an output that exists may be replaced.
        experiment: Of whose runs latest is the newest that fits. Default: what mlflow.yaml says.
        limit_mib: The most memory to allocate on the device, in MiB.
    """
    mark_begun()
    order = make_order(
        input=input,
        output=output,
        run=run,
        keep=keep or (),
        device=device,
        overwrite=overwrite,
        experiment=experiment,
        limit_mib=limit_mib,
    )
    with tempfile.TemporaryDirectory(prefix="headroom-model-") as folder:
        model = find_model(order, folder=folder)
        chosen = detect_device(DeviceConfig(name=device), precision="fp32", limit_mib=limit_mib)
        held_bytes = 0
        try:
            facts = predict_rows(order, chosen, model)
            held_bytes = facts.held_bytes
        finally:
            released = release_memory(chosen, held_bytes)
    return {
        **asdict(facts),
        "run_id": model.run_id,
        "model_id": model.model_id,
        "device": chosen.name,
        "reason": chosen.reason,
        "released_bytes": released.released_bytes,
        "release_ok": released.ok,
    }
