"""Exported files beside what one would use instead, from the same weights, alternating in one run.

    python benchmarks/export_latency.py      # MobileViT XXS and S beside timm's, both runtimes
    python benchmarks/export_latency.py --models mobilevit_xs --peer transformers --threads 1,2
    python benchmarks/export_latency.py --models timm:deit_tiny_patch16_224 --size 224    # beside its own usual route
    python benchmarks/export_latency.py --peer without:export_form       # what one rewrite pays

The peer goes the usual way: `torch.onnx.export(dynamo=True)` or `litert_torch.convert`. Weights are random, scaled so
that no branch is dead (`edgevit.sources.random_weights`). Prints the median of paired ratios (the peer's time / ours:
above 1 ours is faster) with its 95 % bootstrap interval, how far our time is from the roof (that many FLOPs at the
rate of a large matrix product in ONNX Runtime, measured in the same run), what the files hold, and their bytes. Files
are kept in --work, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from ai_edge_litert.interpreter import Interpreter
from safetensors.torch import save_file
from torch import nn

import converters
from converters.flops import count_flops
from converters.quiet import quiet
from converters.rewrite import REWRITES
from converters.signature import Size
from edgevit.models.registry import list_models
from edgevit.samples import sample_inputs
from edgevit.sources import Source, load_source
from edgevit.sources.library import picture_batch
from edgevit.sources.random_weights import scale_weights

RUNTIMES = {"onnxruntime": "onnx", "litert": "tflite"}
SUFFIXES = {"onnx": ".onnx", "tflite": ".tflite"}
ROOF_SIDE = 1024
HUGGING_FACE = {
    "mobilevit_xxs": {
        "hidden_sizes": [64, 80, 96],
        "neck_hidden_sizes": [16, 16, 24, 48, 64, 80, 320],
        "expand_ratio": 2.0,
    },
    "mobilevit_xs": {"hidden_sizes": [96, 120, 144], "neck_hidden_sizes": [16, 32, 48, 64, 80, 96, 384]},
    "mobilevit_s": {"hidden_sizes": [144, 192, 240], "neck_hidden_sizes": [16, 32, 64, 96, 128, 160, 640]},
}
Run = Callable[[], None]


class Logits(nn.Module):
    """A transformers classifier that returns a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.model(image).logits


def subjects(name: str, peer: str, work: Path) -> tuple[Source, nn.Module]:
    """Our source, and the module that the peer exports: another library's of the same weights, or the very same."""
    if name not in list_models():
        source = load_source(name, weights="random")
        return source, source.module
    if peer == "transformers":
        from transformers import MobileViTConfig, MobileViTForImageClassification

        theirs: nn.Module = MobileViTForImageClassification(MobileViTConfig(**HUGGING_FACE[name], num_labels=1000))
        wrapped: nn.Module = Logits(theirs)
    else:
        import timm

        wrapped = theirs = timm.create_model(name)
    with torch.random.fork_rng(devices=[]):
        scale_weights(wrapped, (picture_batch(load_source(name).preprocessing),))
    weights = work / f"{name}-{'hf' if peer == 'transformers' else 'timm'}.safetensors"
    save_file(theirs.state_dict(), weights)
    source = load_source(name, weights=str(weights))
    return source, source.module if peer.startswith("without:") else wrapped


def export_ours(source: Source, form: str, size: Size, folder: Path, rewrites: list[str] | None) -> Path:
    [artifact] = converters.export(
        source.module,
        source.signature,
        name=source.name.replace("/", "-"),
        out=folder,
        formats=(form,),
        sizes=(size,),
        batch=1,
        precision="fp32",
        sample_inputs=sample_inputs(source, lambda line: None),
        preprocessing=source.preprocessing,
        rewrites=rewrites,
    )
    return artifact.path


def export_theirs(module: nn.Module, form: str, example: torch.Tensor, path: Path) -> None:
    with quiet():
        if form == "onnx":
            torch.onnx.export(module, (example,), path, dynamo=True, opset_version=18, external_data=False)
        else:
            import litert_torch

            path.write_bytes(litert_torch.convert(module, (example,)).model_content())


def code_hash() -> str:
    """Of what decides how a file comes out, so that none is measured that older code wrote."""
    root = Path(__file__).resolve().parent.parent
    sources = [*sorted(root.glob("converters/*.py")), *sorted(root.glob("edgevit/models/*.py"))]
    versions = [version(name) for name in ("torch", "litert-torch", "onnxscript")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources) + str(versions).encode()).hexdigest()[:12]


def files(name: str, peer: str, form: str, size: Size, work: Path) -> tuple[Source, dict[str, Path]]:
    """Ours and the peer's, made unless `work` has them."""
    source, theirs = subjects(name, peer, work)
    what = "-".join([name, str(size), form, peer, code_hash()])
    place = work / what.replace(":", "-").replace("/", "-")
    found = {side: place / side for side in ("ours", "peer")}
    for side, folder in found.items():
        path = folder / f"file{SUFFIXES[form]}"
        found[side] = path
        if path.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        if side == "ours" or peer.startswith("without:"):
            left_out = peer.partition(":")[2] if side == "peer" else ""
            names = [key for key, item in REWRITES.items() if form in item.pays and key != left_out]
            export_ours(source, form, size, folder, names).rename(path)
        else:
            export_theirs(theirs.eval(), form, torch.zeros(1, 3, size.height, size.width), folder / "draft")
            (folder / "draft").rename(path)
    return source, found


