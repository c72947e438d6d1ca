"""Rewrites before conversion: the same function in other operations, whoever wrote the module."""

import pytest
import torch
from export_models import Small, lively
from torch import nn

from converters.equivalence import exchange
from converters.errors import EdgeVitError
from converters.rewrite import REWRITES, Rewrite, prepare
from edgevit.models.registry import create_model


def fold_batch_norm(module, example):
    return prepare(module, "onnx", example, rewrites=["fold_batch_norm"])


def norms(module):
    return [name for name, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def run(module, *inputs):
    with torch.no_grad():
        return module.eval()(*inputs)


def randomised(module):
    torch.manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(layer.running_mean)
            nn.init.uniform_(layer.running_var, 0.5, 2)
            if layer.affine:
                nn.init.uniform_(layer.weight, 0.5, 2)
                nn.init.normal_(layer.bias)
    return module.eval()


@pytest.mark.parametrize(("build", "side"), [(Small, 32), (lambda: create_model("mobilevit_xxs", 10), 64)])
def test_every_norm_is_folded_and_nothing_changes(build, side):
    torch.manual_seed(0)
    module = lively(build(), torch.rand(8, 3, side, side))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    folded = fold_batch_norm(module, (torch.rand(1, 3, side, side),))
    assert norms(module)
    assert not norms(folded)
    image = torch.rand(3, 3, side + 32, side)  # another size and batch than the one that was traced
    expected = run(module, image)
    assert (run(folded, image) - expected).abs().max() < 1e-5 * expected.std()
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


class Wired(nn.Module):
    """Convolutions whose norm may not be folded, and one whose norm may."""

    def __init__(self):
        super().__init__()
        self.read_twice, self.read_twice_norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.read_aside, self.read_aside_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.used_twice = nn.Conv2d(4, 4, 1)
        self.used_twice_norm = nn.BatchNorm2d(4)
        self.tied, self.tied_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.twin = nn.Conv2d(4, 4, 1)
        self.twin.weight = self.tied.weight
        self.up, self.up_norm = nn.ConvTranspose2d(4, 4, 2), nn.BatchNorm2d(4)
        self.before, self.fine, self.fine_norm = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, affine=False)

    def forward(self, x):
        y = self.read_twice(x)
        x = self.read_twice_norm(y) + y
        x = self.read_aside_norm(self.read_aside(x)) + self.read_aside.weight.sum()
        x = self.used_twice_norm(self.used_twice(self.used_twice(x).sigmoid()))
        x = self.tied_norm(self.tied(x)).sigmoid() + self.twin(x)
        x = self.up_norm(self.up(x)).sigmoid()
        return self.fine_norm(self.fine(self.before(x)))


def test_only_what_may_be_folded_is_folded():
    module = randomised(Wired())
    folded = fold_batch_norm(module, (torch.rand(1, 3, 8, 8),))
    assert set(norms(module)) - set(norms(folded)) == {"fine_norm"}
    image = torch.rand(2, 3, 12, 8)
    torch.testing.assert_close(run(folded, image), run(module, image), rtol=0, atol=1e-5)


class ActingNorm(nn.BatchNorm2d):
    """A norm that does more, as timm's do: dropping it would drop its activation."""

    def forward(self, x):
        return super().forward(x).relu()


def test_a_norm_that_does_more_is_left():
    module = randomised(nn.Sequential(nn.Conv2d(3, 4, 3), ActingNorm(4)))
    folded = fold_batch_norm(module, (torch.rand(1, 3, 8, 8),))
    assert norms(folded) == ["1"]
    image = torch.rand(1, 3, 8, 8)
    assert torch.equal(run(folded, image), run(module, image))


