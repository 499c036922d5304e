"""Models people have, from `transformers` and `monai`: small configurations, random weights.

Each factory is a target of the command line, for example ::

    tightfit prove benchmarks/real_models.py:llama --budget-ratio 0.6

Sizes are such that activations outweigh gradients, with an eager peak of some 50 to 400 MiB and a
step of a few seconds on one core. Dropout is what each configuration has by default.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tightfit.zoo import Example

__all__ = ["MODELS", "untrained"]

VOCABULARY = 2000
TOKENS = 256
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "use_cache": False,
}
"""The sizes of Llama and its relatives."""


def untrained(name: str, **sizes: Any) -> Any:
    """Return a model of `transformers`, by the name of its class, with random weights."""
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes))


def _language(model: Any, batch: int, tokens: int = TOKENS) -> Example:
    """Return a language model with random tokens as inputs and labels; it makes its own loss."""
    model.train()
    ids = torch.randint(0, VOCABULARY, (batch, tokens))
    return Example(model, None, {"input_ids": ids, "labels": ids.clone()}, None)


def _images(model: Any, batch: int, size: int, labels: int = 10) -> Example:
    """Return an image classifier of `transformers` that makes its own loss."""
    model.train()
    inputs = {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.randint(0, labels, (batch,)),
    }
    return Example(model, None, inputs, None)


def gpt2(batch: int = 4) -> Example:
    """GPT-2, 6 layers, dropout 0.1."""
    model = untrained(
        "GPT2LMHeadModel",
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        n_embd=256,
        n_layer=6,
        n_head=8,
        use_cache=False,
    )
    return _language(model, batch)


def llama(batch: int = 8) -> Example:
    """Llama: rotary embedding, grouped queries, RMSNorm, SwiGLU."""
    return _language(untrained("LlamaForCausalLM", **DECODER), batch)


def mistral(batch: int = 8) -> Example:
    """Mistral: as Llama, with a sliding window shorter than the sequence."""
    return _language(untrained("MistralForCausalLM", **DECODER, sliding_window=128), batch)


def qwen(batch: int = 8) -> Example:
    """Qwen 2: biased projections, tied embedding."""
    return _language(untrained("Qwen2ForCausalLM", **DECODER, tie_word_embeddings=True), batch)


def bert(batch: int = 5) -> Example:
    """BERT with its masked-language-model head and a mask that pads."""
    model = untrained(
        "BertForMaskedLM",
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        intermediate_size=1024,
        max_position_embeddings=TOKENS,
    )
    example = _language(model, batch)
    mask = torch.ones(batch, TOKENS, dtype=torch.long)
    mask[: batch // 2, TOKENS // 2 :] = 0
    return example._replace(args={**example.args, "attention_mask": mask})


def t5(batch: int = 8) -> Example:
    """T5: encoder and decoder, relative positions, labels shifted by the model."""
    model = untrained(
        "T5ForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=4,
        num_heads=8,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model.train()
    ids = torch.randint(0, VOCABULARY, (batch, 128))
    labels = torch.randint(0, VOCABULARY, (batch, 128))
    return Example(model, None, {"input_ids": ids, "labels": labels}, None)


def vit(batch: int = 6) -> Example:
    """ViT, patches of 16."""
    model = untrained(
        "ViTForImageClassification",
        image_size=192,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=1024,
        num_labels=10,
    )
    return _images(model, batch, 192)


def swin(batch: int = 3) -> Example:
    """Swin transformer, tiny widths, shifted windows, stochastic depth."""
    model = untrained(
        "SwinForImageClassification",
        image_size=224,
        embed_dim=48,
        depths=[2, 2, 4, 2],
        num_heads=[2, 4, 8, 16],
        num_labels=10,
    )
    return _images(model, batch, 224)


def convnext(batch: int = 3) -> Example:
    """ConvNeXt with stochastic depth and layer scale."""
    model = untrained(
        "ConvNextForImageClassification",
        hidden_sizes=[48, 96, 192, 384],
        depths=[2, 2, 4, 2],
        num_labels=10,
        drop_path_rate=0.1,
    )
    return _images(model, batch, 192)


def whisper(batch: int = 3) -> Example:
    """Whisper: convolutions over a spectrogram, encoder and decoder."""
    model = untrained(
        "WhisperForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=192,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=768,
        decoder_ffn_dim=768,
        max_source_positions=400,
        max_target_positions=128,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
        dropout=0.1,
        use_cache=False,
    )
    model.train()
    inputs = {
        "input_features": torch.randn(batch, model.config.num_mel_bins, 800),
        "labels": torch.randint(4, VOCABULARY, (batch, 128)),
    }
    return Example(model, None, inputs, None)


def clip(batch: int = 6) -> Example:
    """CLIP: two towers and their contrastive loss."""
    shared = {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 6}
    model = untrained(
        "CLIPModel",
        text_config={
            **shared,
            "num_hidden_layers": 4,
            "vocab_size": VOCABULARY,
            "eos_token_id": VOCABULARY - 1,
        },
        vision_config={**shared, "num_hidden_layers": 6, "image_size": 160, "patch_size": 16},
        projection_dim=128,
    )
    model.train()
    ids = torch.randint(0, VOCABULARY - 1, (batch, 64))
    ids[:, -1] = VOCABULARY - 1
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(batch, 3, 160, 160),
        "return_loss": True,
    }
    return Example(model, None, inputs, None)


def mixtral(batch: int = 3) -> Example:
    """Mixtral: a mixture of 4 experts, 2 for each token."""
    model = untrained(
        "MixtralForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
        use_cache=False,
        output_router_logits=True,
    )
    return _language(model, batch)


def m2m100(batch: int = 4) -> Example:
    """M2M-100: layers of encoder and decoder left out at random, so that no one graph holds."""
    model = untrained(
        "M2M100ForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=128,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_position_embeddings=TOKENS,
        decoder_start_token_id=2,
        use_cache=False,
    )
    model.train()
    ids = torch.randint(4, VOCABULARY, (batch, 128))
    return Example(model, None, {"input_ids": ids, "labels": ids.clone()}, None)


def wav2vec2_ctc(batch: int = 2) -> Example:
    """Wav2Vec 2 with its CTC loss, every layer run and nothing masked."""
    model = untrained(
        "Wav2Vec2ForCTC",
        vocab_size=40,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        conv_dim=[64, 64, 64],
        conv_stride=[5, 4, 2],
        conv_kernel=[10, 4, 3],
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.0,
        apply_spec_augment=False,
    )
    model.train()
    inputs = {"input_values": torch.randn(batch, 8000), "labels": torch.randint(1, 40, (batch, 20))}
    return Example(model, None, inputs, None)


def monai_unet(batch: int = 3) -> Example:
    """MONAI's residual 3D U-Net, instance norms and PReLU, with a cross-entropy of voxels."""
    from monai.networks.nets import UNet

    model = UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=3,
        channels=(12, 24, 48, 96),
        strides=(2, 2, 2),
        num_res_units=2,
        dropout=0.1,
    ).train()
    return Example(
        model,
        F.cross_entropy,
        (torch.randn(batch, 1, 64, 64, 64),),
        torch.randint(0, 3, (batch, 64, 64, 64)),
    )


