"""What the multi-scale sampler promises, for any set of sizes, data set and number of ranks."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from converters.errors import EdgeVitError
from converters.signature import Size
from edgevit.data.multi_scale import MultiScaleBatchSampler

image_sizes = st.builds(Size.image, st.integers(1, 12).map(lambda n: 32 * n), st.integers(1, 12).map(lambda n: 32 * n))
settings_of_a_run = st.fixed_dictionaries(
    {
        "num_examples": st.integers(1, 400),
        "sizes": st.lists(image_sizes, min_size=1, max_size=5),
        "base_size": st.none() | image_sizes,
        "batch_size": st.integers(1, 40),
        "seed": st.integers(0, 2**40),
        "world_size": st.integers(1, 4),
        "drop_last": st.booleans(),
        "shuffle": st.booleans(),
    }
)
PAPER_SIZES = Size.parse_list("160,192,256,288,320")


def ranks(arguments: dict, epoch: int = 0) -> list[MultiScaleBatchSampler]:
    samplers = [MultiScaleBatchSampler(**arguments, rank=rank) for rank in range(arguments["world_size"])]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def cannot_fill_a_batch(arguments: dict) -> bool:
    """With drop_last, the sampler refuses data sets that might give an epoch of no batches."""
    roomy = MultiScaleBatchSampler(**(arguments | {"drop_last": False}))
    needed = max(roomy.batch_size_at(size) for size in arguments["sizes"]) * arguments["world_size"]
    return arguments["drop_last"] and needed > arguments["num_examples"]


@given(arguments=settings_of_a_run, epoch=st.integers(0, 1000))
@settings(max_examples=300, deadline=None)
def test_ranks_agree_and_every_image_comes_once(arguments, epoch):
    if cannot_fill_a_batch(arguments):
        with pytest.raises(EdgeVitError, match="smaller batch size"):
            MultiScaleBatchSampler(**arguments)
        return
    samplers = ranks(arguments, epoch)
    batches = [list(sampler) for sampler in samplers]
    total = arguments["num_examples"]

    assert {len(own) for own in batches} == {len(samplers[0])}, "len() is exact, and the same on every rank"
    assert len(samplers[0]) >= 1
    for step in zip(*batches, strict=True):  # the ranks' batches of one step
        sizes = {size for batch in step for size, _ in batch}
        assert len(sizes) == 1, "one size per step, the same on every rank"
        assert {len(batch) for batch in step} == {samplers[0].batch_size_at(sizes.pop())}

    steps = [[index for batch in step for _, index in batch] for step in zip(*batches, strict=True)]
    seen = [index for step in steps for index in step]
    assert all(0 <= index < total for index in seen)
    if arguments["drop_last"]:
        assert len(set(seen)) == len(seen), "every image at most once"
        padded = [list(sampler) for sampler in ranks(arguments | {"drop_last": False}, epoch)]
        assert [own[: len(own) - (total != len(seen))] for own in padded] == batches, "only the last batch is dropped"
    else:
        before_padding, padding = seen[:total], seen[total:]
        assert sorted(before_padding) == list(range(total)), "every image exactly once, so no two ranks share one"
        assert len(padding) < len(steps[-1]), "only the last batch is padded"
        assert padding == (before_padding * len(steps[-1]))[: len(padding)], "with the epoch's images from the first"


@given(arguments=settings_of_a_run, epoch=st.integers(0, 5), data=st.data())
@settings(max_examples=150, deadline=None)
def test_resuming_anywhere_gives_the_tail(arguments, epoch, data):
    if cannot_fill_a_batch(arguments):
        return
    for rank, sampler in enumerate(ranks(arguments, epoch)):
        whole = list(sampler)
        done = data.draw(st.integers(0, len(whole)))
        sampler.consumed(done)
        state = json.loads(json.dumps(sampler.state_dict()))
        resumed = MultiScaleBatchSampler(**arguments, rank=rank)
        resumed.load_state_dict(state)
        resumed.set_epoch(epoch)  # as a training loop does at the top of its epochs; it must not rewind
        assert list(resumed) == whole[done:]
        assert len(resumed) == len(whole)
        resumed.set_epoch(epoch + 1)
        sampler.set_epoch(epoch + 1)
        assert list(resumed) == list(sampler), "the next epoch starts at its first batch"


@given(arguments=settings_of_a_run)
@settings(max_examples=50, deadline=None)
def test_global_generators_are_neither_read_nor_advanced(arguments):
    if cannot_fill_a_batch(arguments):
        return
    results = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        random.seed(global_seed)
        np.random.seed(global_seed)
        before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
        sampler = MultiScaleBatchSampler(**arguments)
        sampler.set_epoch(3)
        results.append(list(sampler))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), repr(np.random.get_state())) == before[1:]
    assert results[0] == results[1]


def test_batch_sizes_are_the_papers_formula():
    sampler = MultiScaleBatchSampler(10_000, PAPER_SIZES, batch_size=128)
    assert str(sampler.base_size) == "256"
    # round(256 · 256 · 128 / (H · W)), worked out by hand
    expected = {"160": 328, "192": 228, "256": 128, "288": 101, "320": 82}
    assert {str(size): sampler.batch_size_at(size) for size in sampler.sizes} == expected
    assert {(str(batch[0][0]), len(batch)) for batch in sampler} <= set(expected.items())


@given(sizes=st.lists(image_sizes, min_size=1, max_size=5), batch_size=st.integers(1, 500))
@settings(max_examples=100, deadline=None)
def test_cost_per_step_is_level_to_half_an_image(sizes, batch_size):
    sampler = MultiScaleBatchSampler(1, sizes, batch_size=batch_size)
    base_pixels = sampler.base_size.height * sampler.base_size.width
    for size in sizes:
        count, pixels = sampler.batch_size_at(size), size.height * size.width
        assert count >= 1
        assert count == 1 or abs(count * pixels - batch_size * base_pixels) <= pixels / 2


@pytest.mark.parametrize(
    ("sizes", "middle"),
    [("64", "64"), ("96,32,64", "64"), ("128,64", "64"), ("32x320,64,96", "96"), ("256,160,320,192,288", "256")],
)
def test_base_size_is_the_middle_by_area(sizes, middle):
    assert str(MultiScaleBatchSampler(9, Size.parse_list(sizes), batch_size=1).base_size) == middle


def test_sizes_are_drawn_uniformly():
    sampler = MultiScaleBatchSampler(1000, PAPER_SIZES, base_size=Size.parse("32"), batch_size=1, shuffle=False)
    drawn = Counter(str(batch[0][0]) for batch in sampler)  # one image a step: 1000 draws
    # 200 expected of each; a chi-squared of 4 degrees of freedom passes 18.5 once in a thousand
    assert sum((drawn[str(size)] - 200) ** 2 / 200 for size in PAPER_SIZES) < 18.5


def test_epochs_and_seeds_give_other_orders_and_other_sizes():
    def plan(seed: int, epoch: int) -> tuple[list[int], list[Size]]:
        sampler = MultiScaleBatchSampler(500, PAPER_SIZES, batch_size=4, seed=seed)
        sampler.set_epoch(epoch)
        batches = list(sampler)
        return [index for batch in batches for _, index in batch], [batch[0][0] for batch in batches]

    plans = [plan(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert plan(2, 1) == plans[7]
    assert len({tuple(order) for order, _ in plans}) == 9
    assert len({tuple(sizes) for _, sizes in plans}) == 9


def test_without_shuffle_images_come_in_order():
    sampler = MultiScaleBatchSampler(50, PAPER_SIZES, batch_size=4, shuffle=False)
    assert [index for batch in sampler for _, index in batch][:50] == list(range(50))


@pytest.mark.parametrize(("num_examples", "batches"), [(15, 1), (16, 2), (17, 2), (23, 2), (24, 3)])
def test_only_an_incomplete_batch_is_dropped(num_examples, batches):
    arguments = {"sizes": [Size.parse("64")], "batch_size": 4, "world_size": 2, "drop_last": True}
    assert [len(sampler) for sampler in ranks(arguments | {"num_examples": num_examples})] == [batches] * 2


def test_iterating_belongs_to_the_epoch_in_which_it_began():
    sampler = MultiScaleBatchSampler(100, PAPER_SIZES, batch_size=4)
    first = list(sampler)
    begun = iter(sampler)
    sampler.set_epoch(1)
    assert list(begun) == first != list(sampler)


def test_fewer_images_than_ranks():
    samplers = ranks({"num_examples": 2, "sizes": [Size.parse("64")], "batch_size": 1, "world_size": 4})
    indices = [next(iter(sampler))[0][1] for sampler in samplers]
    assert sorted(indices) == [0, 0, 1, 1]
    assert [len(sampler) for sampler in samplers] == [1] * 4


class _Addresses(Dataset):
    """Gives back what it is asked for."""

    def __getitem__(self, address: tuple[Size, int]) -> torch.Tensor:
        size, index = address
        return torch.tensor([size.height, size.width, index])


@pytest.mark.parametrize("persistent", [False, True])
def test_state_counts_consumed_batches_not_prefetched_ones(persistent):
    def loader_of(sampler: MultiScaleBatchSampler) -> DataLoader:
        return DataLoader(
            _Addresses(), batch_sampler=sampler, num_workers=2, prefetch_factor=4, persistent_workers=persistent
        )

    arguments = {"num_examples": 300, "sizes": PAPER_SIZES, "batch_size": 8, "seed": 5}
    whole = [batch.tolist() for batch in loader_of(MultiScaleBatchSampler(**arguments))]
    assert len(whole) > 14

    interrupted, done = MultiScaleBatchSampler(**arguments), []
    for batch in loader_of(interrupted):  # by now the workers were sent eight batches more
        done.append(batch.tolist())
        interrupted.consumed()
        if len(done) == 5:
            break
    assert interrupted.state_dict()["consumed"] == 5

    resumed = MultiScaleBatchSampler(**arguments)
    resumed.load_state_dict(interrupted.state_dict())
    rest = [batch.tolist() for batch in loader_of(resumed)]
    assert done + rest == whole


def test_resuming_with_other_settings_is_refused():
    arguments = {"num_examples": 100, "sizes": PAPER_SIZES, "batch_size": 8, "world_size": 2}
    state = MultiScaleBatchSampler(**arguments).state_dict()
    for other in ({"batch_size": 9}, {"world_size": 3}, {"seed": 1}, {"num_examples": 99}, {"sizes": PAPER_SIZES[1:]}):
        with pytest.raises(EdgeVitError, match=f"cannot resume.*{next(iter(other))}"):
            MultiScaleBatchSampler(**(arguments | other)).load_state_dict(state)
    MultiScaleBatchSampler(**arguments, rank=1).load_state_dict(state)  # every rank can load rank 0's


@pytest.mark.parametrize(
    "wrong",
    [
        {"sizes": []},
        {"num_examples": 0},
        {"batch_size": 0},
        {"world_size": 0},
        {"rank": 1},
        {"rank": -1},
        {"seed": -1},
    ],
)
def test_wrong_arguments(wrong):
    with pytest.raises(EdgeVitError, match="multi-scale sampler"):
        MultiScaleBatchSampler(**({"num_examples": 10, "sizes": PAPER_SIZES, "batch_size": 2} | wrong))


def test_consuming_more_than_the_epoch_holds_is_refused():
    sampler = MultiScaleBatchSampler(10, PAPER_SIZES, batch_size=2)
    sampler.consumed(len(sampler))
    with pytest.raises(EdgeVitError, match="set_epoch"):
        sampler.consumed()
