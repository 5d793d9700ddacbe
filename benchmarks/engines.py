"""Run exported models in llama.cpp: greedy tokens beside those of transformers, tokens a second.

  npm install --prefix DIR node-llama-cpp
  surgery relufy ~/models/smollm2-135m --out relufied
  python benchmarks/engines.py relufied --node-modules DIR/node_modules --types f32 bf16 q8_0

Each type is exported to a temporary folder and runs on the CPU through node-llama-cpp, with keys
and values cached in fp32 and without flash attention, which rounds to fp16. The f32 file must give
the tokens that transformers gives in fp32, as far as transformers prefers its token by more than
--margin: nearer ones are decided by the order of sums. Other types round activations too, so their
tokens are shown and judged by nobody. Exits 1 where a token of f32 differs, 2 where a step fails,
and 0 with a word where no engine is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from llama_cpp import PROMPT, run

GREEDY = """
import {getLlama} from "node-llama-cpp";
const [modelPath, wanted, threads, ...prompt] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads)});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({
    contextSize: 256, threads: Number(threads), flashAttention: false,
    experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32",
});
const tokens = [], times = [];
const sequence = context.getSequence();
for await (const token of sequence.evaluate(prompt.map(Number), {temperature: 0})) {
    tokens.push(token);
    times.push(performance.now());
    if (tokens.length >= Number(wanted)) break;
}
const seconds = (times[times.length - 1] - times[0]) / 1000;
const text = model.tokenize(process.env.SURGERY_TEXT ?? "");
console.log(JSON.stringify({tokens, rate: (tokens.length - 1) / seconds, text}));
process.exit(0);
"""
# Digits, contractions, spaces and other scripts are where pre-tokenizers differ.
TEXT = "I've 12,345 dogs;  they'll cost\n\n\t$9.99 – naïve, Straße, привет, 你好 🙂\nEND"


def in_transformers(folder: Path, wanted: int) -> tuple[list[int], list[int], list[float]]:
    """Return the ids of the prompt, the greedy ids that follow, and how far each is ahead."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=wanted,
        min_new_tokens=wanted,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits)[:, 0].topk(2).values
    new = out.sequences[0, ids.shape[1] :].tolist()
    return ids[0].tolist(), new, (best[:, 0] - best[:, 1]).tolist()


def in_llama_cpp(a: argparse.Namespace, kind: str, prompt: list[int]) -> dict[str, Any]:
    """Return the greedy ids after a prompt, tokens a second, and the ids of `TEXT`."""
    import surgery

    os.environ["SURGERY_TEXT"] = TEXT
    with tempfile.TemporaryDirectory(dir=a.work) as work:
        model, script = Path(work, "model.gguf"), Path(work, "greedy.mjs")
        size = surgery.export(surgery.open(a.folder), model, type=kind).nbytes
        script.write_text(GREEDY)
        # Node looks for imports here.
        Path(work, "node_modules").symlink_to(a.node_modules.resolve())
        options = [str(a.tokens), str(a.threads), *map(str, prompt)]
        found: dict[str, Any] = json.loads(
            run([a.node, str(script), str(model), *options]).splitlines()[-1]
        )
    print(f"llama.cpp, {kind}, {size / 1e9:.2f} GB, {found['rate']:.1f} tokens/s", flush=True)
    return found


def agreement(expected: list[int], found: list[int], ahead: list[float], margin: float) -> str:
    """Return an error where a token differs that is no tie; else an empty text.

    Behind a tie the two go on from different texts, and nothing can be compared.
    """
    for i, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one != other:
            if ahead[i] > margin:
                return f"token {i} differs: transformers {one}, ahead by {ahead[i]:.3f}: {other}"
            print(f"the same {i} tokens, then a tie: {ahead[i]:.4f} between the first two")
            return ""
    print(f"the same {len(expected)} tokens")
    return ""


def is_installed(a: argparse.Namespace) -> bool:
    """Return whether node and node-llama-cpp are there."""
    if a.node_modules is None or not (a.node_modules / "node-llama-cpp").is_dir():
        return False
    try:
        return subprocess.run([a.node, "--version"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("folder", type=Path, help="a relufied checkpoint, tokenizer included")
    p.add_argument("--node-modules", type=Path, help="the folder that has node-llama-cpp")
    p.add_argument("--node", default="node")
    p.add_argument("--types", nargs="+", default=["f32"], help="as of `surgery export --type`")
    p.add_argument("--tokens", type=int, default=32)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--margin", type=float, default=1e-2, help="of logits; nearer ones are ties")
    p.add_argument("--work", type=Path, help="for temporary files (default: the system's)")
    a = p.parse_args()
    if not is_installed(a):
        print("no engine is installed: npm install --prefix DIR node-llama-cpp")
        return 0
    prompt, expected, ahead = in_transformers(a.folder, a.tokens)
    print(f"transformers: {expected}", flush=True)
    failed = [problem for kind in a.types if (problem := compare(a, kind, prompt, expected, ahead))]
    for problem in failed:
        print(problem, file=sys.stderr)
    return 1 if failed else 0


def compare(
    a: argparse.Namespace, kind: str, prompt: list[int], expected: list[int], ahead: list[float]
) -> str:
    """Run one type and print what it gives; return what is wrong with it, or an empty text."""
    import transformers

    found = in_llama_cpp(a, kind, prompt)
    tokenizer = transformers.AutoTokenizer.from_pretrained(a.folder)
    if found["text"] != tokenizer(TEXT, add_special_tokens=False).input_ids:
        return f"{kind}: the tokenizer divides a text differently: {found['text']}"
    if kind == "f32":
        return agreement(expected, found["tokens"], ahead, a.margin)
    print(f"{kind}: {found['tokens']}")
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