def runner(path: Path, image: np.ndarray, threads: int) -> Run:
    """Spinning is off in ONNX Runtime: two pools that spin disturb each other in one process."""
    if path.suffix == ".onnx":
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        inputs = {session.get_inputs()[0].name: image}
        return lambda: session.run(None, inputs)
    with quiet():
        interpreter = Interpreter(model_path=str(path), num_threads=threads)
        interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image)
    return interpreter.invoke


def milliseconds(run: Run) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e6


def paired(peer: Run, ours: Run, pairs: int) -> np.ndarray:
    """(pairs, 2) milliseconds; which of the two begins changes from pair to pair."""
    for _ in range(10):
        peer(), ours()
    rows = []
    for number in range(pairs):
        if number % 2:
            second = milliseconds(ours)
            rows.append((milliseconds(peer), second))
        else:
            first = milliseconds(peer)
            rows.append((first, milliseconds(ours)))
    return np.array(rows)


def median_with_interval(ratios: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    draws = np.random.default_rng(seed).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def roof(threads: int) -> float:
    """GFLOP/s of a square matrix product in ONNX Runtime, the best of 20."""
    side = ROOF_SIDE
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["a", "b"], ["c"])],
        "roof",
        [value("a", onnx.TensorProto.FLOAT, (side, side)), value("b", onnx.TensorProto.FLOAT, (side, side))],
        [value("c", onnx.TensorProto.FLOAT, (side, side))],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    inputs = {name: np.random.default_rng(0).random((side, side), np.float32) for name in "ab"}
    best = min(milliseconds(lambda: session.run(None, inputs)) for _ in range(20))
    return 2 * side**3 / best / 1e6


def held(path: Path) -> dict[str, int]:
    """Operations by type. In a TFLite file "XNNPACK partitions" counts the parts that the delegate took."""
    if path.suffix == ".onnx":
        return dict(collections.Counter(node.op_type for node in onnx.load(path).graph.node).most_common())
    with quiet():
        interpreter = Interpreter(model_path=str(path), num_threads=1)
        interpreter.allocate_tensors()
    counts = collections.Counter(item["op_name"] for item in interpreter._get_ops_details())
    return {"XNNPACK partitions": counts.pop("DELEGATE", 0), **dict(counts.most_common())}


def measure(name: str, peer: str, runtime: str, threads: int, size: Size, pairs: int, work: Path) -> dict[str, Any]:
    source, found = files(name, peer, RUNTIMES[runtime], size, work)
    image = sample_inputs(source, lambda line: None)(size, 1)[source.signature.inputs[0].name]
    times = paired(*(runner(found[side], image, threads) for side in ("peer", "ours")), pairs)
    ratio, low, high = median_with_interval(times[:, 0] / times[:, 1])
    gflop = count_flops(source.module, (torch.from_numpy(image),)) / 1e9
    rate = roof(threads)
    ours_ms = float(np.median(times[:, 1]))
    return {
        "model": name,
        "size": str(size),
        "runtime": runtime,
        "threads": threads,
        "peer": peer,
        "peer_ms": float(np.median(times[:, 0])),
        "ours_ms": ours_ms,
        "ratio": ratio,
        "low": low,
        "high": high,
        "gflop": gflop,
        "roof_gflops": rate,
        "times_roof": ours_ms / (gflop / rate * 1e3),
        "peer_bytes": found["peer"].stat().st_size,
        "ours_bytes": found["ours"].stat().st_size,
        "peer_nodes": held(found["peer"]),
        "ours_nodes": held(found["ours"]),
    }


def line(row: dict[str, Any]) -> str:
    def nodes(side: str) -> str:
        return ", ".join(f"{kind} {count}" for kind, count in row[f"{side}_nodes"].items())

    at_roof_ms = row["ours_ms"] / row["times_roof"]
    return (
        f"{row['model']} at {row['size']}, {row['runtime']}, {row['threads']} thread(s), beside {row['peer']}: "
        f"ratio {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})\n"
        f"  ms     {row['peer_ms']:.2f} -> {row['ours_ms']:.2f}, {row['times_roof']:.2f} times the roof "
        f"({row['gflop']:.2f} GFLOP at {row['roof_gflops']:.0f} GFLOP/s: {at_roof_ms:.2f} ms)\n"
        f"  MB     {row['peer_bytes'] / 1e6:.2f} -> {row['ours_bytes'] / 1e6:.2f}\n"
        f"  peer   {nodes('peer')}\n"
        f"  ours   {nodes('ours')}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mobilevit_xxs,mobilevit_s", help="with commas")
    parser.add_argument("--peer", default="timm", help="timm, transformers, or without:REWRITE")
    parser.add_argument("--runtimes", default="onnxruntime,litert")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--size", type=Size.parse, default=Size.parse("256"))
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--work", type=Path, default=Path("benchmarks/.work"), help="where exported files are kept")
    parser.add_argument("--json", type=Path, help="append a line of JSON for each result")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    print(f"onnxruntime {onnxruntime.__version__}, torch {torch.__version__}, {options.pairs} pairs", flush=True)
    for name in options.models.split(","):
        for runtime in options.runtimes.split(","):
            for threads in map(int, options.threads.split(",")):
                row = measure(name, options.peer, runtime, threads, options.size, options.pairs, options.work)
                print(line(row), flush=True)
                if options.json:
                    with options.json.open("a") as stream:
                        stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
