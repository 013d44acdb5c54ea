"""Runs ONNX models in onnxruntime: tests/export_onnx.rs compares the scores.

    score_onnx.py FOLDER

FOLDER/cases.json: [{"model": file, "batches": [{input name: {"type", "shape", "data"}}]}].
Writes FOLDER/scores.json: for each case its metadata and inputs, and for each batch logits and scores, or an error.
"""

import json
import pathlib
import sys

import numpy as np
import onnx
import onnxruntime as ort


def tensor(t):
    return np.array(t["data"], dtype=t["type"]).reshape(t["shape"])


def main(folder):
    results = []
    for case in json.loads((folder / "cases.json").read_text()):
        path = str(folder / case["model"])
        onnx.checker.check_model(path, full_check=True)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        result = {
            "metadata": session.get_modelmeta().custom_metadata_map,
            "inputs": {i.name: i.shape for i in session.get_inputs()},
            "weights": {t.name: list(t.dims) for t in onnx.load(path).graph.initializer},
            "batches": [],
        }
        for batch in case["batches"]:
            try:
                logit, score = session.run(["logit", "score"], {k: tensor(v) for k, v in batch.items()})
                one = {"logit": logit.tolist(), "score": score.tolist(), "shape": list(logit.shape)}
            except Exception as e:  # an error is a result: a test expects one
                one = {"error": str(e)}
            result["batches"].append(one)
        results.append(result)
    (folder / "scores.json").write_text(json.dumps(results))


main(pathlib.Path(sys.argv[1]))
