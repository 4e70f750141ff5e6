"""Models of transformers and a user's own data train unchanged, and predict where neither this
project nor the user's folder is."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient

from flows.train import train
from headroom.prefect.prefect_http import call_api
from headroom.settings.model_args import ModelError
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.tracking.tracking_settings import read_tracking_settings

pytestmark = [
    pytest.mark.usefixtures("prefect_api", "place"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
Own = Callable[[str, str], None]
THEIRS = """
import numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from layers import head

def gpt2(input_shape, outputs):
    from transformers import GPT2Config, GPT2LMHeadModel
    sizes = dict(n_positions=input_shape[0], n_embd=16, n_layer=1, n_head=2)
    ends = dict(bos_token_id=None, eos_token_id=None)
    return GPT2LMHeadModel(GPT2Config(vocab_size=outputs, **sizes, **ends))

def bert(outputs):
    from transformers import BertConfig, BertForSequenceClassification
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    return BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=outputs, **sizes))

def vit(input_shape, outputs):
    from transformers import ViTConfig, ViTForImageClassification
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    image = dict(num_channels=input_shape[0], image_size=input_shape[1], patch_size=4)
    return ViTForImageClassification(ViTConfig(num_labels=outputs, **sizes, **image))

class Sentences(Dataset):
    classes = ["low", "high"]
    def __len__(self): return 96
    def __getitem__(self, i):
        ids = torch.randint(4, 40, (6,), generator=torch.Generator().manual_seed(i))
        ids[0] = 2 + i % 2
        mask = torch.ones(6, dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(i % 2)}

def sentences(batch_size):
    def loader(): return DataLoader(Sentences(), batch_size, num_workers=1, shuffle=True)
    return loader(), loader()

class Net(nn.Module):
    def __init__(self, input_shape, outputs, hidden=8):
        super().__init__()
        self.body, self.head = nn.Linear(*input_shape, hidden), head(hidden, outputs)
    def forward(self, x): return self.head(self.body(x).relu())

def amounts(rows=120):
    x = np.random.default_rng(0).standard_normal((rows, 3))
    return x, np.stack([x.sum(1), x[:, 0]], 1)

def huber(outputs, targets): return nn.functional.huber_loss(outputs, targets)
def worst(outputs, targets): return (outputs - targets).abs().max(1).values.mean()
"""
LOADS = """
import json, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
import mlflow.pyfunc
told = {}
for name, folder in json.loads(sys.argv[1]).items():
    model = mlflow.pyfunc.load_model(folder)
    example = model.input_example
    got = model.predict(example)
    told[name] = {"rows": len(got), "columns": list(got.columns), "first": str(got.iloc[0, 0])}
