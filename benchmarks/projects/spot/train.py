"""A loop with a checkpoint of its own, on a machine that may be taken away."""

import sys
import time
from pathlib import Path

import torch
from torch import nn

from headroom import account  # added

STEPS, KEPT = 400, Path("checkpoint.pt")
torch.manual_seed(0)
x = torch.randn(2048, 16)
y = (x[:, 0] > 0).long()
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
step = 0
with account(key="spot", model=net, optimizer=optimizer) as run:  # added
    if KEPT.exists():
        kept = torch.load(KEPT)
        net.load_state_dict(kept["net"])
        optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
    while step < STEPS:
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        run.log({"train/loss": loss}, step)  # added
        if step % 50 == 0:
            half = Path("checkpoint.new")
            torch.save(
                {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, half
            )
            half.rename(KEPT)
            print("step", step, flush=True)
            time.sleep(0.2 if "slow" in sys.argv else 0)
