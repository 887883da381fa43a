"""Page-image retrievers with random weights, small enough for a CPU, made without the Hub.

They have the architecture, the processor and the file formats of the real ones, so a recipe that runs with one runs
with the other; they know nothing, and can only learn by heart. Of the real models' processors they lack the tokenizer:
theirs spells bytes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

HIDDEN, LAYERS, HEADS = 64, 2, 2
PATCH, PATCHES = 28, 8  # pixels of a patch, patches along a page's side
EMBEDDING = 32
TOWER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "initializer_range": 0.1,  # pages are mostly white: at the usual 0.02 all look the same for many steps
}


def save_tiny_colpali(folder: Path) -> None:
    """ColPali: a SigLIP tower, its patches in front of a Gemma that sees all of them at once."""
    from transformers import (
        ColPaliConfig,
        ColPaliForRetrieval,
        ColPaliProcessor,
        GemmaConfig,
        PaliGemmaConfig,
        SiglipImageProcessor,
        SiglipVisionConfig,
    )

    tokenizer = byte_tokenizer(
        ["<pad>", "<eos>", "<bos>", "<unk>", "<image>"],
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )
    size = PATCH * PATCHES
    images = SiglipImageProcessor(size={"height": size, "width": size})
    images.image_seq_length = PATCHES**2
    processor = ColPaliProcessor(images, tokenizer)  # it adds tokens, so the vocabulary is counted after it
    config = PaliGemmaConfig(
        vision_config=SiglipVisionConfig(**TOWER, image_size=size, patch_size=PATCH, vision_use_head=False),
        text_config=GemmaConfig(
            **TOWER,
            vocab_size=len(tokenizer),
            num_key_value_heads=1,
            head_dim=HIDDEN // HEADS,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
        ),
        projection_dim=HIDDEN,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    ColPaliForRetrieval(ColPaliConfig(vlm_config=config, embedding_dim=EMBEDDING)).save_pretrained(folder)
    processor.save_pretrained(folder)


def save_tiny_colqwen2(folder: Path) -> None:
    """ColQwen2: pages keep their shape, so each has its own number of patches; four become one token."""
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
    ids = dict(zip(special, tokenizer.convert_tokens_to_ids(special), strict=True))
    images = Qwen2VLImageProcessor(
        patch_size=PATCH,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=16 * PATCH**2,
        max_pixels=(PATCHES * PATCH) ** 2,
    )
    processor = ColQwen2Processor(images, tokenizer)
    config = Qwen2VLConfig(
        text_config={
            **TOWER,
            "vocab_size": len(tokenizer),
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        },
        vision_config={
            "depth": LAYERS,
            "initializer_range": TOWER["initializer_range"],
            "embed_dim": HIDDEN,
            "hidden_size": HIDDEN,
            "num_heads": HEADS,
            "mlp_ratio": 2,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    ColQwen2ForRetrieval(ColQwen2Config(vlm_config=config, embedding_dim=EMBEDDING)).save_pretrained(folder)
    processor.save_pretrained(folder)


def save_tiny_colmodernvbert(folder: Path) -> None:
    """ColModernVBert: a SigLIP tower, four patches to a token, and a ModernBERT."""
    from transformers import (
        ColModernVBertConfig,
        ColModernVBertForRetrieval,
        ColModernVBertProcessor,
        Idefics3ImageProcessor,
        ModernBertConfig,
        ModernVBertConfig,
        SiglipVisionConfig,
    )

    special = ["<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<image>", "<fake_token_around_image>"]
    special += ["<end_of_utterance>", "<global-img>", "<|begin_of_text|>"]
    special += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = byte_tokenizer(
        special, pad_token="<pad>", unk_token="<unk>", cls_token="<cls>", sep_token="<sep>", mask_token="<mask>"
    )
    ids = dict(zip(special, tokenizer.convert_tokens_to_ids(special), strict=True))
    size, side = PATCH * PATCHES, 2  # patches along a side of those that become one token
    longest = {"longest_edge": size}
    images = Idefics3ImageProcessor(size=longest, max_image_size=longest, do_image_splitting=False)
    processor = ColModernVBertProcessor(images, tokenizer, image_seq_len=(PATCHES // side) ** 2)
    config = ModernVBertConfig(
        vision_config=SiglipVisionConfig(**TOWER, image_size=size, patch_size=PATCH, vision_use_head=False),
        text_config=ModernBertConfig(
            **TOWER,
            vocab_size=len(tokenizer),
            pad_token_id=ids["<pad>"],
            bos_token_id=ids["<cls>"],
            eos_token_id=ids["<sep>"],
            cls_token_id=ids["<cls>"],
            sep_token_id=ids["<sep>"],
        ),
        image_token_id=ids["<image>"],
        pixel_shuffle_factor=side,
        initializer_range=TOWER["initializer_range"],
    )
    ColModernVBertForRetrieval(ColModernVBertConfig(vlm_config=config, embedding_dim=EMBEDDING)).save_pretrained(
        folder
    )
    processor.save_pretrained(folder)


TINY_MODELS = {
    "tiny-colpali": save_tiny_colpali,
    "tiny-colqwen2": save_tiny_colqwen2,
    "tiny-colmodernvbert": save_tiny_colmodernvbert,
}


def make_tiny_model(name: str, folder: Path, seed: int) -> str:
    """Save one of `TINY_MODELS`, the same weights for the same seed, and return its folder."""
    torch.manual_seed(seed)
    TINY_MODELS[name](folder)
    return str(folder)


def byte_tokenizer(special: list[str], **names: object) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: it reads any text, and has the special tokens first."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        special_tokens=special, initial_alphabet=ByteLevel.alphabet(), vocab_size=300, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names)