print(json.dumps(told))
"""


@pytest.fixture
def theirs(own: Own) -> Own:
    own("theirs", THEIRS)
    own("layers", "from torch import nn\ndef head(a, b): return nn.Linear(a, b)\n")
    return own


def _train(**sections: Any) -> dict[str, Any]:
    return train(RunConfig.model_validate(sections))


def _folder(run: dict[str, Any]) -> str:
    client = MlflowClient(read_tracking_settings().tracking_uri)
    (output,) = client.get_run(run["run_id"]).outputs.model_outputs
    location = client.get_logged_model(output.model_id).artifact_location
    return location.removeprefix("file://")


def test_models_of_transformers_train_and_predict_anywhere(theirs: Own, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 40)
    runs = {
        "gpt2": _train(
            model={"name": "theirs:gpt2"},
            data={"source": "text", "path": str(text), "args": {"context": 16}},
            train={"epochs": 3, "batch_size": 16},
            optim={"lr": 0.01},
        ),
        "bert": _train(
            model={"name": "theirs:bert"},
            data={"source": "theirs:sentences"},
            train={"epochs": 12, "batch_size": 16},
            optim={"lr": 0.02},
        ),
        "vit": _train(model={"name": "theirs:vit"}, train={"epochs": 2, "batch_size": 128}),
    }
    assert runs["gpt2"]["metrics"]["val/perplexity"] < 30, "256 without learning"
    assert runs["bert"]["metrics"]["val/accuracy"] > 0.9
    assert runs["bert"]["tags"]["data.residency"] == "loader"
    assert "data.fingerprint" not in runs["bert"]["tags"]
    assert runs["vit"]["metrics"]["val/loss"] < 2.4
    client = MlflowClient(read_tracking_settings().tracking_uri)
    assert client.get_run(runs["bert"]["run_id"]).data.params["model.name"] == "theirs:bert"

    folders = {name: _folder(run) for name, run in runs.items()}
    for folder in folders.values():
        assert "transformers==" in Path(folder, "requirements.txt").read_text()
    away = tmp_path / "away"
    away.mkdir()
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    kept["TESTS_WARM_KIND"] = "models"
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADS, json.dumps(folders)],
        cwd=away,
        env=kept,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert {name: one["columns"] for name, one in told.items()} == {
        name: ["prediction", "probability"] for name in runs
    }
    assert told["bert"]["first"] in ("low", "high") and told["vit"]["first"] in "0123456789"


def test_own_arrays_loss_and_metric(theirs: Own) -> None:
    run = _train(
        model={"name": "theirs:Net", "args": {"hidden": 16}},
        data={"source": "theirs:amounts", "args": {"rows": 200}},
        train={
            "epochs": 15,
            "batch_size": 20,
            "loss": "theirs:huber",
            "metrics": {"worst": "theirs:worst"},
        },
        optim={"lr": 0.02},
    )
    assert run["metrics"]["val/r2"] > 0.9 and 0 < run["metrics"]["val/worst"] < 1
    assert run["params"]["train.loss"] == "theirs:huber" and run["tags"]["data.fingerprint"]
    code = Path(_folder(run), "data", "code")
    assert sorted(file.name for file in code.iterdir()) == ["layers.py", "theirs.py"]
    rows = np.load(Path(_folder(run), "data", "example.npy"))
    assert rows.shape == (2, 3)


@pytest.mark.parametrize(
    ("sections", "error", "words"),
    [
        ({"model": {"name": "nowhere:Net"}}, ConfigError, "^model.name: there is no module now"),
        ({"model": {"name": "theirs:Nett"}}, ModelError, "did you mean Net"),
        (
            {"model": {"name": "theirs:Net", "args": {"hiden": 3}}},
            ModelError,
            "^model.args: 'hiden' is unknown; did you mean hidden",
        ),
    ],
)
def test_a_wrong_path_leaves_no_run(
    theirs: Own, sections: dict[str, Any], error: type[ValueError], words: str
) -> None:
    with pytest.raises(error, match=words):
        _train(data={"source": "theirs:amounts"}, **sections)
    client = MlflowClient(read_tracking_settings().tracking_uri)
    assert not client.search_runs([e.experiment_id for e in client.search_experiments()])


ENDING = """
import sys
calls = []
def exits(outputs, targets):
    calls.append(1)
    if len(calls) > 9: sys.exit(0)
    return worth(outputs, targets)
def says(outputs, targets):
    calls.append(1)
    if len(calls) > 9: raise ValueError(chr(0xd800) + " is half a letter")
    return worth(outputs, targets)
def worth(outputs, targets): return nn.functional.huber_loss(outputs, targets)
"""


@pytest.mark.parametrize(
    ("loss", "words"),
    [("exits", "it exits with 0"), ("says", r"\ud800 is half a letter")],
)
def test_whatever_a_users_code_ends_with_is_a_failed_run_with_its_words(
    own: Own, loss: str, words: str
) -> None:
    """`sys.exit(0)` was exit code 0 with nothing trained; half a letter left no report."""
    own("layers", "from torch import nn\ndef head(a, b): return nn.Linear(a, b)\n")
    own("mine", THEIRS + ENDING)
    with pytest.raises((RuntimeError, ValueError)) as raised:
        _train(
            data={"source": "mine:amounts"},
            model={"name": "linear"},
            train={"loss": f"mine:{loss}", "batch_size": 10},
        )
    assert words in str(raised.value)
    client = MlflowClient(read_tracking_settings().tracking_uri)
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.info.status == "FAILED" and words in run.data.tags["end.reason"]
    assert words in run.data.tags["mlflow.note.content"]
    assert "report.html" in {file.path for file in client.list_artifacts(run.info.run_id)}
    state = read_flow_run(run.data.tags["prefect.flow_run_id"])
    assert state["type"] == "FAILED" and words in state["message"]


def read_flow_run(flow_run: str) -> Any:
    from prefect.settings import PREFECT_API_URL

    return call_api("GET", f"{PREFECT_API_URL.value()}/flow_runs/{flow_run}")["state"]


def test_a_deployment_that_forbids_imports_refuses_a_flow_too(
    theirs: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADROOM_ALLOW_IMPORTS", "0")
    with pytest.raises(ConfigError, match="^model.name: import paths are forbidden here by HEAD"):
        _train(model={"name": "theirs:Net"})
