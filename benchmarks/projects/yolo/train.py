"""A training by ultralytics, on pictures that are drawn here."""

import sys
import types
from pathlib import Path

import cv2
import numpy as np

try:
    import torchvision
except RuntimeError:  # it is built for CUDA, and this PyTorch is not; one function is asked of it
    torchvision = sys.modules["torchvision"] = types.ModuleType("torchvision")
    torchvision.__version__ = "0.28"
    torchvision.ops = types.SimpleNamespace(nms=lambda b, s, t: s.argsort(descending=True))

from ultralytics import YOLO

from headroom.ultralytics import HeadroomCallback  # added

draw = np.random.default_rng(0)
for part in ("train", "val"):
    for kind in ("images", "labels"):
        Path(kind, part).mkdir(parents=True, exist_ok=True)
    for at in range(16):
        cv2.imwrite(f"images/{part}/{at}.png", draw.integers(0, 255, (64, 64, 3), dtype=np.uint8))
        Path(f"labels/{part}/{at}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
Path("data.yaml").write_text(
    f"path: {Path.cwd()}\ntrain: images/train\nval: images/val\nnames: [x]\n"
)

model = YOLO("yolo11n.yaml")
HeadroomCallback().add_to(model)  # added
model.train(data="data.yaml", epochs=2, imgsz=64, batch=4, workers=0, plots=False, amp=False)
