"""`edgevit models`: the paper's figures, for people and for machines."""

import json

import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode
from transformers import MobileViTConfig, MobileViTForImageClassification

from edgevit.cli import main


def test_models_are_listed_with_their_sizes():
    result = CliRunner().invoke(main, ["models"])
    assert result.exit_code == 0, result.output
    head, *rows = [line.split("\t") for line in result.output.splitlines()]
    assert head[0] == "model"
    assert [(row[0], row[1]) for row in rows] == [
        ("mobilevit_xxs", "1.27"),
        ("mobilevit_xs", "2.32"),
        ("mobilevit_s", "5.58"),
    ]


def test_json_for_machines():
    rows = json.loads(CliRunner().invoke(main, ["models", "--json"]).output)
    small = {row["name"]: row for row in rows}["mobilevit_s"]
    assert small["published_top1"] == 78.4
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        reference = MobileViTForImageClassification(MobileViTConfig(num_labels=1000))  # by default, the small one
        reference(torch.empty(1, 3, 256, 256))
    assert small["flops_256"] == counter.get_total_flops()
    assert small["parameters"] == reference.num_parameters()
