"""Models of other kinds than pictures' classifiers, from random weights, in fp32: our Core ML export against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from converters.coreml_program import trace, write
from converters.mil import Program
from converters.signature import Signature, Size, TensorSpec


class Outputs(nn.Module):
    """A transformers model that gives its outputs of those names, and nothing else."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = self.model(x)
        return tuple(found[name] for name in self.names)


class Translator(nn.Module):
    """An encoder and a decoder that sees no token after its own."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(32, 4, 1, 1, 48, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return (self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True),)


class Seq2Seq(nn.Module):
    """A bidirectional LSTM, and an LSTM cell that attends to it at each of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.encoder = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.cell, self.out = nn.LSTMCell(24, 16), nn.Linear(32, 30)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor]:
        memory, _ = self.encoder(self.embedding(source))
        hidden = cell = context = memory.mean(1)
        logits = []
        for token in self.embedding(target).unbind(1):
            hidden, cell = self.cell(torch.cat((token, context), -1), (hidden, cell))
            weights = (memory @ hidden[..., None]).softmax(1)
            context = (weights * memory).sum(1)
            logits.append(self.out(torch.cat((hidden, context), -1)))
        return (torch.stack(logits, 1),)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=99, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False)
    return Outputs(transformers.GPT2LMHeadModel(config), "logits")


def detr() -> nn.Module:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_queries=7,
    )
    return Outputs(transformers.DetrForObjectDetection(config), "logits", "pred_boxes")


def dinov2() -> nn.Module:
    """Made for pictures of 56, run at 70 × 84: its position table is resized."""
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=56, patch_size=14
    )
    return Outputs(transformers.Dinov2Model(config), "last_hidden_state")


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
    "gpt2": (gpt2, lambda: [torch.randint(99, (1, 12))]),
    "detr": (detr, lambda: [torch.randn(1, 3, 64, 96)]),
    "dinov2": (dinov2, lambda: [torch.randn(1, 3, 70, 84)]),
    "encoder-decoder": (Translator, lambda: [torch.randn(1, 9, 32), torch.randn(1, 6, 32)]),
    "lstm seq2seq": (Seq2Seq, lambda: [torch.randint(30, (1, 8)), torch.randint(30, (1, 3))]),
}


def lively(module: nn.Module) -> nn.Module:
    """With weights whose outputs depend on the inputs; models begin with ones that hardly do."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return module.eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_keeps_its_meaning(name, tmp_path):
    torch.manual_seed(0)
    make, examples = MODELS[name]
    module = lively(make())
    one, other = (examples() for _ in range(2))
    with torch.no_grad():
        expected, different = module(*one), module(*other)
    signature = Signature(
        tuple(TensorSpec(f"x{i}", x.shape, _dtype(x)) for i, x in enumerate(one)),
        tuple(TensorSpec(f"y{i}", y.shape) for i, y in enumerate(expected)),
    )
    write(trace(module, signature, Size(()), 1), tmp_path / "m.mlpackage", target="ios16", half=False)
    program = Program(tmp_path / "m.mlpackage")
    kinds: dict[str, Any] = program.inputs()
    found = program.run({f"x{i}": x.numpy().astype(kinds[f"x{i}"].dtype) for i, x in enumerate(one)})
    for array, tensor, another in zip(found.values(), expected, different, strict=True):
        std = float(tensor.std())
        assert abs(tensor - another).max() > 0.1 * std, "outputs that do not depend on the inputs prove nothing"
        print(f"{name}: max |difference| / std = {abs(array - tensor.numpy()).max() / std:.1e}")
        np.testing.assert_allclose(array, tensor.numpy(), atol=1e-4 * std)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
