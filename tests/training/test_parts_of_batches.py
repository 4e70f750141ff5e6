"""Losses and models as people publish them, in parts of batches: the weights are those of whole
batches, or the run says that they are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.base.facts import TrainFacts
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.plan import make_plan

Own = Callable[[str, str], None]

CODE = '''
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

WORDS = 23

class Rows(Dataset):
    """Sentences of 3 to 12 words, filled up to 12. pad: what the labels are filled up with."""
    def __init__(self, pad=-100, apart=False, start=1):
        g = torch.Generator().manual_seed(5)
        lengths = torch.randint(3, 13, (48,), generator=g)
        inside = torch.arange(12) < lengths[:, None]
        ids = torch.randint(start, WORDS, (48, 12), generator=g)
        self.ids = torch.where(inside, ids, 0)
        self.labels = torch.where(inside, ids, pad)
        self.inside, self.apart = inside.long(), apart
    def __len__(self): return 48
    def __getitem__(self, i):
        if self.apart:
            return self.ids[i], self.labels[i]
        named = {"input_ids": self.ids[i], "attention_mask": self.inside[i]}
        return named | {"labels": self.labels[i]}

def rows(**args): return Rows(**args), Rows(**args)

class Gaps(Rows):  # every third row has no label
    def __getitem__(self, i):
        found = super().__getitem__(i)
        labels = found[1] if self.apart else found["labels"]
        if i % 3 == 0: labels.fill_(-100)
        return found

def gaps(**args): return Gaps(**args), Gaps(**args)

class Words(nn.Module):
    """Gives the loss of its labels itself. what: how it is made of them."""
    def __init__(self, what="mean"):
        super().__init__()
        self.embed, self.last = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.what = what
    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.embed(input_ids)
        out = self.last(torch.cumsum(hidden, 1))
        if labels is None:
            return {"logits": out}
        flat = out.flatten(0, 1), labels.flatten()
        if self.what == "mean":
            loss = functional.cross_entropy(*flat)
        elif self.what == "next":
            loss = functional.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        elif self.what == "zero":
            loss = functional.cross_entropy(*flat, ignore_index=0)
        elif self.what == "rows":
            each = functional.cross_entropy(*flat, reduction="none").view_as(labels)
            here = (labels != -100).float()
            loss = ((each * here).sum(1) / here.sum(1)).mean()
        elif self.what == "masked":
            of = out.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            loss = -(of * (labels != -100)).sum() / (labels != -100).sum()
        elif self.what == "sum":
            loss = functional.cross_entropy(*flat, reduction="sum") / 100
        elif self.what == "balance":
            load = out.softmax(-1).mean((0, 1))
            loss = functional.cross_entropy(*flat) + 0.5 * WORDS * load.square().sum()
        elif self.what == "contrast":
            a, b = hidden[:, :6].mean(1), hidden[:, 6:].mean(1)
            loss = functional.cross_entropy(a @ b.T, torch.arange(len(a), device=a.device))
        return {"logits": out, "loss": loss}

class Classed(Dataset):
    classes = ["a", "b", "c"]
    def __len__(self): return 48
    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": int(x[0] > 0) + int(x[1] > 0)}

def classed(): return Classed(), Classed()

class Sparse(nn.Module):
    """Gives a mean over the rows, as TabNet's: with a term that knows of no labels."""
    def __init__(self, form="dict"):
        super().__init__()
        self.form = form
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    def forward(self, x, labels=None):
        out = self.layers(x)
        if labels is None: return {"logits": out}
        term = out.softmax(-1).square().sum(1).mean()
        loss = functional.cross_entropy(out, labels) + 0.1 * term
        forms = {"dict": {"logits": out, "loss": loss}, "last": (out, loss), "first": (loss, out)}
        return forms[self.form]

class Pairs(Classed):
    def __getitem__(self, i): return tuple(super().__getitem__(i).values())

def classed_pairs(): return Pairs(), Pairs()

class Beside(Sparse):
    def forward(self, x):
        out = self.layers(x)
        return out, out.square().mean()

def elbo(outputs, targets):
    reconstructed, mean, spread = outputs
    return spread.mean()

class Plain(Words):
    def forward(self, x): return self.last(torch.cumsum(self.embed(x), 1))

def flat(outputs, targets):
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

def focal(outputs, targets):
    logs, here = outputs.log_softmax(-1), targets != -100
    of = logs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (-((1 - of.exp()) ** 2) * of * here).sum() / here.sum()

def padded(outputs, targets):
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=0)

def wrong(outputs, targets):
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
wrong.count = lambda targets: (targets == 1_000_000).sum()

