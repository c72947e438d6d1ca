"""Where timm, Hugging Face and CVNets keep MobileViT's weights, and the preprocessing each of them trained with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from converters.artifact import Preprocessing

STEM = "stem.conv.weight"  # (16, 3, 3, 3): the one weight that knows the order of the colours
CLASSIFIER = ("classifier.weight", "classifier.bias")


@dataclass(frozen=True)
class Layout:
    """One library's names. `rules` are regular expressions with replacements, applied in order to every key."""

    name: str
    mark: str  # a key (as a regular expression) that no other layout has
    rules: tuple[tuple[str, str], ...]
    channel_order: str  # of the pictures that its published weights were trained on
    preprocessing: Preprocessing  # of its published weights, but for the order of the channels

    def recognises(self, keys: Mapping[str, Tensor]) -> bool:
        return any(re.fullmatch(self.mark, key) for key in keys)

    def rename(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors under our names; a joint `qkv` (3d, …) becomes query, key and value (d, …)."""
        renamed: dict[str, Tensor] = {}
        for key, tensor in state.items():
            for pattern, replacement in self.rules:
                key = re.sub(pattern, replacement, key)
            if ".qkv." in key:
                for part, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                    renamed[key.replace(".qkv.", f".{part}.")] = piece
            else:
                renamed[key] = tensor
        return renamed


OWN = Layout(
    name="edgevit",
    mark=r"stage1\.0\.expand\.conv\.weight",
    rules=(),
    channel_order="RGB",
    preprocessing=Preprocessing(),
)

TIMM = Layout(
    name="timm",
    mark=r"stages\.0\.0\.conv1_1x1\.conv\.weight",
    rules=(
        (r"\.bn\.", ".norm."),
        (r"^stages\.0\.", "stage1."),
        (r"^stages\.1\.", "stage2."),
        (r"^stages\.2\.", "stage3."),
        (r"^stages\.3\.", "stage4."),
        (r"^stages\.4\.", "stage5."),
        (r"\.conv1_1x1\.", ".expand."),
        (r"\.conv2_kxk\.", ".depthwise."),
        (r"\.conv3_1x1\.", ".project."),
        (r"\.conv_kxk\.", ".local_conv."),
        (r"\.conv_1x1\.", ".to_tokens."),
        (r"\.transformer\.(\d+)\.norm1\.", r".layers.\1.attention_norm."),
        (r"\.transformer\.(\d+)\.norm2\.", r".layers.\1.mlp_norm."),
        (r"\.transformer\.(\d+)\.attn\.proj\.", r".layers.\1.attention.out."),
        (r"\.transformer\.(\d+)\.attn\.", r".layers.\1.attention."),
        (r"\.transformer\.(\d+)\.mlp\.fc1\.", r".layers.\1.mlp.0."),
        (r"\.transformer\.(\d+)\.mlp\.fc2\.", r".layers.\1.mlp.3."),
        (r"\.conv_proj\.", ".from_tokens."),
        (r"\.conv_fusion\.", ".fuse."),
        (r"^final_conv\.", "head_conv."),
        (r"^head\.fc\.", "classifier."),
    ),
    channel_order="RGB",  # timm turned the stem round when it converted CVNets' weights
    preprocessing=Preprocessing(size="256", crop_fraction=0.9, interpolation="bicubic"),
)

HUGGING_FACE = Layout(
    name="Hugging Face",
    mark=r"(mobilevit\.)?conv_stem\.convolution\.weight",
    rules=(
        (r"^mobilevit\.", ""),
        (r"\.conv_1x1\.convolution\.", ".to_tokens."),
        (r"\.convolution\.", ".conv."),
        (r"\.normalization\.", ".norm."),
        (r"^conv_stem\.", "stem."),
        (r"^encoder\.layer\.0\.layer\.", "stage1."),
        (r"^encoder\.layer\.1\.layer\.", "stage2."),
        (r"^encoder\.layer\.([234])\.downsampling_layer\.", r"encoder.\1.0."),
        (r"^encoder\.layer\.([234])\.", r"encoder.\1.1."),
        (r"^encoder\.2\.", "stage3."),
        (r"^encoder\.3\.", "stage4."),
        (r"^encoder\.4\.", "stage5."),
        (r"\.expand_1x1\.", ".expand."),
        (r"\.conv_3x3\.", ".depthwise."),
        (r"\.reduce_1x1\.", ".project."),
        (r"\.conv_kxk\.", ".local_conv."),
        (r"\.transformer\.layer\.", ".layers."),
        (r"\.layernorm_before\.", ".attention_norm."),
        (r"\.layernorm_after\.", ".mlp_norm."),
        (r"\.layernorm\.", ".norm."),
        (r"\.attention\.attention\.", ".attention."),
        (r"\.attention\.output\.dense\.", ".attention.out."),
        (r"\.intermediate\.dense\.", ".mlp.0."),
        (r"\.output\.dense\.", ".mlp.3."),
        (r"\.conv_projection\.", ".from_tokens."),
        (r"\.fusion\.", ".fuse."),
        (r"^conv_1x1_exp\.", "head_conv."),
    ),
    channel_order="BGR",
    preprocessing=Preprocessing(size="256", crop_fraction=256 / 288, interpolation="bilinear"),
)

CVNETS = Layout(
    name="CVNets",
    mark=r"conv_1\.block\.conv\.weight",
    rules=(
        (r"\.local_rep\.conv_1x1\.block\.conv\.", ".to_tokens."),
        (r"\.block\.(conv|norm)\.", r".\1."),
        (r"^conv_1\.", "stem."),
        (r"^layer_(\d)\.", r"stage\1."),
        (r"\.block\.exp_1x1\.", ".expand."),
        (r"\.block\.conv_3x3\.", ".depthwise."),
        (r"\.block\.red_1x1\.", ".project."),
        (r"\.local_rep\.conv_3x3\.", ".local_conv."),
        (r"\.global_rep\.(\d+)\.pre_norm_mha\.0\.", r".layers.\1.attention_norm."),
        (r"\.global_rep\.(\d+)\.pre_norm_mha\.1\.out_proj\.", r".layers.\1.attention.out."),
        (r"\.global_rep\.(\d+)\.pre_norm_mha\.1\.qkv_proj\.", r".layers.\1.attention.qkv."),
        (r"\.global_rep\.(\d+)\.pre_norm_ffn\.0\.", r".layers.\1.mlp_norm."),
        (r"\.global_rep\.(\d+)\.pre_norm_ffn\.1\.", r".layers.\1.mlp.0."),
        (r"\.global_rep\.(\d+)\.pre_norm_ffn\.4\.", r".layers.\1.mlp.3."),
        (r"\.global_rep\.\d+\.(weight|bias)$", r".norm.\1"),
        (r"\.conv_proj\.", ".from_tokens."),
        (r"\.fusion\.", ".fuse."),
        (r"^conv_1x1_exp\.", "head_conv."),
        (r"^classifier\.fc\.", "classifier."),
    ),
    # CVNets 0.1, which trained the published MobileViT weights, read pictures with OpenCV (BGR); later versions read
    # them with PIL (RGB) and name the weights alike, so theirs need `channel_order="RGB"`.
    channel_order="BGR",
    preprocessing=Preprocessing(size="256", crop_fraction=256 / 288, interpolation="bilinear"),
)

LAYOUTS = (OWN, TIMM, HUGGING_FACE, CVNETS)