def monai_densenet(batch: int = 8) -> Example:
    """MONAI's DenseNet: concatenations of everything before."""
    from monai.networks.nets import DenseNet

    model = DenseNet(
        spatial_dims=2,
        in_channels=3,
        out_channels=10,
        init_features=32,
        growth_rate=16,
        block_config=(4, 8, 8, 4),
        dropout_prob=0.1,
    ).train()
    images, classes = torch.randn(batch, 3, 128, 128), torch.randint(0, 10, (batch,))
    return Example(model, F.cross_entropy, (images,), classes)


def monai_swin_unetr(batch: int = 1) -> Example:
    """MONAI's SwinUNETR: a Swin encoder and a convolutional decoder in 3D."""
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(
        in_channels=1, out_channels=3, feature_size=12, drop_rate=0.1, spatial_dims=3
    ).train()
    return Example(
        model,
        F.cross_entropy,
        (torch.randn(batch, 1, 64, 64, 64),),
        torch.randint(0, 3, (batch, 64, 64, 64)),
    )


MODELS = (
    gpt2,
    llama,
    mistral,
    qwen,
    bert,
    t5,
    vit,
    swin,
    convnext,
    whisper,
    clip,
    mixtral,
    m2m100,
    wav2vec2_ctc,
    monai_unet,
    monai_densenet,
    monai_swin_unetr,
)
