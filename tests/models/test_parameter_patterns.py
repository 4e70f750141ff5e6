"""Which parameters a pattern means, and what is refused to be frozen."""

from collections import OrderedDict

import pytest
from torch import nn

from headroom.models.parameter_patterns import freeze_parameters


def _parts() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            encoder=nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)),
            act=nn.Tanh(),
            head=nn.Linear(5, 2),
        )
    )


def test_a_module_is_frozen_whole_and_a_parameter_by_its_name() -> None:
    model = _parts()
    freeze_parameters(model, ["encoder.0", "head.b*"])
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["encoder.1.weight", "encoder.1.bias", "head.weight"]


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (["encode.*"], r"model\.freeze: 'encode\.\*' matches no parameter .*encoder"),
        (["*"], r"model\.freeze: \* is all of the model; leave some of it to be trained"),
        (["encoder", "head"], r"model\.freeze: encoder, head is all of the model"),
    ],
)
def test_patterns_that_freeze_nothing_or_all_are_refused(patterns, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        freeze_parameters(_parts(), patterns)
