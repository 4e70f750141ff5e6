"""Trainings with nothing to find but that they compute, of twenty kinds: those of Headroom itself,
loops of one's own with the account, and loops of frameworks with its adapters.

`python -P -m benchmarks.healthy_runs KIND --seed N --out FILE` trains one and writes its run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS, STEPS, MOST_S = 4.0, 80, 20.0  # of a loop: both, and at most so long
Batch = tuple[Tensor, Tensor]


def _may_go_on(batches: int = 1) -> Iterator[int]:
    """Count batches until there were enough steps of so many of them."""
    began, step = perf_counter(), 0
    while True:
        gone_s = perf_counter() - began
        if (step >= STEPS * batches and gone_s >= SECONDS) or gone_s >= MOST_S:
            return
        yield step
        step += 1


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _watch(net: Any, optimizer: Any, name: str) -> Any:
    from headroom import account

    return account(run_name=name, model=net, optimizer=optimizer, quiet=True)


def _make_loader(x: Tensor, y: Tensor, rows: int = 64, **asked: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), rows, shuffle=True, **asked)


def _fit(
    name: str,
    net: nn.Module,
    loader: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    is_plain: bool = False,
    accumulate: int = 1,
    judge_every: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Train and return the run. is_plain: the loop tells nothing. judge_every: steps between two
    short evaluations."""
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    with _watch(net, optimizer, name) as run:
        counts = _may_go_on(accumulate)
        batches = loader if is_plain else run.batches(loader)
        for step, batch in zip(counts, _endless(batches), strict=False):
            with nullcontext() if is_plain or accumulate > 1 else run.step():
                (loss(net, batch) / accumulate).backward()
                if step % accumulate == accumulate - 1:
                    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
            if judge_every and step % judge_every == judge_every - 1:
                with run.phase("eval"), torch.no_grad():
                    run.log({"val/loss": loss(net, batch)})
    return dict(run.run)


