import math

import torch

from regard.models.build import build_model, resolve
from regard.nn.soft_window import SoftWindow
from regard.nn.state import Source


def test_the_window_is_that_of_the_formula():
    torch.manual_seed(0)
    window = SoftWindow(4, components=2).double()
    h, kappa = torch.randn(2, 4).double(), torch.rand(2, 2).double()
    text, lengths = torch.randn(2, 5, 3).double(), torch.tensor([5, 3])
    w, after = window(h, kappa, text, lengths)
    for row in range(2):
        a, b, d = window.out(h[row]).exp().view(3, 2).tolist()
        moved = [k + step for k, step in zip(kappa[row].tolist(), d, strict=True)]
        assert all(math.isclose(x, y) for x, y in zip(after[row].tolist(), moved, strict=True))
        expected = torch.zeros(3).double()
        for u in range(int(lengths[row])):
            components = zip(a, b, moved, strict=True)
            phi = sum(x * math.exp(-y * (k - u) ** 2) for x, y, k in components)
            expected += phi * text[row, u]
        torch.testing.assert_close(w[row], expected, rtol=0, atol=1e-12)


def test_padding_of_the_text_changes_nothing():
    torch.manual_seed(0)
    table = {"family": "soft_window", "dim": 6, "layers": 3, "components": 3, "vocab_size": 4}
    model = build_model(resolve(table)).eval()
    points, source = (
        torch.randn(2, 6, 5),
        Source(torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([3, 1])),
    )
    short = Source(torch.tensor([[3]]), torch.tensor([1]))
    torch.testing.assert_close(model(points[1:], source=short), model(points, source=source)[1:])
