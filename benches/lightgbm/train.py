"""Trains the LightGBM model of the benchmark frigid_predict, and times predictions by LightGBM's Python API.

    python train.py make FOLDER FEATURES     writes model.txt, and rows.f64: rows of 64-bit floats, some of them NaN
    python train.py time FOLDER FEATURES     prints the mean nanoseconds of one prediction of one row
"""

import sys
import time

import lightgbm
import numpy

ROWS = 1024
TIMED_PREDICTIONS = 2000

command, folder, features = sys.argv[1], sys.argv[2], int(sys.argv[3])
random = numpy.random.default_rng(1)

if command == "make":
    x = random.normal(size=(20_000, features))
    x[random.random(x.shape) < 0.2] = numpy.nan
    y = numpy.nan_to_num(x) @ random.normal(size=features) + random.normal(size=len(x))
    parameters = {"objective": "quantile", "alpha": 0.05, "num_leaves": 31, "num_threads": 2, "verbose": -1}
    model = lightgbm.train(parameters, lightgbm.Dataset(x, y), 100)
    model.save_model(f"{folder}/model.txt")
    x[:ROWS].tofile(f"{folder}/rows.f64")
else:
    model = lightgbm.Booster(model_file=f"{folder}/model.txt")
    rows = numpy.fromfile(f"{folder}/rows.f64").reshape(-1, 1, features)
    for row in rows[:100]:
        model.predict(row, num_threads=1)
    start = time.perf_counter_ns()
    for number in range(TIMED_PREDICTIONS):
        model.predict(rows[number % len(rows)], num_threads=1)
    print((time.perf_counter_ns() - start) / TIMED_PREDICTIONS)
