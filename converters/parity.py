"""How closely an artifact's outputs agree with the module's, and whether that is close enough to be called exported."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from converters.artifact import Verified
from converters.errors import ParityError
from converters.signature import Size

# max |artifact − module| / std(module): what each precision may lose.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}
# Below this an output is close to constant, so that any wrong file would agree with it.
SMALLEST_STD = 1e-3
# Where two outputs are equal to the bit; JSON has no infinity.
HIGHEST_SNR_DB = 200.0
SMALLEST_PROBABILITY = 1e-30  # logarithms end here

_REMEDY = "use trained weights, or scale the random ones until the output's std is near 1"


def compare(
    reference: Mapping[str, np.ndarray],
    actual: Mapping[str, np.ndarray],
    size: Size | str,
    *,
    logits: Collection[str] = (),
    probabilities: Collection[str] = (),
) -> list[Verified]:
    """One `Verified` per output of `reference`: arrays (N, …) over the same N examples.

    `logits` and `probabilities` name the outputs whose last axis holds classes: for them the share of examples with
    the same top-1 class is recorded. Probabilities are compared as logarithms, which is what the logits were up to a
    constant: the plain numbers of a thousand classes are nearly all close to 0. Of outputs that hold no floating-point
    numbers, the error is the share of elements that differ. Raises ParityError when an output is missing, has another
    shape or kind of number, or is not finite on either side.
    """
    compared = []
    for name in reference:
        where = f"output '{name}' at size {size}"
        expected, found = reference[name], _checked(actual.get(name), reference[name], where)
        if expected.dtype.kind != "f":
            differing = float((expected != found).mean()) if expected.size else 0.0
            same = HIGHEST_SNR_DB if not differing else -10 * float(np.log10(differing))
            compared.append(Verified(str(size), name, differing, same, 1.0, cosine=1.0 - differing))
            continue
        if name in probabilities:
            expected, found = (np.log(np.maximum(array, SMALLEST_PROBABILITY)) for array in (expected, found))
        classes = name in logits or name in probabilities
        compared.append(_compare_floats(name, expected, found, str(size), classes))
    return compared


def check(verified: Sequence[Verified], precision: str, *, file: str = "") -> None:
    """Raises ParityError naming the worst output and size when one misses TOLERANCE[precision] or proves nothing."""
    prefix = f"{file}: " if file else ""
    if not verified:
        raise ParityError(f"{prefix}nothing was compared, so nothing is proven")
    for item in verified:
        if item.output_std < SMALLEST_STD:
            raise ParityError(
                f"{prefix}output '{item.output}' at size {item.size} has a standard deviation of "
                f"{item.output_std:.1e}: a comparison would prove nothing; {_REMEDY}"
            )
    worst = max(verified, key=lambda item: item.max_abs_over_std)
    if not worst.max_abs_over_std <= TOLERANCE[precision]:
        raise ParityError(
            f"{prefix}output '{worst.output}' at size {worst.size} is off by {worst.max_abs_over_std:.2g} of its "
            f"standard deviation (SNR {worst.snr_db:.0f} dB); {precision} allows {TOLERANCE[precision]:g}"
        )


def check_meaningful(
    reference: Mapping[str, np.ndarray], size: Size | str, *, probabilities: Collection[str] = ()
) -> None:
    """Raises ParityError when the module's own outputs (N, …) are not finite, or too constant to prove anything.

    A floating-point output must vary both as a whole and from one example to the next: a network whose signal died,
    with only the bias of its head left, has logits of some spread that are the same for every picture.
    """
    for name, array in reference.items():
        if array.dtype.kind != "f":
            continue
        if not np.isfinite(array).all():
            raise ParityError(f"the module's own output '{name}' at size {size} is not finite; check its weights")
        values = array.astype(np.float64)
        if name in probabilities:
            values = np.log(np.maximum(values, SMALLEST_PROBABILITY))
        spreads = {"a standard deviation": float(values.std())}
        if len(values) > 1:
            spreads["a standard deviation between examples"] = float(np.sqrt(values.var(axis=0).mean()))
        for what, spread in spreads.items():
            if spread < SMALLEST_STD:
                raise ParityError(
                    f"output '{name}' at size {size} has {what} of {spread:.1e}: a comparison would prove nothing; "
                    f"{_REMEDY}, and give different examples"
                )


def worst(verified: Sequence[Verified]) -> Verified:
    """The comparison with the largest error."""
    return max(verified, key=lambda item: item.max_abs_over_std)


def _checked(actual: np.ndarray | None, expected: np.ndarray, where: str) -> np.ndarray:
    if actual is None:
        raise ParityError(f"{where} is missing")
    if actual.shape != expected.shape:
        raise ParityError(f"{where} has shape {actual.shape}; the module's has {expected.shape}")
    if actual.dtype.kind != expected.dtype.kind or (expected.dtype.kind == "f" and actual.dtype != expected.dtype):
        raise ParityError(f"{where} holds {actual.dtype}; the module's holds {expected.dtype}")
    if expected.dtype.kind == "f" and not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        raise ParityError(f"{where} is not finite")
    return actual


def _compare_floats(name: str, expected: np.ndarray, actual: np.ndarray, size: str, classes: bool) -> Verified:
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    error, std = np.abs(a - b), float(b.std())
    noise, signal = float((error**2).sum()), float((b**2).sum())
    snr_db = HIGHEST_SNR_DB if noise == 0 else 10 * float(np.log10(max(signal, 1e-300) / noise))
    lengths = float(np.sqrt(signal * (a**2).sum()))
    return Verified(
        size=size,
        output=name,
        max_abs_over_std=float(error.max(initial=0.0)) / std if std > 0 else float(error.max(initial=0.0) > 0),
        snr_db=min(snr_db, HIGHEST_SNR_DB),
        output_std=std,
        top1_agreement=float((a.argmax(-1) == b.argmax(-1)).mean()) if classes else None,
        cosine=min(1.0, float((a * b).sum()) / lengths) if lengths > 0 else 1.0,
    )
