"""The architectures of `coverage.py`, by family; transformers' are built from configurations that are written here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgevit.sources import RANDOM, Source, load_source


@dataclass(frozen=True)
class Case:
    """One architecture. `source` is what `edgevit export` takes, but for `config:NAME`, which is one of CONFIGS."""

    family: str
    source: str

    @property
    def name(self) -> str:
        return self.source.partition(":")[2]

    def load(self, folder: Path) -> Source:
        """The module with scaled random weights; a configuration is written into `folder` first."""
        if not self.source.startswith("config:"):
            return load_source(self.source, weights=RANDOM)
        path = folder / self.name
        config, architecture = CONFIGS[self.name]()
        config.architectures = [architecture]
        config.save_pretrained(path)
        return load_source(f"hf:{path}", weights=RANDOM)


def _cases() -> list[Case]:
    """Small ones first within a library, since these are done soonest."""
    timm = {
        "mobile CNN": "mobilenetv2_100 mobilenetv3_small_100 mobilenetv3_large_100 mobilenetv4_conv_small mnasnet_100 "
        "fbnetc_100 ghostnet_100 efficientnet_lite0 efficientnet_b0 mobileone_s0",
        "CNN": "regnety_002 resnet18 repvgg_a0 convnext_atto resnet50 resnext50_32x4d",
        "mobile hybrid": "mobilevit_xxs mobilevitv2_050 edgenext_xx_small efficientvit_m0 efficientvit_b0 repvit_m0_9 "
        "fastvit_t8 efficientformer_l1 efficientformerv2_s0 levit_128s tiny_vit_5m_224 mobilenetv4_hybrid_medium",
        "ViT": "vit_tiny_patch16_224 deit_tiny_patch16_224 pit_ti_224 xcit_nano_12_p16_224 cait_xxs24_224 "
        "crossvit_tiny_240 coat_tiny eva02_tiny_patch14_224 vit_small_patch32_224 hiera_tiny_224 "
        "swin_tiny_patch4_window7_224 vit_small_patch14_dinov2",
        "hybrid": "coatnet_nano_rw_224 maxvit_nano_rw_256 poolformer_s12",
        "MLP": "resmlp_12_224 mixer_s32_224",
    }
    torchvision = {
        "CNN": "squeezenet1_1 shufflenet_v2_x1_0 densenet121 googlenet inception_v3 efficientnet_v2_s alexnet "
        "convnext_tiny vgg11",
        "ViT": "swin_t vit_b_32",
    }
    config = {
        "mobile hybrid": "mobilevit",
        "detection": "yolos_tiny detr_resnet50",
        "segmentation": "segformer_b0",
        "text": "bert_small distilbert gpt2",
    }
    libraries = {"timm": timm, "torchvision": torchvision, "config": config}
    return [
        Case(family, f"{library}:{name}")
        for library, families in libraries.items()
        for family, names in families.items()
        for name in names.split()
    ]


def _gpt2() -> tuple[Any, str]:
    from transformers import GPT2Config

    return GPT2Config(), "GPT2LMHeadModel"


def _bert_small() -> tuple[Any, str]:
    from transformers import BertConfig

    sides = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
    return BertConfig(**sides), "BertForSequenceClassification"


def _distilbert() -> tuple[Any, str]:
    from transformers import DistilBertConfig

    return DistilBertConfig(), "DistilBertForSequenceClassification"


def _detr_resnet50() -> tuple[Any, str]:
    from transformers import DetrConfig, ResNetConfig

    backbone = ResNetConfig(out_features=["stage4"])
    config = DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, num_labels=91
    )
    config.image_size = 256
    return config, "DetrForObjectDetection"


def _yolos_tiny() -> tuple[Any, str]:
    from transformers import YolosConfig

    sides = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    return YolosConfig(image_size=[256, 256], num_labels=91, **sides), "YolosForObjectDetection"


def _segformer_b0() -> tuple[Any, str]:
    from transformers import SegformerConfig

    config = SegformerConfig(num_labels=150)
    config.image_size = 256
    return config, "SegformerForSemanticSegmentation"


def _mobilevit() -> tuple[Any, str]:
    from transformers import MobileViTConfig

    return MobileViTConfig(num_labels=1000), "MobileViTForImageClassification"


CONFIGS: dict[str, Callable[[], tuple[Any, str]]] = {
    "gpt2": _gpt2,
    "bert_small": _bert_small,
    "distilbert": _distilbert,
    "detr_resnet50": _detr_resnet50,
    "yolos_tiny": _yolos_tiny,
    "segformer_b0": _segformer_b0,
    "mobilevit": _mobilevit,
}
CASES = {case.source: case for case in _cases()}
