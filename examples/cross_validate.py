#!/usr/bin/env python3
"""Five-fold cross-validation of a configuration on a small Criteo-format file: every row is scored by a model
that has not seen it, neither in training nor in the choice of the stopping step.

    python3 examples/cross_validate.py rows.tsv --config examples/criteo_small.toml --set train.seed=2

Everything after the file goes to `birkhoff train`. BIRKHOFF names the program (default: birkhoff on the PATH).
"""
import json
import os
import random
import subprocess
import sys
import tempfile

FOLDS = 5
program = os.environ.get("BIRKHOFF", "birkhoff")
if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
    sys.exit(__doc__)
with open(sys.argv[1], newline="\n") as f:
    rows = f.readlines()
random.Random(0).shuffle(rows)
results = []
with tempfile.TemporaryDirectory() as folder:
    for k in range(FOLDS):
        rest = [r for i, r in enumerate(rows) if i % FOLDS != k]
        cut = len(rest) // 8  # these choose the stopping step
        files = {"test": rows[k::FOLDS], "valid": rest[:cut], "train": rest[cut:]}
        path = {n: os.path.join(folder, n + ".tsv") for n in files}
        for n, part in files.items():
            with open(path[n], "w", newline="\n") as f:
                f.writelines(part)
        run = os.path.join(folder, "run")
        train = [program, "train", "--train", path["train"], "--valid", path["valid"], "--out", run, "--force", "--quiet"]
        subprocess.run(train + sys.argv[2:], check=True, stdout=subprocess.DEVNULL)
        out = subprocess.run([program, "eval", run, "--data", path["test"], "--json"], check=True, capture_output=True)
        m = json.loads(out.stdout)
        results.append((m["ne"], m["auc"]))
        print(f"fold {k + 1}/{FOLDS}: NE {m['ne']:.4f}  AUC {m['auc']:.4f}", flush=True)
ne, auc = (sum(r[i] for r in results) / FOLDS for i in (0, 1))
print(f"mean: NE {ne:.4f}  AUC {auc:.4f}")
