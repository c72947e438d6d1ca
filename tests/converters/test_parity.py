"""What counts as the same output, and which comparisons are refused because they prove nothing."""

import numpy as np
import pytest

from converters import parity
from converters.errors import ParityError

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, 10)).astype(np.float32)


def compare(actual, reference=LOGITS, **options):
    return parity.compare({"logits": reference}, {"logits": actual}, "64", **options)


def test_the_figures_are_their_formulas():
    error = RNG.normal(scale=1e-3, size=LOGITS.shape).astype(np.float32)
    (item,) = compare(LOGITS + error, logits=["logits"])
    actual = (LOGITS + error).astype(np.float64) - LOGITS
    assert item.max_abs_over_std == pytest.approx(np.abs(actual).max() / LOGITS.astype(np.float64).std())
    ratio = np.sqrt((LOGITS.astype(np.float64) ** 2).mean()) / np.sqrt((actual**2).mean())
    assert item.snr_db == pytest.approx(20 * np.log10(ratio))
    assert item.output_std == pytest.approx(LOGITS.std(), rel=1e-6)
    assert (item.size, item.output, item.top1_agreement) == ("64", "logits", 1.0)


def test_top1_agreement_counts_examples():
    changed = LOGITS.copy()
    changed[0, LOGITS[0].argmin()] = 99
    assert compare(changed, logits=["logits"])[0].top1_agreement == 0.75
    assert compare(changed)[0].top1_agreement is None


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 1e-4), ("fp16", 2e-2)])
def test_the_limit_is_a_share_of_the_std(precision, allowed):
    for scale in (1e-2, 1, 1e3):  # the unit of the output does not matter
        reference = LOGITS.astype(np.float64) * scale
        off = np.zeros_like(reference)
        off[2, 3] = reference.std() * allowed
        parity.check(compare(reference + 0.99 * off, reference), precision)
        with pytest.raises(ParityError, match=r"'logits' at size 64 is off by .* standard deviation"):
            parity.check(compare(reference + 1.01 * off, reference), precision, file="m.onnx")


def test_the_worst_output_and_size_are_named():
    fine = parity.compare({"a": LOGITS}, {"a": LOGITS}, "64")
    bad = parity.compare({"a": LOGITS, "b": LOGITS}, {"a": LOGITS + 0.1, "b": LOGITS + 1}, "96")
    with pytest.raises(ParityError, match="'b' at size 96"):
        parity.check(fine + bad, "fp32")


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        (LOGITS[:, :9], "shape"),
        (LOGITS[0], "shape"),
        (np.where(LOGITS > 1, np.nan, LOGITS), "not finite"),
        (np.where(LOGITS > 1, np.inf, LOGITS), "not finite"),
    ],
)
def test_other_shapes_and_numbers_that_are_none(actual, message):
    with pytest.raises(ParityError, match=message):
        compare(actual)


def test_a_missing_output():
    with pytest.raises(ParityError, match="'logits' at size 64 is missing"):
        parity.compare({"logits": LOGITS}, {"scores": LOGITS}, "64")


def test_a_constant_output_proves_nothing_even_when_it_agrees():
    tiny = LOGITS * 1e-5
    with pytest.raises(ParityError, match="would prove nothing"):
        parity.check(compare(tiny, tiny), "fp32")
    with pytest.raises(ParityError, match="would prove nothing"):
        parity.check_meaningful({"logits": tiny}, "64")
    parity.check_meaningful({"logits": LOGITS}, "64")


def test_logits_that_are_the_heads_bias_prove_nothing():
    with pytest.raises(ParityError, match="between examples"):
        parity.check_meaningful({"logits": np.repeat(LOGITS[:1], 4, axis=0)}, "64")


def test_a_module_that_is_not_finite():
    with pytest.raises(ParityError, match="module's own output"):
        parity.check_meaningful({"logits": np.where(LOGITS > 1, np.nan, LOGITS)}, "64")


def test_nothing_compared_proves_nothing():
    with pytest.raises(ParityError, match="nothing was compared"):
        parity.check([], "fp32")


def test_probabilities_are_compared_as_the_logits_that_they_came_from():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(4, 1000))
    exact = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    parity.check_meaningful({"p": exact}, "32", probabilities=("p",))
    [close] = parity.compare({"p": exact}, {"p": exact * (1 + 1e-6)}, "32", probabilities=("p",))
    assert close.max_abs_over_std == pytest.approx(1e-6 / np.log(exact).std(), rel=1e-3)
    assert close.top1_agreement == 1.0
    with pytest.raises(ParityError, match="would prove nothing"):
        parity.check_meaningful({"p": np.full((4, 1000), 1e-3)}, "32", probabilities=("p",))


def test_integers_differ_by_their_share():
    expected = {"best": np.arange(10, dtype=np.int64)}
    [same] = parity.compare(expected, {"best": np.arange(10, dtype=np.int32)}, "32")
    assert same.max_abs_over_std == 0
    parity.check([same], "fp32")
    [other] = parity.compare(expected, {"best": np.array([9, *range(1, 10)])}, "32")
    assert other.max_abs_over_std == pytest.approx(0.1)
    assert other.snr_db == pytest.approx(10)
    with pytest.raises(ParityError, match=r"off by 0\.1"):
        parity.check([other], "fp16")


def test_another_kind_of_number_is_refused():
    expected = {"y": np.ones((2, 3), np.float32)}
    for dtype in (np.int32, np.float16):
        with pytest.raises(ParityError, match=f"holds {np.dtype(dtype).name}; the module's holds float32"):
            parity.compare(expected, {"y": expected["y"].astype(dtype)}, "32")


def test_cosine_of_a_known_angle():
    [item] = parity.compare({"y": np.array([[1.0, 0.0]])}, {"y": np.array([[1.0, 1.0]])}, "32")
    assert item.cosine == pytest.approx(2**-0.5)
