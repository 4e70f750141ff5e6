"""What is trained in the throughput tables, on a CPU and on a GPU, and the bars that its figures
are held against: how many times as long as this project's step another's step takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

EVERYBODY = ("tutorial", "tuned", "lightning", "accelerate")
# Where the work of a step is small: what of the difference is not a matter of threads.
ONE_THREAD = ("tutorial, one thread", "tuned, one thread")
# What of the difference is the process that sends metrics, which wants a core of its own.
UNTRACKED = "headroom, not tracked"
MLP = {"hidden": [256, 128]}
GPT2_SMALL = {"layers": 12, "heads": 12, "width": 768}
GPT2_VOCABULARY = 50304  # 50,257, rounded up to a multiple of 64


@dataclass(frozen=True)
class Workload:
    """`data` makes the section of the settings, and in a folder what files it needs. Bars: how many
    times as long as this project's step another's has to be."""

    name: str
    data: Callable[[Path], dict[str, Any]]
    model: str
    args: dict[str, Any]
    batch_size: int
    warm_up: int = 20  # steps
    rounds: int = 99  # at most: where a step is long
    compile: str = "auto"  # default: everybody compiles
    contenders: tuple[str, ...] = EVERYBODY
    mfu_bar: float | None = None  # of this project, where the device's peak is known
    shows_own_costs: bool = False  # of tracking and of accounting
    bars: Mapping[str, float] = field(default_factory=dict)


def synthetic(rows: int, features: int, folder: Path) -> dict[str, Any]:
    return {"source": "synthetic", "args": {"rows": rows, "features": features}}


def images(rows: int, folder: Path) -> dict[str, Any]:
    """Noise in the shape of CIFAR-10: 3 x 32 x 32 pixels, 10 classes."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (rows, 3, 32, 32), dtype=np.uint8)
    path = folder / f"images-{rows}.npz"
    np.savez(path, x=x, y=np.arange(rows) % 10)
    return {"source": "npz", "path": str(path)}


def tokens(rows: int, context: int, vocabulary: int, folder: Path) -> dict[str, Any]:
    """Noise in so many rows; a fifth of them is kept for validation."""
    random = np.random.default_rng(0)
    path = folder / f"tokens-{rows}.npy"
    np.save(path, random.integers(0, vocabulary, rows * context + 2, dtype=np.uint16))
    return {
        "source": "tokens",
        "path": str(path),
        "args": {"context": context, "vocab": vocabulary},
    }


def cpu() -> list[Workload]:
    rows = partial(synthetic, 75_000, 784)  # 60,000 of them for training
    return [
        Workload(
            "digits-sized mlp 64-128-64-10, batch 64",
            partial(synthetic, 32_000, 64),
            "mlp",
            {"hidden": [128, 64]},
            64,
            contenders=(*EVERYBODY, *ONE_THREAD),
            shows_own_costs=True,
            bars={"tutorial": 2.5, "tuned": 0.98, "lightning": 6.0},
        ),
        Workload(
            "mlp 784-256-128-10, batch 128",
            rows,
            "mlp",
            MLP,
            128,
            contenders=(*EVERYBODY, UNTRACKED),
            shows_own_costs=True,
            bars={"tutorial": 1.6, "tuned": 0.98, "lightning": 2.4},
        ),
        Workload(
            "mlp 784-256-128-10, batch 512",
            rows,
            "mlp",
            MLP,
            512,
            contenders=(*EVERYBODY, "floor"),
            bars={"tutorial": 1.4, "tuned": 0.98},
        ),
        Workload(
            "mlp 784-256-128-10, batch 1024",
            rows,
            "mlp",
            MLP,
            1024,
            contenders=(*EVERYBODY, UNTRACKED, "floor"),
            bars={"tuned": 0.98},
        ),
        Workload(
            "cnn on 3x32x32, batch 128",
            partial(images, 960),
            "cnn",
            {},
            128,
            warm_up=1,
            rounds=3,
            contenders=(*EVERYBODY, "floor", "floor, channels last"),
            bars={"tuned": 0.98},
        ),
        Workload(
            "cnn on 3x32x32, batch 512",
            partial(images, 1_280),
            "cnn",
            {},
            512,
            warm_up=1,
            rounds=3,
            contenders=("tutorial", "tuned", "floor", "floor, channels last"),
            bars={"tuned": 0.98},
        ),
        Workload(
            "transformer of 4 layers of 128, context 128, bytes, batch 32",
            partial(tokens, 400, 128, 256),
            "transformer",
            {"layers": 4, "heads": 4, "width": 128},
            32,
            warm_up=2,
            rounds=3,
            contenders=("tutorial", "tuned"),
            bars={"tuned": 0.98},
        ),
    ]


def gpu() -> list[Workload]:
    rows = partial(synthetic, 256_000, 784)  # 204,800 for training: whole batches
    everybody = (*EVERYBODY, "tuned, cuda graph")
    floors = ("floor", "floor, channels last")
    return [
        Workload(
            "digits-sized mlp 64-128-64-10, batch 64",
            partial(synthetic, 64_000, 64),
            "mlp",
            {"hidden": [128, 64]},
            64,
            contenders=everybody,
            bars={"tuned": 0.98},
        ),
        Workload(
            "mlp 784-256-128-10, batch 128",
            rows,
            "mlp",
            MLP,
            128,
            contenders=everybody,
            shows_own_costs=True,
            bars={"tutorial": 10.0, "tuned": 0.98, "tuned, cuda graph": 0.95},
        ),
        *(
            Workload(
                f"mlp 784-256-128-10, batch {batch}",
                rows,
                "mlp",
                MLP,
                batch,
                contenders=everybody,
                bars={"tuned": 0.98},
            )
            for batch in (512, 1024)
        ),
        Workload(
            "cnn on 3x32x32, batch 128",
            partial(images, 48_000),
            "cnn",
            {},
            128,
            contenders=(*everybody, *floors),
            bars={"tuned": 0.98},
        ),
        Workload(
            "cnn on 3x32x32, batch 512",
            partial(images, 64_000),
            "cnn",
            {},
            512,
            contenders=(*everybody, *floors, "headroom on the CPU"),
            bars={"tuned": 0.98, "headroom on the CPU": 30.0},
        ),
        Workload(
            "transformer of 124M, 12 layers of 768, context 1024, batch 32",
            partial(tokens, 1_600, 1024, GPT2_VOCABULARY),
            "transformer",
            GPT2_SMALL,
            32,
            rounds=3,
            compile="default",
            contenders=("tuned",),
            bars={"tuned": 0.99},
            mfu_bar=0.5,
        ),
    ]
