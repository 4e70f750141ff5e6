from functools import partial

import pytest
import torch

from headroom.models import builtin

_check = partial(builtin.check_model, task="classification")


@pytest.mark.parametrize(
    ("name", "shape"), [("linear", (7,)), ("mlp", (7,)), ("mlp", (1, 8, 8)), ("cnn", (3, 9, 8))]
)
def test_a_model_maps_rows_to_outputs(name: str, shape: tuple[int, ...]) -> None:
    model = builtin.build_model(name, input_shape=shape, outputs=5, args={})
    assert model(torch.zeros(3, *shape)).shape == (3, 5)
    work, weights_bytes = _check(name, input_shape=shape, outputs=5, args={})
    assert work > 0 and weights_bytes == 4 * sum(p.numel() for p in model.parameters())


def test_mlp_takes_its_widths_and_dropout() -> None:
    model = builtin.build_model(
        "mlp", input_shape=(4,), outputs=2, args={"hidden": [9, 3], "dropout": 0.5}
    )
    widths = [m.out_features for m in model if isinstance(m, torch.nn.Linear)]
    assert widths == [9, 3, 2]
    assert sum(isinstance(m, torch.nn.Dropout) for m in model) == 2


def test_a_model_larger_than_the_host_is_refused() -> None:
    with pytest.raises(
        builtin.ModelError, match="model.args: mlp .* needs more memory than this host"
    ):
        _check("mlp", input_shape=(2**20,), outputs=2, args={"hidden": [2**20]})


def test_checking_a_model_counts_its_multiply_adds_and_its_bytes() -> None:
    work, weights_bytes = _check("mlp", input_shape=(1, 8, 8), outputs=10, args={"hidden": [32]})
    assert work == 64 * 32 + 32 * 10
    assert weights_bytes == 4 * (64 * 32 + 32 + 32 * 10 + 10)
    work, _ = _check("cnn", input_shape=(3, 8, 8), outputs=10, args={"width": 4})
    stage_1, stage_2 = 64 * 9 * (3 * 4 + 4 * 4), 16 * 9 * 4 * 8
    assert work == stage_1 + stage_2 + 8 * 2 * 2 * 10


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "mlp",
            {"hiden": [3]},
            r"model.args: 'hiden' is unknown; the model mlp takes hidden, dropout",
        ),
        ("linear", {"hidden": [3]}, "the model linear takes no arguments"),
        ("mlp", {"hiden": [3]}, r"; did you mean hidden\?$"),
        ("mlp", {"hidden": [0]}, r"hidden must be a list of whole numbers .* \(got \[0\]\)"),
        ("mlp", {"hidden": "12"}, r"model.args: hidden must be a list of .* such as \[256\] "),
        ("mlp", {"hidden": [True]}, r"model.args: hidden must be a list of whole numbers"),
        ("mlp", {"hidden": 3}, r"such as \[3\] \(got 3\)"),
        ("mlp", {"dropout": 1.0}, r"model.args: dropout must be from 0 to below 1 \(got 1.0\)"),
        ("mlp", {"dropout": True}, r"model.args: dropout must be from 0 to below 1"),
        ("cnn", {"width": 2.5}, r"model.args: width must be a whole number from 1 to 1,048,576 "),
        ("cnn", {}, r"model.name: cnn needs images .* \(got \(7,\)\)"),
    ],
)
def test_a_model_that_cannot_be_is_refused(name: str, args: dict, message: str) -> None:
    with pytest.raises(builtin.ModelError, match=message):
        _check(name, input_shape=(7,), outputs=2, args=args)


def test_standardize_undoes_nothing_and_scales_each_feature() -> None:
    scale = builtin.Standardize((1.0, 2.0), (2.0, 4.0))
    assert scale(torch.tensor([[3.0, 10.0]])).tolist() == [[1.0, 2.0]]
