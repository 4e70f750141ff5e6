"""A training by Lightning."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headroom.lightning import HeadroomCallback  # added


class Net(lightning.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch, at):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, at):
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    x = torch.randn(4096, 16)
    rows = TensorDataset(x, (x[:, 0] > 0).long())
    trainer = lightning.Trainer(
        max_epochs=3,
        callbacks=[HeadroomCallback()],  # added
    )
    trainer.fit(Net(), DataLoader(rows, 64, shuffle=True), DataLoader(rows, 256))