def _classify(net: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def _restore(net: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[0])


def _make_mlp(inputs: int = 512, width: int = 1024) -> nn.Sequential:
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _vectors(rows: int = 2048, inputs: int = 512) -> Batch:
    return torch.randn(rows, inputs), torch.randint(0, 10, (rows,))


def _images(rows: int = 512, side: int = 32) -> Batch:
    return torch.randn(rows, 3, side, side), torch.randint(0, 10, (rows,))


def _make_cnn(width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


class _Reader(nn.Module):
    """Tokens through a layer that gives (states, rest), classes of the last one."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.embed, self.layer, self.last = nn.Embedding(500, width), layer, nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.layer(self.embed(ids))
        states = found[0] if isinstance(found, tuple) else found
        scores: Tensor = self.last(states[:, -1])
        return scores


def _tokens(length: int = 48) -> Batch:
    return torch.randint(0, 500, (1024, length)), torch.randint(0, 10, (1024,))


# Loops of one's own.


def own_mlp() -> dict[str, Any]:
    return _fit("mlp", _make_mlp(), _make_loader(*_vectors(), rows=128), _classify)


def own_mlp_plain() -> dict[str, Any]:
    loader = _make_loader(*_vectors(), rows=128)
    return _fit("mlp-plain", _make_mlp(), loader, _classify, is_plain=True)


def own_mlp_judged() -> dict[str, Any]:
    loader = _make_loader(*_vectors(), rows=128)
    return _fit("mlp-judged", _make_mlp(), loader, _classify, judge_every=20)


def own_cnn() -> dict[str, Any]:
    return _fit("cnn", _make_cnn(), _make_loader(*_images(), rows=16), _classify)


def own_cnn_worker() -> dict[str, Any]:
    loader = _make_loader(*_images(), rows=16, num_workers=1, persistent_workers=True)
    return _fit("cnn-worker", _make_cnn(), loader, _classify)


def own_cnn_accumulated() -> dict[str, Any]:
    loader = _make_loader(*_images(), rows=8)
    return _fit("cnn-accumulated", _make_cnn(), loader, _classify, accumulate=4)


def own_cnn_sgd() -> dict[str, Any]:
    net = _make_cnn(48)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    loader = _make_loader(*_images(), rows=16)
    return _fit("cnn-sgd", net, loader, _classify, optimizer=sgd, is_plain=True)


def own_rnn() -> dict[str, Any]:
    net = _Reader(nn.GRU(128, 128, batch_first=True), 128)
    return _fit("rnn", net, _make_loader(*_tokens(), rows=32), _classify)


def own_lstm_varied() -> dict[str, Any]:
    """Batches of lengths that differ, in no order."""
    net = _Reader(nn.LSTM(128, 128, batch_first=True), 128)
    drawn = [16 + int(n) for n in torch.randint(0, 48, (40,))]
    batches = [(torch.randint(0, 500, (32, n)), torch.randint(0, 10, (32,))) for n in drawn]
    return _fit("lstm", net, batches, _classify)


def own_transformer() -> dict[str, Any]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    net = _Reader(nn.TransformerEncoder(layer, 2), 128)
    return _fit("transformer", net, _make_loader(*_tokens(), rows=16), _classify)


def own_autoencoder() -> dict[str, Any]:
    net = _make_mlp()
    net[-1] = nn.Linear(1024, 512)
    return _fit("autoencoder", net, _make_loader(*_vectors(), rows=128), _restore)


def own_conv_autoencoder() -> dict[str, Any]:
    net = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()),
        *(nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1)),
    )
    return _fit("conv-autoencoder", net, _make_loader(*_images(), rows=32), _restore)


def own_gan() -> dict[str, Any]:
    maker, judge = _make_mlp(64), _make_mlp(10)
    pairs = [torch.optim.Adam(each.parameters(), lr=2e-4) for each in (judge, maker)]
    real = torch.randn(128, 10)
    with _watch([maker, judge], pairs, "gan") as run:
        for _ in _may_go_on():
            made = maker(torch.randn(128, 64))
            pairs[0].zero_grad()
            (judge(made.detach()).mean() - judge(real).mean()).backward()
            pairs[0].step()
            pairs[1].zero_grad()
            (-judge(made).mean()).backward()
            pairs[1].step()
    return dict(run.run)


# Trainings of Headroom's own.


def _train(**sections: Any) -> dict[str, Any]:
    from headroom import train

    # So many epochs that they take long enough here, and an end by the clock.
    limits = {"end": f"{SECONDS + 2}s", "epochs": 1000, **sections.pop("train", {})}
    run: dict[str, Any] = train({**sections, "train": limits})
    return run


def ours_mlp() -> dict[str, Any]:
    data = {"source": "synthetic", "args": {"rows": 40_000, "features": 256}}
    return _train(data=data, model={"args": {"hidden": [1024, 1024]}}, train={"batch_size": 256})


def ours_digits_cnn() -> dict[str, Any]:
    return _train(model={"name": "cnn", "args": {"width": 32}})


def ours_transformer() -> dict[str, Any]:
    model = {"name": "transformer", "args": {"layers": 2, "heads": 4, "width": 64}}
    data = {"source": "text", "args": {"context": 64}}
    return _train(data=data, model=model, train={"batch_size": 8, "epochs": 1})


def ours_regression() -> dict[str, Any]:
    data = {"source": "synthetic", "args": {"rows": 30_000, "features": 512, "classes": 1}}
    return _train(data=data, model={"args": {"hidden": [512, 512]}}, train={"batch_size": 256})


# Loops of frameworks.


class _Scorer(nn.Module):
    """Gives its loss, as frameworks ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _make_mlp()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


def lightning() -> dict[str, Any]:
    import lightning.pytorch as pl

    from headroom.lightning import HeadroomCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _make_mlp()

        def training_step(self, batch: Any, at: int) -> Tensor:
            return _classify(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    callback = HeadroomCallback(quiet=True)
    pl.Trainer(
        max_epochs=-1,
        max_time={"seconds": int(SECONDS)},
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), _make_loader(*_vectors(8192), rows=128))
    assert callback.run is not None
    return dict(callback.run.run)


def transformers() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from headroom.transformers import HeadroomCallback

    net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=500))
    texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 500, (2000, 64))]
    asked = TrainingArguments(
        output_dir="hf",
        max_steps=150,
        save_strategy="no",
        logging_steps=20,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    with HeadroomCallback(quiet=True) as told:
        Trainer(model=net, args=asked, train_dataset=texts, callbacks=[told]).train()
    assert told.run is not None
    return dict(told.run.run)


def accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    from headroom.accelerate import HeadroomTracker

    net = _make_mlp()
    made = torch.optim.AdamW(net.parameters())
    tracker = HeadroomTracker(model=net, optimizer=made, quiet=True)
    does = Accelerator(cpu=True, log_with=tracker)
    model, optimizer, loader = does.prepare(net, made, _make_loader(*_vectors(), rows=128))
    does.init_trackers("mine", config={"lr": 1e-3})
    assert tracker.run is not None
    batches = _endless(tracker.run.batches(loader))
    for _, batch in zip(_may_go_on(), batches, strict=False):
        does.backward(_classify(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    does.end_training()
    return dict(tracker.run.run)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    kind.__name__: kind
    for kind in (
        *(own_mlp, own_mlp_plain, own_mlp_judged, own_cnn, own_cnn_worker, own_cnn_accumulated),
        *(own_cnn_sgd, own_rnn, own_lstm_varied, own_transformer, own_autoencoder),
        *(own_conv_autoencoder, own_gan),
        *(ours_mlp, ours_digits_cnn, ours_transformer, ours_regression),
        *(lightning, transformers, accelerate),
    )
}


def main() -> None:
    """Train one and write its run."""
    asked = argparse.ArgumentParser()
    asked.add_argument("kind", choices=KINDS)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--out", type=Path, required=True)
    given = asked.parse_args()
    torch.manual_seed(given.seed)
    began = time.perf_counter()
    run = KINDS[given.kind]()
    told = {"wall_s": time.perf_counter() - began}
    given.out.write_text(json.dumps({"truth": told, "run": run}, default=str))


if __name__ == "__main__":
    main()
