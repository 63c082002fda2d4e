"""Vision Transformers (Dosovitskiy et al. 2020), and a tiny one for a CPU."""

from dataclasses import replace

from regard.models.vision import VisionConfig


def _vit(dim: int, layers: int, heads: int, patch_size: int) -> VisionConfig:
    """Table 1 of the paper, with the linear head of the models fine-tuned on ImageNet-1k.

    Images of 224 × 224, as in pretraining; GELU and norms with eps 1e-6 as in the authors' code.
    """
    return VisionConfig(
        dim=dim,
        layers=layers,
        heads=heads,
        patch_size=patch_size,
        norm_eps=1e-6,
        head={"kind": "classification", "classes": 1000},
    )


def vit_b16() -> VisionConfig:
    """ViT-B/16, 86 M in the paper."""
    return _vit(768, 12, 12, 16)


def vit_l16() -> VisionConfig:
    """ViT-L/16, 307 M in the paper; the released weights have 304 M, as here."""
    return _vit(1024, 24, 16, 16)


def vit_h14() -> VisionConfig:
    """ViT-H/14, 632 M in the paper."""
    return _vit(1280, 32, 16, 14)


def tiny_vit() -> VisionConfig:
    """A ViT that a laptop's CPU trains in minutes on images as small as MNIST's.

    16 patches and dim 96 reach a lower loss in the same CPU time than 49 patches and dim 64. The
    head averages the patches.
    """
    return replace(
        _vit(96, 4, 3, 7),
        image_size=28,
        channels=1,
        cls=False,
        head={"kind": "classification", "classes": 10, "pool": "mean"},
        norm_eps=1e-5,
    )
