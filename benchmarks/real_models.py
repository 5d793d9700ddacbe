"""Convert real models, verify them, and let stock transformers generate from source and output.

  python benchmarks/real_models.py smollm2-135m qwen2.5-coder-0.5b --work /data/real
  # also with the transformers 4.57 in DIR:
  SURGERY_TRANSFORMERS_4=DIR python benchmarks/real_models.py ...

For each model: `upcycle --experts 4` and `relufy --repair none`, both verified; seconds and peak
memory of the whole process; sixteen greedy tokens in fp32, which an upcycled model must share with
its source. Without a folder, the embedded model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from surgery.demo import MODEL

COMMANDS = {"upcycled": ["upcycle", "--experts", "4"], "relufied": ["relufy", "--repair", "none"]}
PROMPT = "The people of the United States"
GENERATE = """
import sys, torch, transformers
transformers.logging.set_verbosity_error()
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = tokenizer(sys.argv[2], return_tensors="pt").input_ids
out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
text = repr(tokenizer.decode(out[0, ids.shape[1]:]))
print(transformers.__version__, type(model).__name__, text, sep="|")
"""


def convert(model: Path, out: Path, arguments: list[str]) -> dict[str, Any]:
    """Convert, and return the record with seconds and peak resident megabytes."""
    command = [sys.executable, "-m", "surgery", *arguments, str(model), "--out", str(out), "--json"]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout
    record = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds, megabytes = time.perf_counter() - start, usage.ru_maxrss * 1024 / 1e6
    return {**record, "code": process.returncode, "seconds": seconds, "megabytes": megabytes}


def generate(folder: Path, path: str | None) -> list[str]:
    """Version of transformers, class, and the text of 16 greedy tokens."""
    environment = {**os.environ, **({"PYTHONPATH": path} if path else {})}
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(folder), PROMPT],
        env=environment,
        capture_output=True,
        text=True,
    )
    return (
        done.stdout.strip().split("|", 2)
        if done.returncode == 0
        else ["", "failed", done.stderr.strip()[-200:]]
    )


def report(name: str, record: dict[str, Any], folder: Path, expected: str) -> None:
    rows = {r["check"]: r["value"] for r in record["verification"]["rows"]}
    keep = {k: v for k, v in rows.items() if "Δ" in k or "perplexity" in k or "rounding" in k}
    size = sum(s["bytes"] for s in record["shards"].values()) / 1e9
    verdict = "passed" if record["verification"]["passed"] else "FAILED"
    print(
        f"{name}: {size:.2f} GB, {record['seconds']:.0f} s, peak {record['megabytes']:.0f} MB, "
        f"verification {verdict}"
    )
    for check, value in keep.items():
        print(f"    {check}: {value:.4g}")
    versions = [None, *filter(None, [os.environ.get("SURGERY_TRANSFORMERS_4")])]
    for version, kind, text in (generate(folder, path) for path in versions):
        same = " (the source's tokens)" if text == expected else ""
        print(f"    transformers {version} {kind}: {text}{same}", flush=True)


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("models", type=Path, nargs="*", default=[MODEL])
    p.add_argument("--work", type=Path, required=True, help="a folder for the outputs")
    a = p.parse_args()
    for model in a.models:
        name = "demo" if model == MODEL else model.name
        expected = generate(model, None)[2]
        print(f"{name}: greedy tokens {expected}", flush=True)
        for kind, arguments in COMMANDS.items():
            out = a.work / f"{name}-{kind}"
            report(f"{name} {kind}", convert(model, out, arguments), out, expected)


if __name__ == "__main__":
    main()