def llama(pad=0, **config):
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, pad_token_id=pad, bos_token_id=1,
        eos_token_id=2, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16, **config))

def mixtral(**config):
    from transformers import MixtralConfig, MixtralForCausalLM
    return MixtralForCausalLM(MixtralConfig(vocab_size=WORDS, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
        max_position_embeddings=16, **config))
'''


def _train(
    folder: Path,
    *,
    parts: int = 1,
    data: dict[str, Any] | None = None,
    source: str = "words:rows",
    **sections: Any,
) -> TrainFacts:
    config = RunConfig.model_validate(
        {
            "data": {"source": source, "args": data or {}},
            **{"optim": {"name": "sgd", "lr": 0.1}, **sections},
            "train": {
                "epochs": 2,
                "batch_size": 16,
                "accumulate": parts,
                "keep": "last",
                **sections.get("train", {}),
            },
        }
    )
    facts = prepare_dataset(config.data, batch_size=16)
    device = detect_best_device("cpu")
    return trainer.train(make_plan(config, device, facts), folder=folder, log=lambda m, s: None)


def _measure_distance(one: TrainFacts, other: TrainFacts) -> float:
    """The largest difference between their weights."""
    weights = [
        torch.load(Path(facts.model_folder, "weights.pt"), weights_only=True)
        for facts in (one, other)
    ]
    pairs = zip(*(w.values() for w in weights), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def _assert_alike(one: TrainFacts, other: TrainFacts) -> None:
    assert _measure_distance(one, other) < 1e-5  # which nan is not
    assert one.metrics["val/loss"] == pytest.approx(other.metrics["val/loss"], abs=1e-5)


def _compare(folder: Path, **asked: Any) -> tuple[float, float, TrainFacts]:
    """How far eight parts are from whole batches: in the weights, and in train/loss."""
    whole, parts = _train(folder / "a", **asked), _train(folder / "b", parts=8, **asked)
    far = _measure_distance(whole, parts)
    return far, abs(whole.metrics["val/loss"] - parts.metrics["val/loss"]), parts


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("mean", {}),
        ("next", {}),
        ("zero", {"pad": 0}),
        ("rows", {}),
    ],
)
def test_parts_weigh_as_a_models_own_loss_averages(
    own: Own, tmp_path: Path, what: str, data: dict[str, Any]
) -> None:
    """An own padding index was split by rows in silence: weights 0.005 to 0.07 off."""
    own("words", CODE)
    weights, loss, facts = _compare(
        tmp_path, data=data, model={"name": "words:Words", "args": {"what": what}}
    )
    assert weights < 1e-5 and loss < 1e-5
    assert not [told for told in facts.warnings if "not the mean" in told]


@pytest.mark.parametrize("what", ["mean", "masked"])
def test_a_micro_batch_without_a_label_counts_for_nothing(
    own: Own, tmp_path: Path, what: str
) -> None:
    """A loss that divides by its mask gave 0 / 0 there, and the weights became nan."""
    own("words", CODE)
    asked: dict[str, Any] = {"source": "words:gaps"}
    asked["model"] = {"name": "words:Words", "args": {"what": what}}
    whole, parts = _train(tmp_path / "a", **asked), _train(tmp_path / "b", parts=16, **asked)
    _assert_alike(whole, parts)


@pytest.mark.parametrize("loss", ["focal", "flat"])
def test_a_micro_batch_without_a_label_counts_for_nothing_by_ones_own_loss_either(
    own: Own, tmp_path: Path, loss: str
) -> None:
    own("words", CODE)
    asked: dict[str, Any] = {"data": {"apart": True}, "model": {"name": "words:Plain"}}
    asked["source"] = "words:gaps"
    whole = _train(tmp_path / "whole", train={"loss": f"words:{loss}"}, **asked)
    parts = _train(tmp_path / "parts", train={"loss": f"words:{loss}", "accumulate": 16}, **asked)
    _assert_alike(whole, parts)


@pytest.mark.parametrize("what", ["sum", "balance", "contrast"])
def test_a_models_own_loss_that_does_not_add_up_is_told(
    own: Own, tmp_path: Path, what: str
) -> None:
    """Contrastive losses, sums and balance terms were split without a word."""
    own("words", CODE)
    model = {"name": "words:Words", "args": {"what": what}}
    weights, _, facts = _compare(tmp_path, data={}, model=model)
    assert weights > 1e-4
    (parts, judged) = [told for told in facts.warnings if "not the mean" in told]
    assert parts.startswith(
        "model.name: the loss that words:Words gives of a batch is not the mean"
    )
    assert "micro-batches of 2 rows" in parts and "batches of 16 rows" in judged


def test_a_loss_of_classes_is_not_asked_about_labels_that_it_never_gets(
    own: Own, tmp_path: Path
) -> None:
    """With a label of -100 a penalty of all rows is no mean any more: a run whose parts are right
    was told that they are not."""
    own("words", CODE)
    weights, loss, facts = _compare(
        tmp_path, source="words:classed", data={}, model={"name": "words:Sparse"}
    )
    assert weights < 1e-5 and loss < 1e-5
    assert not [told for told in facts.warnings if "not the mean" in told]


@pytest.mark.parametrize("form", ["last", "first"])
def test_a_loss_in_a_tuple_is_the_models_own(own: Own, tmp_path: Path, form: str) -> None:
    """Of (logits, loss) the loss was left out, and cross entropy took its place without a word."""
    own("words", CODE)
    named, nameless = (
        _train(
            tmp_path / form,
            source="words:classed",
            model={"name": "words:Sparse", "args": {"form": form}},
        )
        for form in ("dict", form)
    )
    assert nameless.metrics["val/loss"] == named.metrics["val/loss"]
    weights = [torch.load(Path(facts.model_folder, "weights.pt")) for facts in (named, nameless)]
    assert all(map(torch.equal, weights[0].values(), weights[1].values()))


def test_a_number_that_is_not_trained_on_is_told(own: Own, tmp_path: Path) -> None:
    """TabNet's sparsity loss stands beside its logits, and was left out without a word."""
    own("words", CODE)
    facts = _train(tmp_path, source="words:classed_pairs", model={"name": "words:Beside"})
    assert any("returns a number beside its outputs that is not" in w for w in facts.warnings)


def test_a_loss_that_takes_several_outputs_is_told_what_it_was_given(
    own: Own, tmp_path: Path
) -> None:
    """That of a VAE was told of "outputs", which were the first of the three that it gave."""
    own("words", CODE)
    words = r"train\.loss: words:elbo, called with outputs a float32 tensor of shape \(2, 3\) and"
    with pytest.raises(ConfigError, match=words):
        _train(
            tmp_path,
            source="words:classed_pairs",
            model={"name": "words:Beside"},
            train={"loss": "words:elbo"},
        )


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_a_model_with_a_padding_token_counts_labels(own: Own, tmp_path: Path, model: str) -> None:
    """The rows of the trial were all padding, so that rows were counted: weights 0.047 off."""
    own("words", CODE)
    weights, loss, facts = _compare(tmp_path, data={}, model={"name": f"words:{model}"})
    assert weights < 2e-5 and loss < 1e-5 and not any("not the mean" in w for w in facts.warnings)


def test_the_balance_of_experts_is_told(own: Own, tmp_path: Path) -> None:
    """Its loss is of all tokens of a batch together."""
    own("words", CODE)
    args = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    _, _, facts = _compare(tmp_path, data={}, model={"name": "words:mixtral", "args": args})
    assert any("the loss that words:mixtral gives" in told for told in facts.warnings)


@pytest.mark.parametrize(("loss", "pad"), [("flat", -100), ("focal", -100), ("padded", 0)])
def test_a_loss_of_ones_own_says_itself_which_labels_it_skips(
    own: Own, tmp_path: Path, loss: str, pad: int
) -> None:
    """Without `count` it was weighed by rows: train/loss 0.11 off, weights 0.15."""
    own("words", CODE)
    weights, off, facts = _compare(
        tmp_path,
        data={"pad": pad, "apart": True},
        model={"name": "words:Plain"},
        train={"loss": f"words:{loss}"},
    )
    assert weights < 1e-5 and off < 1e-5
    assert not [told for told in facts.warnings if "not the mean" in told]


def test_a_count_of_nothing_is_refused(own: Own, tmp_path: Path) -> None:
    """It trained at a loss of 0 and ended FINISHED with val/loss nan."""
    own("words", CODE)
    with pytest.raises(
        ConfigError, match="^train.loss: count of words:wrong gives 0 for rows whose"
    ):
        _train(
            tmp_path,
            data={"pad": 0, "apart": True},
            model={"name": "words:Plain"},
            train={"loss": "words:wrong"},
        )


SEQUENCES = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset

class Sequences(Dataset):
    classes = ["down", "up"]
    def __init__(self): self.lengths = [3 + i % 7 for i in range(32)]
    def __len__(self): return 32
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(self.lengths[i], 4, generator=g)
        return x, int(x.sum() > 0)

def collate(rows):
    rows = sorted(rows, key=lambda row: -len(row[0]))
    lengths = torch.tensor([len(x) for x, _ in rows])
    x = nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True)
    return (x, lengths), torch.tensor([y for _, y in rows])

def loaders():
    return tuple(DataLoader(Sequences(), batch_size=8, collate_fn=collate) for _ in range(2))

class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)
    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True)
        _, (hidden, _) = self.lstm(packed)
        return self.last(hidden[-1])
"""


PLAIN_SGD = {
    "name": "sgd",
    "lr": 0.1,
    "args": {"momentum": 0},
    "weight_decay": 0,
    "schedule": "constant",
    "warmup": 0,
}


def test_a_recurrent_net_of_packed_sequences_trains_as_by_hand(own: Own, tmp_path: Path) -> None:
    """The trial's lengths were 0, which nothing can be packed of: it could not be trained."""
    own("packed", SEQUENCES)
    facts = _train(
        tmp_path / "run",
        model={"name": "packed:Packed"},
        data={},
        source="packed:loaders",
        train={"batch_size": 8, "epochs": 2, "seed": 0},
        optim=PLAIN_SGD,
    )
    import packed  # type: ignore[import-not-found] # noqa: PLC0415

    torch.manual_seed(0)
    model = packed.Packed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, targets in packed.loaders()[0]:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(*inputs), targets).backward()
            optimizer.step()
    trained = torch.load(Path(facts.model_folder, "weights.pt"), weights_only=True)
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())


RAMPED = (
    CODE
    + """
CALLS, SEEN = 0, []

class Ramp:
    def __init__(self): self.calls = 0
    def __call__(self, outputs, targets):
        self.calls += 1
        return min(1.0, self.calls / 10) * flat(outputs, targets)

def _count():
    global CALLS
    CALLS += 1

def listed(outputs, targets):
    _count()
    SEEN.append(len(targets))
    return min(1.0, CALLS / 10) * flat(outputs, targets)

def _closed():
    calls = 0
    def loss(outputs, targets):
        nonlocal calls
        calls += 1
        return min(1.0, calls / 10) * flat(outputs, targets)
    return loss

class Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(WORDS))
        self.calls = 0
    def forward(self, outputs, targets):
        self.calls += 1
        self.centre = self.centre * 0.9 + outputs.detach().mean((0, 1)) * 0.1
        return flat(outputs - self.centre, targets)

ramp, closed, centre = Ramp(), _closed(), Centre()
"""
)


@pytest.mark.parametrize("loss", ["ramp", "listed", "closed", "centre"])
def test_a_trial_leaves_a_loss_as_it_was(own: Own, tmp_path: Path, loss: str) -> None:
    """A ramp by calls trained otherwise where it was tried once than where it was tried thrice."""
    own("words", RAMPED)
    asked = {"data": {"apart": True}, "model": {"name": "words:Plain"}}
    _train(tmp_path / "run", **asked, train={"loss": f"words:{loss}", "epochs": 1})
    import words  # type: ignore[import-not-found] # noqa: PLC0415

    steps, judged = 3, 3  # batches of an epoch, and of its evaluation
    if loss == "listed":
        assert steps + judged == words.CALLS == len(words.SEEN)
    elif loss == "closed":
        assert words.closed.__closure__[0].cell_contents == steps + judged
    else:
        assert getattr(words, loss).calls == steps + judged


WRITING = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    """Multiplies its inputs in a way that no version counts, or does not."""
    def __init__(self, how="copy"):
        super().__init__()
        self.layer, self.how = nn.Linear(5, 3), how
    def forward(self, x):
        if self.how == "copy":
            x = x * 1.5
        elif self.how == "data":
            x.data.mul_(1.5)
        elif self.how == "judged" and not self.training:
            x.data.mul_(1.5)
        elif self.how == "numpy":
            rows = x.detach().cpu().numpy()
            rows *= 1.5
            x = x if x.device.type == "cpu" else torch.from_numpy(rows).to(x.device)
        elif not self.training:
            x = x * 1.5
        return self.layer(x)

def rows():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, generator=g)
    return x, (x @ torch.randn(5, 3, generator=g)).argmax(1)
'''


@pytest.mark.parametrize(
    ("how", "as_by"), [("data", "copy"), ("numpy", "copy"), ("judged", "judged copy")]
)
def test_rows_to_judge_by_stay_as_they_are(own: Own, tmp_path: Path, how: str, as_by: str) -> None:
    """They were multiplied once more in each evaluation, for good: 0.2871 for 0.3385."""
    own("writing", WRITING)
    losses = []
    for kind in (how, as_by):
        facts = _train(
            tmp_path / kind,
            model={"name": "writing:Net", "args": {"how": kind}},
            source="writing:rows",
            optim=PLAIN_SGD,
            train={"epochs": 3},
        )
        losses.append(facts.metrics["val/loss"])
    assert losses[0] == losses[1]
