"""A user's own model: what two rows on the host show of it, and every way in which it is wrong."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headroom.base.facts import DataFacts
from headroom.device.detection import detect_best_device
from headroom.settings.model_args import ModelError
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.training import own_model
from headroom.training.check_training import check_plan
from headroom.training.plan import make_plan
from headroom.training.state_changes import StateChanges

Own = Callable[[str, str], None]
ROWS = DataFacts(
    folder="nowhere",
    source="csv",
    task="classification",
    train_rows=40,
    val_rows=10,
    input_shape=(6,),
    outputs=3,
    class_names=("a", "b", "c"),
    feature_names=None,
    offset=(0.0,),
    scale=(1.0,),
    bytes=1000,
    fingerprint="f" * 16,
    reused=False,
    class_rows=(20, 15, 5),
)
HEAD = "import torch\nfrom torch import nn\n"
NET = HEAD + (
    "class Net(nn.Module):\n"
    "    def __init__(self, input_shape, outputs):\n"
    "        super().__init__()\n"
    "        self.layer = nn.Linear(input_shape[0], outputs)\n"
    "    def forward(self, x):\n"
    "        return {forward}\n"
)
PLAIN = NET.format(forward="self.layer(x)")


def _check(data: DataFacts = ROWS, **sections: Any) -> own_model.ModelCheck:
    asked = {"model": {"name": "mine:Net"}, **sections}
    config = RunConfig.model_validate(asked)
    return own_model.check_model(config.model, config.train, data)


def _net(forward: str) -> str:
    return NET.format(forward=forward)


@pytest.mark.parametrize(
    "forward",
    [
        "self.layer(x)",
        "(self.layer(x), x)",
        "{'logits': self.layer(x)}",
        "(self.layer(x).sum(), self.layer(x))",
        "type('Out', (), {'logits': self.layer(x)})()",
    ],
)
def test_outputs_come_as_a_tensor_a_tuple_or_an_object(own: Own, forward: str) -> None:
    own("mine", _net(forward))
    assert _check().outputs == 3


def test_work_is_counted_for_the_layers_that_do_it(own: Own) -> None:
    own("mine", PLAIN)
    changes = StateChanges(own=True)
    assert _check() == own_model.ModelCheck(
        work=18,
        weights_bytes=84,
        outputs=3,
        changes=changes,
        judged=changes,
        task="classification",
    )


@pytest.mark.parametrize(
    ("source", "args", "words"),
    [
        ("class Net: ...\n", {}, r"mine:Net must give an nn.Module \(got Net\)"),
        (HEAD + "def Net(): return nn.Linear\n", {}, r"must give an nn.Module \(got the class"),
        (
            HEAD + "class Net(nn.Module):\n    def __init__(self): ...\n",
            {},
            r"does not call super\(\).__init__\(\)",
        ),
        (
            HEAD
            + "class Net(nn.Module):\n    def __init__(self):\n        self.a = nn.Linear(1, 1)\n",
            {},
            r"mine:Net raised: mine.py:5: AttributeError: .*Module.__init__\(\) call",
        ),
        (HEAD + "def Net():\n    raise KeyError('deep')\n", {}, "mine.py:4: KeyError: 'deep'"),
        (HEAD + "def Net():\n    exit(4)\n", {}, "mine.py:4: it exits with 4"),
        (PLAIN, {"hidden": 3}, "^model.args: 'hidden' is unknown; Net takes input_shape, outputs"),
        (PLAIN, {"outputs": 4}, r"must return \(2, 3\) for two rows \(got \(2, 4\)\)"),
        (
            HEAD + "class Net(nn.Module):\n    def forward(self, x): return x[:, :3]\n",
            {},
            "has no parameters, so there is nothing to train",
        ),
        (
            HEAD + "def Net(): return nn.Linear(6, 3).requires_grad_(False)\n",
            {},
            "all 2 parameters of mine:Net are frozen",
        ),
        (
            HEAD
            + "def Net():\n    m = nn.Linear(6, 3)\n    m.bias.data[1] = torch.nan\n    return m\n",
            {},
            "parameter bias of mine:Net is not finite at the start",
        ),
        (_net("None"), {}, r"must return a tensor, .* \(got None\)"),
        (_net("'text'"), {}, r"must return a tensor, .* \(got str\)"),
        (_net("self.layer(x)[0]"), {}, r"must return a row for each of two rows \(got shape \(3,"),
        (_net("self.layer(x).argmax(1)"), {}, "no parameter has a share in"),
        (_net("self.layer(x).detach()"), {}, "no parameter has a share in"),
        (_net("self.layer(x[:, :4])"), {}, "mine.py:8"),
        (_net("self.layer(x.long())"), {}, "mine.py:8"),
        (_net("self.layr(x)"), {}, "mine.py:8: AttributeError: 'Net' object has no"),
        (_net("self.layer(x, x)"), {}, "mine.py:8"),
        (
            HEAD
            + "class Net(nn.Linear):\n    def __init__(self): super().__init__(6, 3)\n"
            + "    def get_extra_state(self): return {'a': 1}\n"
            + "    def set_extra_state(self, state): ...\n",
            {},
            "keeps '_extra_state' in its state_dict, a dict",
        ),
    ],
)
def test_what_can_not_be_trained_is_refused_with_its_line(
    own: Own, source: str, args: dict[str, Any], words: str
) -> None:
    own("mine", source)
    with pytest.raises(ModelError, match=words) as got:
        _check(model={"name": "mine:Net", "args": args})
    assert all(
        line.startswith(("model.", "data.source: ")) for line in str(got.value).splitlines()
    ), got.value


def test_a_model_larger_than_the_host_is_refused(own: Own) -> None:
    own("mine", HEAD + "def Net(): return nn.Linear(2**24, 2**24)\n")
    with pytest.raises(ModelError, match=r"^model.name: mine:Net with \{\} needs more memory than"):
        _check()


def test_lazy_layers_find_their_sizes_by_two_rows(own: Own) -> None:
    own("mine", HEAD + "def Net(): return nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(3))\n")
    assert _check().outputs == 3
    config = RunConfig.model_validate({"model": {"name": "mine:Net"}})
    assert [p.shape for p in own_model.build_model_on_host(config.model, ROWS).parameters()][0] == (
        4,
        6,
    )


def test_a_vocabulary_may_be_rounded_up_and_classes_may_not(own: Own) -> None:
    own("mine", HEAD + "def Net(): return nn.Embedding(70, 64)\n")
    tokens = replace(ROWS, task="tokens", input_shape=(5,), outputs=60, class_rows=None)
    assert _check(tokens).outputs == 64
    with pytest.raises(ModelError, match=r"must return \(2, 5, 70\) for two rows \(got \(2, 5, 64"):
        _check(replace(tokens, outputs=70))


LOSSES = PLAIN + (
    "def good(outputs, targets): return (outputs.sum(1) - targets).square().mean()\n"
    "def rowwise(outputs, targets): return (outputs.sum(1) - targets).square()\n"
    "def number(outputs, targets): return 1.5\n"
    "def cut(outputs, targets): return outputs.detach().mean()\n"
    "def bad(outputs, targets): return outputs @ targets\n"
    "def text(outputs, targets): return 'good'\n"
    "def whole(outputs, targets): return outputs.argmax(1).sum()\n"
    "def one(outputs, targets): return outputs.mean().reshape(1)\n"
    "def yes(outputs, targets): return True\n"
    "def two(outputs, targets): return outputs.mean(1)\n"
    "def power(outputs, targets, to): return (outputs.sum(1) - targets).abs().pow(to).mean()\n"
    "def share(outputs, targets): return {'mine': 0.5}['mine']\n"
)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"loss": "mine:good", "metrics": {"mine": "mine:good", "half": "mine:number"}}, None),
        ({"loss": "mine:rowwise"}, r"^train.loss: .* one number .* tensor of shape \(2,\)\)"),
        ({"loss": "mine:number"}, r"^train.loss: mine:number must return .* \(got a float\)"),
        ({"loss": "mine:whole"}, r"^train.loss: .* one number .* \(got a int64 tensor of shape \("),
        ({"loss": "mine:one"}, r"^train.loss: .* one number .* float32 tensor of shape \(1,\)\)"),
        ({"loss": "mine:text"}, r"^train.loss: .* one number .* \(got a str\)"),
        ({"metrics": {"a": "mine:one", "b": "mine:whole", "c": "mine:share"}}, None),
        ({"metrics": {"m": "mine:yes"}}, r"^train.metrics.m: .* one number.* \(got a bool\)"),
        ({"metrics": {"m": "mine:two"}}, r"^train.metrics.m: .* one number.* of shape \(2,\)\)"),
        ({"loss": "mine:cut"}, "^train.loss: mine:cut returns a tensor without a gradient"),
        ({"loss": "mine:bad"}, "^train.loss: mine:bad, .* raised: mine.py:13: RuntimeError"),
        ({"loss": "mine:nothing"}, "^train.loss: mine has no nothing"),
        ({"loss": "mse"}, "^train.loss: mse does not fit classification; use auto or cross_ent"),
        ({"metrics": {"m": "mine:text"}}, "^train.metrics.m: mine:text must return one number"),
        ({"loss": "mine:power", "loss_args": {"to": 2}}, None),
        ({"loss": "mine:power"}, "^train.loss: mine:power, .* raised: .*missing 1 required"),
        (
            {"loss": "mine:good", "loss_args": {"class_weights": "balanced"}},
            "^train.loss_args.class_weights: mine:good takes no arguments; drop it",
        ),
        (
            {"loss": "mine:power", "loss_args": {"too": 2}},
            "^train.loss_args.too: mine:power takes none of this name, but to; drop it",
        ),
    ],
)
@pytest.mark.parametrize("model", ["mine:Net", "linear"])
def test_a_users_loss_and_metrics_are_tried_on_two_rows(
    own: Own, model: str, train: dict[str, Any], words: str | None
) -> None:
    own("mine", LOSSES)
    asked = {"model": {"name": model}, "train": train}
    if words is None:
        assert _check(**asked).outputs == 3
        return
    with pytest.raises(ConfigError, match=words):
        _check(**asked)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (replace(ROWS, task="regression", outputs=1), "balanced needs a classification"),
        (replace(ROWS, class_rows=None), "balanced needs the rows of each class"),
    ],
)
def test_balanced_classes_need_classes_that_were_counted(data: DataFacts, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^train.loss_args.class_weights: {words}"):
        _check(data, model={"name": "linear"}, train={"loss_args": {"class_weights": "balanced"}})


def test_a_plan_that_was_checked_keeps_what_was_learnt_and_builds_no_model_again(own: Own) -> None:
    own("mine", "built = []\n" + PLAIN.replace("self.layer = ", "built.append(1); self.layer = "))
    config = RunConfig.model_validate({"model": {"name": "mine:Net"}, "train": {"batch_size": 2}})
    checked = check_plan(make_plan(config, detect_best_device("cpu"), ROWS))
    assert checked.model_check is not None and checked.model_check.outputs == ROWS.outputs
    assert check_plan(checked) is checked
    assert len(sys.modules["mine"].built) == 1


def test_the_same_seed_draws_the_same_weights(own: Own) -> None:
    own("mine", PLAIN)
    config = RunConfig.model_validate({"model": {"name": "mine:Net"}})
    torch.manual_seed(1)
    first = own_model.build_model_on_host(config.model, ROWS).layer.weight
    torch.manual_seed(1)
    assert torch.equal(own_model.build_model_on_host(config.model, ROWS).layer.weight, first)


LISTED = HEAD + (
    "OUTSIDE = nn.Linear(6, 6)\n"
    "class Net(nn.Module):\n"
    "    def __init__(self, outputs):\n"
    "        super().__init__()\n"
    "        self.last = nn.Linear(6, outputs)\n"
    "        {made}\n"
    "    def forward(self, x):\n"
    "        return self.last({used})\n"
)


@pytest.mark.parametrize(
    ("made", "used", "words"),
    [
        ("self.deep = [nn.Linear(6, 6), nn.ReLU()]", "self.deep[1](self.deep[0](x))", "deep[0].bi"),
        ("self.by = {'a': (nn.Linear(6, 6),)}", "self.by['a'][0](x)", "by['a'][0].bias, "),
        ("self.w = torch.ones(6, requires_grad=True)", "x * self.w", "with w, which"),
        ("pass", "OUTSIDE(x)", r"a parameter of shape (6, 6), a parameter of shape (6,)"),
    ],
)
def test_layers_that_pytorch_does_not_know_are_refused_by_name(
    own: Own, made: str, used: str, words: str
) -> None:
    """They were neither trained nor saved: 0.875 in the training, 0.62 from the logged model."""
    own("mine", LISTED.format(made=made, used=used))
    with pytest.raises(ModelError, match="^model.name: mine:Net computes with ") as got:
        _check()
    assert words in str(got.value) and "in an nn.ModuleList" in str(got.value)


@pytest.mark.parametrize(
    ("made", "used"),
    [
        ("self.deep = [nn.Linear(6, 6)]", "x"),  # never used
        ("self.deep = [nn.Linear(6, 6)]; self.same = self.deep[0]", "self.deep[0](x)"),
        ("self.teacher = [nn.Linear(6, 6).requires_grad_(False)]", "x + self.teacher[0](x)"),
        (
            "pass",
            "torch.autograd.grad(x.requires_grad_().square().sum(), x, create_graph=True)[0] "
            "if self.training else 2 * x",
        ),
        ("pass", "x + torch.zeros(6, requires_grad=True)"),  # made on the way
        # As vector-quantize-pytorch has it: PyTorch knows it, and is told not to save it.
        (
            "self.register_buffer('zero', torch.zeros(6), persistent=False)",
            "x + self.zero.requires_grad_()",
        ),
        ("nn.utils.parametrizations.weight_norm(self.last)", "x"),
    ],
)
def test_what_is_registered_too_or_made_on_the_way_is_no_lost_layer(
    own: Own, made: str, used: str
) -> None:
    own("mine", LISTED.format(made=made, used=used))
    assert _check().outputs == 3


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            _net("self.layer(x).detach().requires_grad_()"),
            "gives outputs that no parameter has a share in",
        ),
        (
            _net("self.layer(x) if self.training else self.layer(x).T"),
            r"in eval mode mine:Net returns \(4, 3\) for 3 rows, and \(3, 4\) in training",
        ),
        (
            _net("self.layer(x) if self.training else self.layer(x) + None"),
            r"in eval mode mine:Net raised: mine.py:8: TypeError: unsupported operand",
        ),
        (
            PLAIN + "def make(input_shape, outputs):\n    with torch.device('meta'):\n"
            "        return Net(input_shape, outputs)\n",
            "layer.weight, layer.bias of mine:make lies on the meta device and holds no numbers",
        ),
        (
            PLAIN + "def make(input_shape, outputs):\n"
            "    return torch.jit.script(Net(input_shape, outputs))\n",
            "mine:make gives TorchScript, .* give the nn.Module that it was made of",
        ),
        (
            PLAIN + "def make(input_shape, outputs):\n"
            "    return torch.jit.trace(Net(input_shape, outputs), torch.ones(2, 6))\n",
            "mine:make gives TorchScript",
        ),
        (
            PLAIN.replace("return self", "raise Silent()\n        return self")
            + "class Silent(Exception):\n    def __str__(self):\n        raise OSError\n",
            r"forward of mine:Net, given two rows .*, raised: mine.py:8: Silent$",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_would_fail_in_training_or_at_its_end_is_told_before(
    own: Own, code: str, words: str
) -> None:
    own("mine", code)
    name = "mine:make" if "def make" in code else "mine:Net"
    with pytest.raises(ModelError, match=words):
        _check(replace(ROWS, outputs=4), model={"name": name})


def test_a_checkpoint_that_the_graph_does_not_show_still_trains(own: Own) -> None:
    code = _net("torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)")
    own("mine", code.replace("(self, x):", "(self, x):\n        x = x.clone().requires_grad_()"))
    assert _check().outputs == 3


def test_sparse_gradients_of_an_embedding_become_dense(own: Own) -> None:
    """No optimizer took them."""
    own(
        "mine",
        HEAD + "class Net(nn.Module):\n"
        "    def __init__(self, input_shape, outputs):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Embedding(9, outputs, sparse=True)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x[:, 0].long())\n",
    )
    config = RunConfig.model_validate({"model": {"name": "mine:Net"}})
    model = own_model.build_model_on_host(config.model, ROWS)
    model(torch.ones(2, 6)).sum().backward()
    assert model.layer.weight.grad.layout is torch.strided
    assert model.layer.weight.grad[1].tolist() == [2.0] * 3