class Untraceable(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * float(x.sum())


def test_a_module_that_cannot_be_traced_is_left_as_it_is():
    module = randomised(Untraceable(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    folded = fold_batch_norm(module, (torch.rand(1, 3, 8, 8),))
    assert norms(folded) == ["1"]
    assert folded is not module


class JointAttention(nn.Module):
    """As timm's `Attention`, with what some of its relatives add."""

    def __init__(self, dim=16, num_heads=4, norm=None, bias=True):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=bias), nn.Linear(dim, dim)
        self.q_norm = norm or nn.Identity()

    def forward(self, x, attn_mask=None):
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(self.q_norm(query), key, value, attn_mask)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mask=None, **options):
        super().__init__()
        self.norm, self.attention, self.mask = nn.LayerNorm(16), JointAttention(**options), mask

    def forward(self, x):
        return x + self.attention(self.norm(x), attn_mask=self.mask)


@pytest.mark.parametrize("bias", [True, False])
def test_joint_attention_is_taken_apart_and_nothing_changes(bias):
    torch.manual_seed(0)
    module = Block(bias=bias).eval()
    split = prepare(module, "onnx", (torch.rand(1, 5, 16),), rewrites=["split_qkv"])
    assert not any(name.endswith("qkv") for name, _ in split.named_modules())
    assert any(name.endswith("qkv") for name, _ in module.named_modules())
    x = torch.rand(3, 9, 16)  # another batch and length than it was tried with
    torch.testing.assert_close(run(split, x), run(module, x), rtol=0, atol=2e-6)


@pytest.mark.parametrize("options", [{"norm": nn.LayerNorm(4)}, {"mask": torch.eye(5).bool()}])
def test_attention_that_does_more_is_left(options):
    torch.manual_seed(0)
    module = Block(**options).eval()
    split = prepare(module, "onnx", (torch.rand(1, 5, 16),), rewrites=["split_qkv"])
    assert "attention.qkv" in dict(split.named_modules())


def test_layer_norms_are_spelt_out_and_nothing_changes():
    torch.manual_seed(0)
    module = Block().eval()
    nn.init.normal_(module.norm.weight)
    nn.init.normal_(module.norm.bias)
    spelt = prepare(module, "tflite", (torch.rand(1, 5, 16),), rewrites=["spell_out_layer_norm"])
    assert not any(isinstance(layer, nn.LayerNorm) for layer in spelt.modules())
    x = torch.rand(3, 9, 16)
    torch.testing.assert_close(run(spelt, x), run(module, x), rtol=0, atol=5e-6)


def test_a_rewrite_that_changes_an_output_is_left_out(monkeypatch):
    def worse(module, form, example):
        module[0].weight.data.mul_(1.0001)
        return module

    monkeypatch.setitem(REWRITES, "worse", Rewrite(worse, frozenset({"onnx"})))
    module = nn.Sequential(nn.Linear(8, 8)).eval()
    x = torch.rand(1, 8)
    assert torch.equal(run(prepare(module, "onnx", (x,)), x), run(module, x))


@pytest.mark.parametrize("outputs", [lambda x: (x, x), lambda x: {}[x]])
def test_a_rewrite_that_returns_or_raises_something_else_is_left_out(outputs, monkeypatch):
    class Other(nn.Module):
        def forward(self, x):
            return outputs(x)

    monkeypatch.setitem(REWRITES, "other", Rewrite(lambda *_: Other(), frozenset()))
    module = nn.Linear(4, 3)
    assert type(prepare(module, "onnx", (torch.rand(1, 4),), rewrites=["other"])) is nn.Linear


class Box:
    """What a submodule hands on, in a class of its own: nothing that could be compared."""

    def __init__(self, value):
        self.value = value


class Boxing(nn.Module):
    def forward(self, x):
        return Box(x)


class Boxed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Boxing()

    def forward(self, x):
        return self.inner(x).value


def test_a_submodule_whose_output_cannot_be_compared_is_not_exchanged():
    class Doubling(nn.Module):
        def forward(self, x):
            return Box(2 * x)

    module = Boxed()
    assert not exchange(module, (torch.rand(1, 4),), lambda layer, _: Doubling())
    assert type(module.inner) is Boxing


def test_what_pays_is_tried_where_it_pays_and_names_are_checked(monkeypatch):
    tried = []
    monkeypatch.setitem(REWRITES, "seen", Rewrite(lambda *arguments: tried.append(arguments[1]), frozenset({"tflite"})))
    module, x = nn.Linear(8, 8).eval(), torch.rand(1, 8)
    prepare(module, "onnx", (x,))
    prepare(module, "tflite", (x,))
    prepare(module, "tflite", (x,), rewrites=[])
    prepare(module, "coreml", (x,), rewrites=["seen"])
    assert tried == ["tflite", "coreml"]
    with pytest.raises(EdgeVitError, match="unknown rewrite 'fold'; there are export_form, fold_batch_norm"):
        prepare(module, "onnx", (x,), rewrites=["fold"])
