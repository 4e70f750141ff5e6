"""The families of models of Hugging Face transformers that docs/models.md names train unchanged: to
the weights and the loss that a loop by hand comes to, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from mlflow.models import Model

from flows.train import train
from headroom.models import predictor
from headroom.settings.run_config import RunConfig
from headroom.tracking.tracking_settings import read_tracking_settings
from tasks.forecast_memory import forecast_memory
from tests.flows import families

pytestmark = [
    pytest.mark.usefixtures("prefect_api", "place"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
EPOCHS, ROWS, RATE = 2, 8, 0.01


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_family_of_transformers_trains_as_by_hand(
    family: str, own: Callable[[str, str], None]
) -> None:
    """T5, Whisper, Segformer and whatever has labels of another shape than its inputs was refused,
    with a remedy that did not help; CLIP and DETR for having no labels, or no tensor of them."""
    own("families", Path(families.__file__).read_text())
    weights, val_loss = train_by_hand(family)
    run = train(RunConfig.model_validate(make_sections(family)))
    assert run["metrics"]["val/loss"] == pytest.approx(val_loss, rel=1e-6), "summed by rows"
    assert families.FAMILIES[family].figure in run["metrics"]
    folder = find_model_folder(run) / "data"
    found = torch.load(folder / "weights.pt", weights_only=True)
    assert found.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(found[name], weights[name])] == []
    loaded = predictor.load(folder)
    needs = {one.name for one in Model.load(str(folder.parent)).signature.inputs}
    assert needs and not {"labels", "start_positions", "end_positions", "future_values"} & needs
    with np.load(folder / "example.npz") as example:
        assert len(loaded.predict({name: example[name] for name in needs})) == 2


def test_a_model_that_cannot_run_on_shapes_is_told_without_an_error_of_pytorch(
    own: Callable[[str, str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """The forecast of Mixtral wrote a traceback of PyTorch's on the terminal of a run that was
    right."""
    own("families", Path(families.__file__).read_text())
    config = RunConfig.model_validate(make_sections("mixtral") | {"optim": {"name": "adamw"}})
    with pytest.raises(ValueError, match="it needs more than the shapes of its inputs"):
        forecast_memory(config)
    assert "grouped_mm" not in "".join(capfd.readouterr())


def train_by_hand(family: str) -> tuple[dict[str, torch.Tensor], float]:
    torch.manual_seed(0)
    model = families.build(family)
    loaders = families.load(family, ROWS)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    loss = torch.zeros(())
    for _ in range(EPOCHS):
        model.train()
        for batch in loaders[0]:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        model.eval()
        for batch in loaders[1]:
            with torch.inference_mode():
                loss = model(**batch).loss
    return model.state_dict(), float(loss)


def make_sections(family: str) -> dict[str, Any]:
    return {
        "model": {"name": "families:build", "args": {"family": family}},
        "data": {"source": "families:load", "args": {"family": family}},
        "train": {"epochs": EPOCHS, "batch_size": ROWS, "keep": "last", "deterministic": True},
        "optim": {"name": "Adam", "lr": RATE, "weight_decay": 0.0, "schedule": "constant"},
        "device": {"name": "cpu"},
    }


def find_model_folder(run: dict[str, Any]) -> Path:
    client = MlflowClient(read_tracking_settings().tracking_uri)
    (output,) = client.get_run(run["run_id"]).outputs.model_outputs
    location = client.get_logged_model(output.model_id).artifact_location
    return Path(location.removeprefix("file://"))
