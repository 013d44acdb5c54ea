"""Reads TensorBoard event files: tests/tensorboard.rs compares them with metrics.jsonl.

    read_events.py FOLDER

Prints {tag: [[step, value], ...]}, as TensorBoard would show it.
"""

import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
events.Reload()
tags = events.Tags()["scalars"]
print(json.dumps({t: [[e.step, e.value] for e in events.Scalars(t)] for t in tags}))
