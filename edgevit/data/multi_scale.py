"""The multi-scale sampler: each step draws an image size, and takes as many images as keep the step's cost level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from converters.errors import EdgeVitError
from converters.signature import Size


class MultiScaleBatchSampler(Sampler[list[tuple[Size, int]]]):
    """Batches of (size, index), one size per batch; pass it to `DataLoader(dataset, batch_sampler=…)` yourself.

    The variable-batch multi-scale sampler of MobileViT (arXiv 2110.02178, section 3.2 and its appendix on multi-scale
    training). A step at height H and width W takes, on each rank,

        max(1, round(H0 · W0 · b / (H · W)))

    images, where b is `batch_size` and (H0, W0) is `base_size`, by default the middle of `sizes` in order of area
    (of an even number of sizes, the smaller of the two in the middle). So every step sees about as many pixels.

    One epoch is a plan that depends on (seed, epoch) and the arguments alone: it is drawn from a private generator,
    and no global one is read or advanced. Every rank makes the same plan, and takes its own part of each batch. So at
    each step all ranks have the same size and the same number of images, and share no image. Over all ranks:

    - `drop_last=False`: every image once; the epoch's last batch is filled up to its full size by repeating the
      epoch's images from its first on.
    - `drop_last=True`: every image at most once; a last batch that the images left do not fill is dropped.

    Do not pass the loader through `accelerate`'s `prepare`, which would deal these batches out to the ranks again.

    Resuming. Workers prefetch, so what was yielded says nothing about what was trained on: the training loop calls
    `consumed()` after each step, and `state_dict()` holds that count. Iterating starts after the consumed batches.

        sampler.set_epoch(epoch)                 # an epoch other than the current one starts at its first batch
        for images, labels in loader:
            ...
            sampler.consumed()

    Args:
        num_examples: images in the data set.
        sizes: image sizes (height and width), in any order; each is drawn with equal probability.
        base_size: the size at which a batch holds `batch_size` images; need not be one of `sizes`.
        batch_size: images per rank at the base size.
        seed: not negative; the same on every rank.
        rank, world_size: this process, and how many there are.
        shuffle: a new order of the images each epoch; without it they come in order, and only sizes are drawn.

    Raises EdgeVitError for arguments out of range, and with `drop_last` when one batch could need more images than
    there are.
    """

    def __init__(
        self,
        num_examples: int,
        sizes: Sequence[Size],
        *,
        base_size: Size | None = None,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        shuffle: bool = True,
    ) -> None:
        if not sizes:
            raise EdgeVitError("multi-scale sampler: give at least one size, such as 256")
        if min(num_examples, batch_size, world_size) < 1:
            raise EdgeVitError(
                f"multi-scale sampler: {num_examples} images, batch size {batch_size}, {world_size} processes: "
                "each must be at least 1"
            )
        if not 0 <= rank < world_size:
            raise EdgeVitError(f"multi-scale sampler: rank {rank} of {world_size} processes; ranks count from 0")
        if seed < 0:
            raise EdgeVitError(f"multi-scale sampler: seed {seed}; it must not be negative")
        self.sizes = tuple(sorted(set(sizes), key=lambda size: (size.height * size.width, size.height)))
        self.base_size = base_size or self.sizes[(len(self.sizes) - 1) // 2]
        self.num_examples = num_examples
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.shuffle = shuffle
        largest = self.batch_size_at(self.sizes[0]) * world_size
        if drop_last and num_examples < largest:
            raise EdgeVitError(
                f"multi-scale sampler: {num_examples} images do not fill one batch of {largest} at size "
                f"{self.sizes[0]}, and incomplete batches are dropped; use a smaller batch size"
            )
        self._start(epoch=0)

    @property
    def epoch(self) -> int:
        return self._epoch

    def batch_size_at(self, size: Size) -> int:
        """Images per rank in a batch of `size`."""
        base_pixels = self.base_size.height * self.base_size.width
        return max(1, round(base_pixels * self.batch_size / (size.height * size.width)))

    def __len__(self) -> int:
        """Batches of the whole current epoch on each rank, those already consumed included."""
        return len(self._drawn)

    def __iter__(self) -> Iterator[list[tuple[Size, int]]]:
        """This rank's batches of the current epoch, from the first that was not consumed."""
        # The arguments are bound here, not when the loader first asks, so that a later `set_epoch` changes nothing.
        return self._batches(self._order, self._drawn, self._consumed)

    def set_epoch(self, epoch: int) -> None:
        """Makes `epoch` the current one, at its first batch; does nothing when it is the current one already."""
        if epoch < 0:
            raise EdgeVitError(f"multi-scale sampler: epoch {epoch}; epochs count from 0")
        if epoch != self._epoch:
            self._start(epoch)

    def consumed(self, batches: int = 1) -> None:
        """The training loop has finished `batches` more batches of the current epoch."""
        if not 0 <= batches <= len(self) - self._consumed:
            raise EdgeVitError(
                f"multi-scale sampler: {batches} batches consumed after {self._consumed} of {len(self)}; "
                "call set_epoch() before the next epoch"
            )
        self._consumed += batches

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the batches consumed of it, and what the plan depends on; fit for JSON, and equal on all ranks."""
        return {"epoch": self._epoch, "consumed": self._consumed, "plan": self._plan_arguments()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken. Raises EdgeVitError when this sampler's plan is another one."""
        mine, theirs = self._plan_arguments(), state["plan"]
        for name, value in mine.items():
            if theirs.get(name) != value:
                raise EdgeVitError(
                    f"cannot resume in mid-epoch: {name} was {theirs.get(name)} and is {value} now; "
                    "start again with the same settings and number of processes"
                )
        self._start(state["epoch"])
        self.consumed(state["consumed"])

    def _start(self, epoch: int) -> None:
        """Draws the epoch's plan: the order of the images, and the size of every step."""
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, epoch))))
        order = np.arange(self.num_examples)
        if self.shuffle:
            generator.shuffle(order)
        drawn: list[Size] = []
        left = self.num_examples
        while left > 0:
            size = self.sizes[int(generator.integers(len(self.sizes)))]
            left -= self.batch_size_at(size) * self.world_size
            if left >= 0 or not self.drop_last:
                drawn.append(size)
        self._epoch, self._order, self._drawn, self._consumed = epoch, order, drawn, 0

    def _batches(self, order: np.ndarray, drawn: Sequence[Size], consumed: int) -> Iterator[list[tuple[Size, int]]]:
        start = 0
        for step, size in enumerate(drawn):
            count = self.batch_size_at(size)
            if step >= consumed:
                first = start + self.rank * count
                # Only the last batch can reach past the end; `wrap` repeats the epoch's images from the first on.
                yield [(size, int(index)) for index in order.take(range(first, first + count), mode="wrap")]
            start += count * self.world_size

    def _plan_arguments(self) -> dict[str, Any]:
        return {
            "num_examples": self.num_examples,
            "sizes": [str(size) for size in self.sizes],
            "base_size": str(self.base_size),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "world_size": self.world_size,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
        }
