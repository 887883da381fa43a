"""Tiny random page-image retrievers (world M), built from configurations: no Hub."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

HIDDEN, PATCH = 32, 14


def byte_tokenizer(special: list[str], **names: object) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: it reads any text, and has the special tokens first."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    alphabet = ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], BpeTrainer(special_tokens=special, initial_alphabet=alphabet, vocab_size=300, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=256, **names)


def save_colpali(folder: Path) -> None:
    from transformers import (
        ColPaliConfig,
        ColPaliForRetrieval,
        ColPaliProcessor,
        GemmaConfig,
        PaliGemmaConfig,
        SiglipImageProcessor,
        SiglipVisionConfig,
    )

    size = 4 * PATCH
    tokenizer = byte_tokenizer(
        ["<pad>", "<eos>", "<bos>", "<unk>", "<image>"],
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )
    images = SiglipImageProcessor(size={"height": size, "width": size})
    images.image_seq_length = (size // PATCH) ** 2
    processor = ColPaliProcessor(images, tokenizer)  # adds tokens, so the vocabulary is counted after it
    vision = SiglipVisionConfig(
        vision_use_head=False,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=size,
        patch_size=PATCH,
    )
    text = GemmaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    vlm = PaliGemmaConfig(
        vision_config=vision,
        text_config=text,
        projection_dim=HIDDEN,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    ColPaliForRetrieval(ColPaliConfig(vlm_config=vlm, embedding_dim=8)).save_pretrained(folder)
    processor.save_pretrained(folder)


def save_colqwen2(folder: Path) -> None:
    from transformers import (
        ColQwen2Config,
        ColQwen2ForRetrieval,
        ColQwen2Processor,
        Qwen2VLConfig,
        Qwen2VLImageProcessor,
    )

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    special += ["<|image_pad|>", "<|video_pad|>"]
    tokenizer = byte_tokenizer(special, pad_token="<|endoftext|>", eos_token="<|im_end|>", unk_token="<|endoftext|>")
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    images = Qwen2VLImageProcessor(
        patch_size=PATCH, merge_size=2, temporal_patch_size=2, min_pixels=4 * PATCH**2, max_pixels=36 * PATCH**2
    )
    processor = ColQwen2Processor(images, tokenizer)
    vlm = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN,
            "intermediate_size": HIDDEN,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 1,
            "embed_dim": HIDDEN,
            "hidden_size": HIDDEN,
            "num_heads": 2,
            "mlp_ratio": 1,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    ColQwen2ForRetrieval(ColQwen2Config(vlm_config=vlm, embedding_dim=8)).save_pretrained(folder)
    processor.save_pretrained(folder)


def page_retriever(family: str, folder: Path):
    """The family's tiny random model as a MultiVectorEncoder."""
    from sentence_transformers import MultiVectorEncoder

    torch.manual_seed(0)
    {"colpali": save_colpali, "colqwen2": save_colqwen2}[family](folder)
    return MultiVectorEncoder(str(folder), device="cpu")


def page(text: str, size: tuple[int, int]) -> Image.Image:
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).multiline_text((4, 4), text, fill="black")
    return image
