"""Our exported MobileViT beside timm's usual route to ONNX, from the same weights, alternating in one run.

    python benchmarks/export_latency.py --model mobilevit_xxs --size 256 --threads 1

Prints the median of paired ratios (timm's time / ours; above 1 ours is faster), its quartiles, and both files' bytes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
import timm
import torch
from safetensors.torch import save_file

import converters
from converters.artifact import Preprocessing
from converters.signature import Size
from edgevit.data.images import evaluation_transform, photographs
from edgevit.sources import load_source


def scaled_weights(model: torch.nn.Module, images: torch.Tensor, seed: int = 0) -> None:
    """Randomises norms, so that no branch is dead (a zero gamma would let a converter delete work), and fits BatchNorm.

    The statistics are those of `images` (N, 3, H, W), so that activations keep their scale down to the logits.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d | torch.nn.LayerNorm):
            torch.nn.init.uniform_(module.weight, 0.8, 1.2, generator=generator)
            torch.nn.init.uniform_(module.bias, -0.2, 0.2, generator=generator)
        elif isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="linear", generator=generator)
        if isinstance(module, torch.nn.BatchNorm2d):
            module.train().momentum = None  # a plain average
    with torch.no_grad():
        model(images)
    model.eval()


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """Spinning is off: two pools that spin disturb each other in one process."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def milliseconds(model: onnxruntime.InferenceSession, image: np.ndarray) -> float:
    start = time.perf_counter_ns()
    model.run(None, {model.get_inputs()[0].name: image})
    return (time.perf_counter_ns() - start) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mobilevit_xxs")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=200)
    args = parser.parse_args()
    size = Size.image(args.size, args.size)

    reference = timm.create_model(args.model).eval()
    resize = evaluation_transform(Preprocessing(), size)
    scaled_weights(reference, torch.stack([resize(image) for image in photographs()]))
    with tempfile.TemporaryDirectory() as folder:
        save_file(reference.state_dict(), f"{folder}/weights.safetensors")
        source = load_source(args.model, weights=f"{folder}/weights.safetensors")
        transform = evaluation_transform(source.preprocessing, size)
        images = np.stack([transform(image).numpy() for image in photographs()])

        theirs = Path(folder, "timm.onnx")
        example = torch.from_numpy(images[:1])
        torch.onnx.export(
            reference, (example,), theirs, dynamo=True, opset_version=18, external_data=False, verbose=False
        )
        ours = converters.export(
            source.module,
            source.signature,
            name=args.model,
            out=Path(folder),
            formats=("onnx",),
            sizes=(size,),
            batch=1,
            sample_inputs=lambda _size, n: {"image": np.resize(images, (n, *images.shape[1:]))},
            preprocessing=source.preprocessing,
        )[0].path
        pair = session(theirs, args.threads), session(ours, args.threads)
        for _ in range(20):
            for model in pair:
                milliseconds(model, images[:1])
        times = np.array([[milliseconds(model, images[:1]) for model in pair] for _ in range(args.pairs)])
        bytes_ = [path.stat().st_size for path in (theirs, ours)]
    low, ratio, high = np.percentile(times[:, 0] / times[:, 1], [25, 50, 75])
    print(
        f"{args.model} at {size}, onnxruntime {onnxruntime.__version__}, {args.threads} thread(s), {args.pairs} pairs"
    )
    print(f"  timm's export  {np.median(times[:, 0]):7.2f} ms   {bytes_[0] / 1e6:.2f} MB")
    print(f"  edgevit's      {np.median(times[:, 1]):7.2f} ms   {bytes_[1] / 1e6:.2f} MB")
    print(f"  ratio          {ratio:.3f} (quartiles {low:.3f} to {high:.3f}); above 1, edgevit's is faster")


if __name__ == "__main__":
    main()
