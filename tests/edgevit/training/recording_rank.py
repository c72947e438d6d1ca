"""Run by `accelerate launch` in `test_processes.py`: trains, and writes down what this process did.

Arguments: data folder, run folder, folder for the records.
"""

import hashlib
import json
import sys
from pathlib import Path

from converters.signature import Size
from edgevit.data.images import ImageDataset
from edgevit.training import loop
from edgevit.training.config import TrainConfig

data, out, records = sys.argv[1:]
fetched, steps, trainings = [], [], []
fetch, train_step = ImageDataset.__getitem__, loop.train_step


def recording_fetch(self, address):
    fetched.append(int(address[1]))
    return fetch(self, address)


def recording_step(training, images, labels):
    steps.append({"epoch": training.position.epoch, "shape": list(images.shape), "indices": list(fetched)})
    fetched.clear()
    trainings.append(training)
    return train_step(training, images, labels)


ImageDataset.__getitem__, loop.train_step = recording_fetch, recording_step
config = TrainConfig.of(
    "mobilevit_xxs", data, Size.parse_list("32,64"), epochs=2, batch_size=8, warmup_steps=2, workers=0, threads=1
)
loop.train(config, Path(out))

accelerator = trainings[-1].accelerator
digest = hashlib.sha256()
for parameter in trainings[-1].model.parameters():
    digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
record = {"processes": accelerator.num_processes, "steps": steps, "weights": digest.hexdigest()}
(Path(records) / f"{accelerator.process_index}.json").write_text(json.dumps(record))
