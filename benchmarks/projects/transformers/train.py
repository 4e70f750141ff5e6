"""A training by the Trainer of transformers."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from headroom.transformers import HeadroomCallback  # added

model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=256))
texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 256, (256, 32))]
arguments = TrainingArguments(output_dir="out", num_train_epochs=2, logging_steps=8)
trainer = Trainer(
    model,
    arguments,
    train_dataset=texts,
    callbacks=[HeadroomCallback()],  # added
)
trainer.train()
