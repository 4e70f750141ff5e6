from typing import Any

import pytest

from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import RunConfig
from headroom.training.admission import PastRuns
from headroom.training.plan import make_plan


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> Any:
    cache = str(tmp_path_factory.mktemp("data"))
    return detect_best_device("cpu"), prepare_dataset(
        RunConfig.model_validate({"data": {"cache": cache}}).data
    )


def _alike(facts: Any, **sections: Any) -> str:
    return make_plan(RunConfig.model_validate(sections), *facts).comparable


@pytest.mark.parametrize(
    "sections",
    [{"train": {"epochs": 3, "seed": 5}}, {"optim": {"lr": 0.1}}, {"run": {"name": "other"}}],
)
def test_what_leaves_a_step_as_it_is_leaves_runs_alike(facts: Any, sections: Any) -> None:
    assert _alike(facts, **sections) == _alike(facts)


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"batch_size": 32}},
        {"train": {"accumulate": 2}},
        {"train": {"precision": "bf16"}},
        {"model": {"args": {"hidden": [8]}}},
        {"optim": {"name": "sgd"}},
        {"optim": {"clip_norm": 1.0}},
        {"memory": {"limit_mib": 100.0}},
    ],
)
def test_what_changes_a_step_sets_runs_apart(facts: Any, sections: Any) -> None:
    assert _alike(facts, **sections) != _alike(facts)


def test_what_compiling_gains_is_known_only_where_all_of_it_was_measured() -> None:
    measured = {"time/plain_step_ms": 2.0, "time/compiled_step_ms": 1.0, "time/compile_s": 9.0}
    known = PastRuns(measured).find_compile_timings()
    assert known is not None
    assert (known.plain_step_s, known.compiled_step_s, known.cost_s) == (0.002, 0.001, 9.0)
    assert PastRuns({**measured} | {"time/compile_s": 1.0}).find_compile_timings() is not None
    for name in measured:
        assert (
            PastRuns({k: v for k, v in measured.items() if k != name}).find_compile_timings()
            is None
        )
