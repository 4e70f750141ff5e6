"""Models of Hugging Face transformers as their users build them, small and with weights drawn anew,
each with rows of the kind that it takes: what `test_families.py` trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCABULARY, LENGTH, PADDING = 40, 10, 1
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE = {**SIZES, "intermediate_size": 32}
TEXT = {**WIDE, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": PADDING}
IMAGE = {**WIDE, "image_size": 16, "patch_size": 8, "num_channels": 3}
SPECIAL = {"pad_token_id": PADDING, "bos_token_id": 0, "eos_token_id": 2}

Row = dict[str, Any]


class Family(NamedTuple):
    """A model, and its row of this number."""

    build: Callable[[], nn.Module]
    row: Callable[[int], Row]
    figure: str = "val/loss"  # one that its run has


def draw(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def draw_tokens(number: int, length: int = LENGTH) -> Tensor:
    return torch.randint(4, VOCABULARY, (length,), generator=draw(number))


def draw_image(number: int, size: int = 16) -> Tensor:
    return torch.randn(3, size, size, generator=draw(number))


def make_text(number: int) -> Row:
    """Some rows end in padding, whose labels are skipped."""
    tokens, there = draw_tokens(number), torch.arange(LENGTH) < LENGTH - 3 * (number % 2)
    tokens = torch.where(there, tokens, PADDING)
    labels = torch.where(there, tokens, -100)
    return {"input_ids": tokens, "attention_mask": there.long(), "labels": labels}


def make_masked(number: int) -> Row:
    row = make_text(number)
    is_hidden = torch.arange(LENGTH) % 4 == number % 4
    labels = torch.where(is_hidden, row["labels"], -100)
    return {**row, "input_ids": torch.where(is_hidden, 3, row["input_ids"]), "labels": labels}


def make_sentence(number: int) -> Row:
    return {**make_text(number), "labels": torch.tensor(number % 3)}


def make_translation(number: int) -> Row:
    target = draw_tokens(100 + number, LENGTH - 4)
    target[LENGTH - 5 - number % 2 :] = -100
    return {**make_text(number), "labels": target}


def make_answer(number: int) -> Row:
    row = make_text(number)
    del row["labels"]
    at = torch.tensor(number % 4)
    return {**row, "start_positions": at, "end_positions": at + 1}


def make_picture(number: int) -> Row:
    return {"pixel_values": draw_image(number), "labels": torch.tensor(number % 3)}


def make_pair(number: int) -> Row:
    row = make_text(number)
    del row["labels"]
    return {**row, "pixel_values": draw_image(number)}


def make_speech(number: int) -> Row:
    heard = torch.randn(16, 24, generator=draw(number))
    return {"input_features": heard, "labels": draw_tokens(number, 6)}


def make_sound(number: int) -> Row:
    heard = torch.randn(400, generator=draw(number))
    return {"input_values": heard, "labels": draw_tokens(number, 4)}


def make_scene(number: int) -> Row:
    kinds = torch.randint(0, 4, (32, 32), generator=draw(number))
    return {"pixel_values": draw_image(number, 32), "labels": torch.where(kinds == 3, 255, kinds)}


def make_boxes(number: int) -> Row:
    """One or two objects."""
    many = 1 + number % 2
    centers = 0.3 + 0.4 * torch.rand(many, 2, generator=draw(number))
    boxes = torch.cat((centers, torch.full((many, 2), 0.2)), 1)
    labels = {"class_labels": torch.arange(many) + number % 2, "boxes": boxes}
    return {"pixel_values": draw_image(number, 64), "labels": labels}


def make_series(number: int) -> Row:
    series = torch.randn(24, 2, generator=draw(number)).cumsum(0)
    return {"past_values": series[:16], "future_values": series[16:]}


def build_small_bert(kind: type[nn.Module], **more: Any) -> Callable[[], nn.Module]:
    return lambda: kind(hf.BertConfig(**TEXT, **more))


def build_clip() -> nn.Module:
    text = hf.CLIPTextConfig(**TEXT, **SPECIAL)
    image = hf.CLIPVisionConfig(**IMAGE)
    return hf.CLIPModel(
        hf.CLIPConfig(text_config=text.to_dict(), vision_config=image.to_dict(), projection_dim=8)
    )


def build_siglip() -> nn.Module:
    text = hf.SiglipTextConfig(**TEXT, projection_size=16, **SPECIAL)
    image = hf.SiglipVisionConfig(**IMAGE)
    return hf.SiglipModel(
        hf.SiglipConfig(text_config=text.to_dict(), vision_config=image.to_dict())
    )


def build_t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = hf.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)
    return hf.T5ForConditionalGeneration(config)


ENCODER_DECODER = {
    **{"d_model": 16, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
}


def build_bart() -> nn.Module:
    config = hf.BartConfig(
        vocab_size=VOCABULARY, max_position_embeddings=32, **ENCODER_DECODER, **SPECIAL
    )
    return hf.BartForConditionalGeneration(config)


def build_whisper() -> nn.Module:
    config = hf.WhisperConfig(
        **{"vocab_size": VOCABULARY, "num_mel_bins": 16, "max_source_positions": 12},
        **{"max_target_positions": 16, "decoder_start_token_id": 0},
        **ENCODER_DECODER,
        **SPECIAL,
    )
    return hf.WhisperForConditionalGeneration(config)


def build_segformer() -> nn.Module:
    config = hf.SegformerConfig(
        **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1]},
        **{"hidden_sizes": [8, 16], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
        **{"patch_sizes": [7, 3], "strides": [4, 2], "decoder_hidden_size": 16, "num_labels": 3},
    )
    return hf.SegformerForSemanticSegmentation(config)


def build_detr() -> nn.Module:
    backbone = hf.ResNetConfig(
        **{"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        **{"layer_type": "basic", "out_features": ["stage2"]},
    )
    config = hf.DetrConfig(
        **{"use_timm_backbone": False, "backbone_config": backbone, "backbone": None},
        **{"use_pretrained_backbone": False, "num_queries": 5, "num_labels": 3},
        **ENCODER_DECODER,
    )
    return hf.DetrForObjectDetection(config)


def build_wav2vec2() -> nn.Module:
    config = hf.Wav2Vec2Config(
        **{"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2)},
        **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "apply_spec_augment": False},
        **{"num_conv_pos_embedding_groups": 2, "vocab_size": VOCABULARY, "pad_token_id": 0},
        **WIDE,
    )
    return hf.Wav2Vec2ForCTC(config)


def build_patchtst() -> nn.Module:
    config = hf.PatchTSTConfig(
        **{"num_input_channels": 2, "context_length": 16, "prediction_length": 8},
        **{"patch_length": 4, "patch_stride": 4, "d_model": 16, "ffn_dim": 32},
        **{"num_attention_heads": 2, "num_hidden_layers": 1},
    )
    return hf.PatchTSTForPrediction(config)


def build_vit_mae() -> nn.Module:
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1}
    decoder |= {"decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}
    return hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**IMAGE, **decoder))


OF_TOKENS, OF_CLASSES = "val/perplexity", "val/accuracy"
FAMILIES = {
    "gpt2": Family(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2, **SPECIAL
            )
        ),
        make_text,
        OF_TOKENS,
    ),
    "llama": Family(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), make_text, OF_TOKENS),
    "qwen": Family(lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED)), make_text, OF_TOKENS),
    "gemma": Family(lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED)), make_text, OF_TOKENS),
    "mixtral": Family(
        lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**GROUPED, num_local_experts=4, output_router_logits=True)
        ),
        make_text,
        OF_TOKENS,
    ),
    "mamba": Family(
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(
                vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2, **SPECIAL
            )
        ),
        make_text,
        OF_TOKENS,
    ),
    "t5": Family(build_t5, make_translation, OF_TOKENS),
    "bart": Family(build_bart, make_translation, OF_TOKENS),
    "bert": Family(
        build_small_bert(hf.BertForSequenceClassification, num_labels=3), make_sentence, OF_CLASSES
    ),
    "bert, masked": Family(build_small_bert(hf.BertForMaskedLM), make_masked, OF_TOKENS),
    "bert, answers": Family(build_small_bert(hf.BertForQuestionAnswering), make_answer),
    "roberta": Family(
        lambda: hf.RobertaForSequenceClassification(
            hf.RobertaConfig(**TEXT, **SPECIAL, num_labels=3)
        ),
        make_sentence,
        OF_CLASSES,
    ),
    "modernbert": Family(
        lambda: hf.ModernBertForMaskedLM(hf.ModernBertConfig(**TEXT, **SPECIAL)),
        make_masked,
        OF_TOKENS,
    ),
    "vit": Family(
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGE, num_labels=3)),
        make_picture,
        OF_CLASSES,
    ),
    "vit, masked": Family(build_vit_mae, lambda number: {"pixel_values": draw_image(number)}),
    "clip": Family(build_clip, make_pair),
    "siglip": Family(build_siglip, make_pair),
    "whisper": Family(build_whisper, make_speech, OF_TOKENS),
    "wav2vec2": Family(build_wav2vec2, make_sound),
    "segformer": Family(build_segformer, make_scene),
    "detr": Family(build_detr, make_boxes),
    "patchtst": Family(build_patchtst, make_series),
}


def build(family: str) -> nn.Module:
    return FAMILIES[family].build()


def load(family: str, batch_size: int) -> tuple[Any, Any]:
    """Return loaders of 20 rows to train on, and of 12 to validate on at once, in their order."""
    make: Any = FAMILIES[family].row
    train = DataLoader(list(map(make, range(20))), batch_size, collate_fn=collate)
    return train, DataLoader(list(map(make, range(20, 32))), 12, collate_fn=collate)


def collate(rows: list[Row]) -> Row:
    """Boxes stay a list, of a dict for each image; of pairs and answers a loss is asked for."""
    batch: Row = {
        name: [row[name] for row in rows]
        if isinstance(rows[0][name], dict)
        else torch.stack([row[name] for row in rows])
        for name in rows[0]
    }
    if {"input_ids", "pixel_values"} <= batch.keys():
        batch["return_loss"] = True
    return batch
