"""Image captioning models."""

from regard.models.captioner import CaptionerConfig, RecurrentCaptionerConfig


def tiny_captioner() -> CaptionerConfig:
    """A Transformer for captions of small images, trained in minutes."""
    return CaptionerConfig(
        vocab_size=2000,
        dim=128,
        layers=2,
        encoder_layers=1,
        heads=4,
        position="learned",
        context=64,
        image_size=64,
        patch_size=8,
    )


def show_attend_tell() -> RecurrentCaptionerConfig:
    """An LSTM with soft attention over 14 × 14 regions of 512 features (Xu et al. 2015).

    `model.hard_attention` makes the attention hard. The paper's features are those of a trained
    VGG network; here convolutions are trained with the decoder.
    """
    return RecurrentCaptionerConfig(
        vocab_size=10_000,
        dim=512,
        image_size=224,
        patch_size=16,
        context=256,
        dropout=0.5,
        tied=False,
    )
