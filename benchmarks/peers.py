"""Compare `surgery` with other programs that do the same: time, processor time and peak memory.

Whole processes are measured, in turn; figures are medians.

  python benchmarks/synthetic.py /data/1b
  python -m venv /tmp/mergekit && /tmp/mergekit/bin/pip install mergekit
  python benchmarks/peers.py /data/1b --work /data/bench --mergekit /tmp/mergekit/bin/mergekit-moe
  python benchmarks/peers.py /data/1b --work /data/bench --only relufy --rounds 3

upcycle  8 experts, against mergekit-moe with random gates (needs 16 GB of free memory; left out
         without --mergekit)
relufy   the same weights with hidden_act relu, against transformers: load, edit the config, save
analyze  against a script that loads the whole model, hooks every down_proj and counts zeros and
         firings of each neuron; surgery measures much more on the way: thresholds, CETT, reuse,
         outliers

Where this may (root), the page cache is dropped before every run. The source is given a tokenizer,
which mergekit-moe wants.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from convert import SURGERY, medians, run

RELUFY = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.config.hidden_act = "relu"
model.save_pretrained(sys.argv[2], max_shard_size="5GB")
"""

ANALYZE = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
zeros, fired, tokens = {}, {}, 0
def hook(i):
    def see(module, inputs, output):
        x = inputs[0].flatten(0, -2)
        zeros[i] = zeros.get(i, 0) + (x == 0).sum(0)
        fired[i] = fired.get(i, 0) + (x > 0).sum(0)
    return see
for i, layer in enumerate(model.model.layers):
    layer.mlp.down_proj.register_forward_hook(hook(i))
shape, draw = (int(sys.argv[3]) // 512, 512), torch.Generator().manual_seed(0)
ids = torch.randint(0, model.config.vocab_size, shape, generator=draw)
with torch.no_grad():
    for batch in ids.split(4):
        model(batch, use_cache=False)
Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
counts = {"zeros": zeros, "fired": fired}
named = {f"{n}.{i}": v for n, found in counts.items() for i, v in found.items()}
save_file(named, f"{sys.argv[2]}/counts.safetensors")
"""

MERGEKIT = (
    """base_model: {source}
gate_mode: random
dtype: bfloat16
experts:
"""
    + 8 * "  - source_model: {source}\n    positive_prompts: []\n"
)


def with_tokenizer(source: Path, folder: Path) -> Path:
    """Links to the files of the source, and a tokenizer of a few words beside them."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(("<unk>", "<s>", "</s>"))}, unk_token="<unk>")
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    for path in source.iterdir():
        if path.name.startswith(("config", "model")):
            (folder / path.name).symlink_to(path.resolve())
    return folder


def free_memory() -> float:
    """Gigabytes that programs can have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / 1e9
    return 0.0


def commands(
    source: Path, work: Path, out: Path, mergekit: str | None, tokens: int
) -> dict[str, dict[str, list[str]]]:
    """Return what is compared, by task and by who does it."""
    (work / "mergekit.yaml").write_text(MERGEKIT.format(source=source))
    surgery = [*SURGERY, "{task}", str(source), "--out", str(out), "-q"]
    found = {
        "upcycle": {"surgery": [*surgery, "--experts", "8", "--no-verify"]},
        "relufy": {
            "surgery": [*surgery, "--repair", "none", "--no-verify"],
            "transformers load, edit, save": [sys.executable, "-c", RELUFY, str(source), str(out)],
        },
        "analyze": {
            "surgery": [*surgery, "--tokens", str(tokens), "--dtype", "fp32"],
            "full model with hooks": [
                sys.executable,
                "-c",
                ANALYZE,
                str(source),
                str(out),
                str(tokens),
            ],
        },
    }
    if mergekit:
        found["upcycle"]["mergekit-moe"] = [
            mergekit,
            str(work / "mergekit.yaml"),
            str(out),
            "--quiet",
            "--i-understand-this-is-not-useful-without-training",
        ]
    return {
        task: {who: [c.replace("{task}", task) for c in command] for who, command in by.items()}
        for task, by in found.items()
    }


def compare(by: dict[str, list[str]], out: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of each, in turns."""
    results: dict[str, list[dict[str, float]]] = {who: [] for who in by}
    for _ in range(rounds):
        for who, command in by.items():
            shutil.rmtree(out, ignore_errors=True)
            results[who].append(run(command))
    shutil.rmtree(out, ignore_errors=True)
    return {who: medians(found) for who, found in results.items()}


def show(task: str, found: dict[str, dict[str, float]], say: Callable[[str], None] = print) -> None:
    """Print the rows of a Markdown table."""
    for who, m in found.items():
        ratio = m["wall s"] / found["surgery"]["wall s"]
        say(
            f"| {task} | {who} | {m['wall s']:.1f} s ({ratio:.1f}×) | {m['cpu s']:.1f} s | "
            f"{m['peak MB'] / 1000:.2f} GB |"
        )


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("source", type=Path)
    p.add_argument(
        "--work",
        type=Path,
        required=True,
        help="a folder with room for the outputs, 11 GB with the 1 B model",
    )
    p.add_argument("--mergekit", help="mergekit-moe of an environment of its own")
    p.add_argument("--tokens", type=int, default=4096, help="of analyze")
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--only", choices=["upcycle", "relufy", "analyze"], action="append")
    a = p.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    mergekit, free = a.mergekit, free_memory()
    if mergekit and free < 16:
        print(
            f"note: mergekit-moe is left out: {free:.0f} GB of memory are free, it takes 11 GB and "
            "the machine some"
        )
        mergekit = None
    elif not mergekit:
        print("note: mergekit-moe is left out: give --mergekit")
    source = with_tokenizer(a.source, a.work / "source")
    print("| task | with | time | CPU | peak memory |\n|---|---|---|---|---|")
    for task, by in commands(source, a.work, a.work / "out", mergekit, a.tokens).items():
        if a.only is None or task in a.only:
            show(task, compare(by, a.work / "out", a.rounds))
    shutil.rmtree(source)


if __name__ == "__main__":
    main()
