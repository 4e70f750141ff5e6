"""On a GPU, what is too large for its memory is done again in smaller micro-batches."""

import pytest
import torch

from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.read_settings import override_config
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.micro_batches import MemoryExhausted, MicroBatches
from headroom.training.plan import make_plan
from tests.watch.loop_watch import make_owners

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("memory_given_back")]
MIB = 2**20
GPU = torch.device("cuda:0")
PEAK = "memory/run_peak_allocated_mib"


class Unseeing:
    def start(self):
        pass

    def write(self):
        pass

    def read_allocator(self):
        return {}


def micro_batches(rows):
    accounts = make_owners(device=GPU)
    model = torch.nn.Linear(1, 1).to(GPU)
    return accounts, MicroBatches(
        rows,
        whole=rows,
        what="training",
        device=GPU,
        model=model,
        accounts=accounts,
        witness=Unseeing(),
    )


def test_what_is_refused_is_done_again_in_parts_that_fit(limit_mib):
    _, micro = micro_batches(16)
    sizes = []

    def attempt(batch, rows):
        sizes.append(rows)
        return torch.zeros(rows, 20 * MIB, dtype=torch.uint8, device=GPU)[0, 0].item()

    assert micro.fit(attempt, ()) == 0
    assert sizes == [16, 8, 4, 2]
    assert (micro.rows, micro.recovered, micro.fitted) == (2, 3, 2)
    assert limit_mib == 64


def test_what_never_fits_is_told_with_the_sizes_that_were_tried(limit_mib):
    accounts, micro = micro_batches(2)

    def attempt(batch, rows):
        held = torch.zeros(rows, 8 * MIB, dtype=torch.uint8, device=GPU)
        return held, torch.zeros(2 * limit_mib * MIB, dtype=torch.uint8, device=GPU)

    with pytest.raises(MemoryExhausted) as ended:
        micro.fit(attempt, ())
    failure = ended.value.failure
    assert (failure.tried, failure.fitted, failure.phase) == ((2, 1), None, "training")
    assert [held.bytes for held in accounts.ledger.list_at_failure()] == [8 * MIB]


def _trained(tmp_path, **more):
    config = RunConfig.model_validate(
        {
            "data": {
                "source": "synthetic",
                "cache": str(tmp_path / "data"),
                "args": {"rows": 10_000, "features": 64},
            },
            "device": {"name": "cuda"},
            "model": {"name": "mlp", "args": {"hidden": [1024, 1024]}},
            "train": {
                "epochs": 1,
                "batch_size": 8000,
                "log_every": 1,
                "compile": "off",
                "precision": "fp32",
            },
        }
    )
    config = override_config(config, more)
    facts = trainer.train(
        make_plan(config, detect_best_device("cuda"), prepare_dataset(config.data)),
        folder=tmp_path,
        log=lambda metrics, step: None,
    )
    torch.cuda.empty_cache()
    return facts


def test_a_training_under_a_limit_keeps_it_in_smaller_micro_batches(tmp_path):
    whole = _trained(tmp_path)
    quarters = _trained(tmp_path, **{"train.accumulate": 4})
    limit_mib = (whole.metrics[PEAK] + quarters.metrics[PEAK]) / 2
    limited = _trained(tmp_path, **{"memory.limit_mib": limit_mib})
    assert int(limited.tags["micro_batch"]) < 8000
    assert limited.metrics[PEAK] <= limit_mib
    assert limited.steps == whole.steps
    assert limited.metrics["val/loss"] == pytest.approx(whole.metrics["val/loss"], rel=0.1)
