"""The Transformer: inputs that do not fit its architecture."""

import pytest
import torch

from regard.errors import ConfigError
from regard.models.build import build_model, preset
from regard.nn.state import Source


@pytest.mark.parametrize("name", ["tiny-decoder", "tiny-encoder"])
def test_a_model_of_one_stack_takes_no_source(name):
    model = build_model(preset(name, vocab_size=9, dim=8, layers=1, heads=2))
    ids = torch.tensor([[1, 2]])
    source = Source(ids, torch.tensor([2]))
    with pytest.raises(ConfigError, match="takes no source; an encoder-decoder does"):
        model(ids, source=source)
    if name == "tiny-decoder":
        with pytest.raises(ConfigError, match="takes no source; an encoder-decoder does"):
            model.start(1, 4, source)
