"""Feed broken and hostile files to everything that reads them: one clear error each, or nothing.

  python benchmarks/fuzz.py                       # 105,000 inputs, of files, links and texts
  python benchmarks/fuzz.py --inputs 2000 --seed 7 --only config

Each input is a well-formed file in which one to four things were changed: bytes flipped, put in,
cut out; values of the JSON or YAML replaced by what no one expects, keys taken away or doubled.
What reads it may return or raise SurgeryError. Anything else is a finding, and so are ten seconds
of computing for one input, a minute of waiting, 1 GB of memory more than at the beginning, a file
that is opened outside the folder (and the installation), a process, a socket, and code that is
compiled from an input: all of it is watched through the interpreter's audit hook. Exits 1 with the
findings, each with the number that makes it again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import resource
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from surgery import api, finetune
from surgery.analysis.devices import parse_device
from surgery.analysis.saved_thresholds import thresholds
from surgery.analysis.weigh import weigh
from surgery.blocks.rules import RULES
from surgery.checkpoint import LazyTensor, make_plan
from surgery.checkpoint.config import parse_config
from surgery.checkpoint.header import make_header
from surgery.checkpoint.metadata import unread
from surgery.errors import SurgeryError
from surgery.families import locate
from surgery.operations.cast import cast
from surgery.operations.relufy import relufy
from surgery.operations.upcycle import upcycle
from surgery.report import card
from surgery.storage import finish, open_checkpoint, write
from surgery.storage.reader import INDEX
from surgery.storage.record import read_record
from surgery.workflow import recipe
from surgery.workflow.observer import Silent
from surgery.workflow.record import notes_of
from surgery.workflow.record import read_record as read_of_operations
from surgery.workflow.trust import require_trust
from surgery.workflow.verify import check_files, require_verifiable

SECONDS, WAIT = 10, 60  # of one input: of computing, and of all
MEMORY = 1 << 30  # of all inputs
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    2**31,
    2**63,
    2**64,
    10**30,
    -(2**63),
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "0",
    "../../etc/passwd",
    "/dev/zero",
    "/etc/passwd",
    "a" * 5000,
    "\0",
    "\ud800",
    "é\u202e",
    "__import__('os').system('true')",
    "{{ 7 * 7 }}",
    [],
    {},
    [[]],
    [None],
    [0, 0],
    ["a"],
    {"a": {}},
    {"": None},
    [2**40, 2**40],
    list(range(300)),
)


# --- changing -------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if len(path) > 8:
        return
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in inner:
        yield from places(item, (*path, key))


def change_value(draw: random.Random, value: Any) -> Any:
    """`value` with one place of it changed."""
    path = draw.choice(list(places(value)))
    if not path:
        return copy.deepcopy(draw.choice(HOSTILE)) if draw.random() < 0.2 else value
    place = value
    for key in path[:-1]:
        place = place[key]
    kind, key = draw.randrange(6), path[-1]
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        place[str(draw.choice(HOSTILE))] = place.pop(key)
    elif kind == 2 and isinstance(place[key], int):
        place[key] += draw.choice([-1, 1, -8, 8, 2**32])
    elif kind == 3:
        for _ in range(draw.choice([3, 50, 2000])):
            place[key] = [place[key]] if draw.random() < 0.5 else {"a": place[key]}
    else:
        place[key] = copy.deepcopy(draw.choice(HOSTILE))
    return value


def change_bytes(draw: random.Random, data: bytes) -> bytes:
    data, at = bytearray(data), draw.randrange(len(data) + 1)
    kind = draw.randrange(5)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        data[at:at] = draw.choice(
            [
                b"\0",
                b"\xff\xfe",
                b"{",
                b'"',
                b"[" * 3000,
                b"]",
                b",",
                b"9" * 40,
                b"\n",
                draw.randbytes(16),
            ]
        )
    elif kind == 2:
        del data[at : at + draw.choice([1, 4, 100])]
    elif kind == 3:
        del data[at:]
    else:
        data[at : at + 8] = draw.choice(
            [bytes(8), b"\xff" * 8, (10**8).to_bytes(8, "little"), draw.randbytes(8)]
        )
    return bytes(data)


def changed(draw: random.Random, value: Any, dump: Callable[[Any], bytes]) -> bytes:
    """`value` with a few changes, as bytes."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        value = change_value(draw, value)
    try:
        data = dump(value)
    except RecursionError:
        data = b"[" * 5000
    for _ in range(draw.choice([0, 0, 0, 1, 2])):
        data = change_bytes(draw, data)
    return data


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode(errors="surrogatepass")


# --- what reads -----------------------------------------------------------------------------------

BLOCK = {
    "kind": "experts",
    "layers": [0],
    "mlp": "mlp",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "experts": 4,
    "width": 4,
    "top_k": 2,
    "shared_neurons": 0,
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 12,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "qwen3_moe",
    "gpt2",
    "falcon",
    "phi3",
    "olmo2",
)


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (12, 8),
        "lm_head.weight": (12, 8),
        "model.norm.weight": (8,),
    }
    for i in range(2):
        start = f"model.layers.{i}."
        found |= {
            f"{start}self_attn.{p}_proj.weight": (n, 8) for p, n in (("q", 8), ("k", 4), ("v", 4))
        }
        found |= {
            f"{start}self_attn.o_proj.weight": (8, 8),
            f"{start}mlp.down_proj.weight": (8, 16),
        }
        found |= {f"{start}mlp.{p}_proj.weight": (16, 8) for p in ("gate", "up")}
        found |= {f"{start}{p}_layernorm.weight": (8,) for p in ("input", "post_attention")}
    return found


HEADER = json.loads(make_header([(n, LazyTensor("BF16", s)) for n, s in shapes().items()])[8:])
NBYTES = max(entry["data_offsets"][1] for name, entry in HEADER.items() if name != "__metadata__")


def as_shard(header: Any) -> bytes:
    raw = as_json(header)
    return len(raw).to_bytes(8, "little") + raw + bytes(NBYTES)


class Room:
    """A folder with a small model, its files rewritten for each input."""

    def __init__(self, folder: Path) -> None:
        self.model, self.output = folder / "model", folder / "output"
        for path in (self.model, self.output):
            path.mkdir()
        self.whole = {"config.json": as_json(CONFIG), "model.safetensors": as_shard(HEADER)}
        self.put(self.model, **self.whole)
        record = {
            "name": "x",
            "source": {"location": "m", "revision": None},
            "command": "surgery upcycle m",
            "notes": ["a"],
            "exact": True,
            "layers": [0, 1],
            "calibration": [],
            "versions": {"torch": "2"},
            "fingerprint": "0" * 64,
            "verification": None,
            "shards": {
                "model.safetensors": {
                    "bytes": len(self.whole["model.safetensors"]),
                    "sha256": "0" * 64,
                    "crc32": "00000000 00000000",
                }
            },
        }
        self.record = record
        self.put(self.output, **self.whole)
        self.source = open_checkpoint(self.model)
        (step,) = upcycle(self.source, experts=2).steps
        record["recipe"] = [{"operation": step.operation, **step.parameters}]
        self.outside = folder / "outside" / "secret"
        self.outside.parent.mkdir()
        self.outside.write_bytes(SECRET)
        self.folder = folder

    def fresh(self, name: str) -> Path:
        """Return an empty folder; nothing is followed out of the last one."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def analysis(self) -> Path:
        """Return the analysis of the small model, which is made once."""
        path = self.folder / "analysis"
        if not path.exists():
            found = api.analyze(self.source, tokens=64, sequence_length=16)
            found.save(path, parse_device("h100"))
        return path

    @staticmethod
    def put(folder: Path, **files: bytes) -> None:
        for name, data in files.items():
            (folder / name).write_bytes(data)


def header(room: Room, draw: random.Random) -> None:
    """A shard whose header lies."""
    room.put(room.model, **{"model.safetensors": changed(draw, HEADER, as_shard)})
    make_plan(open_checkpoint(room.model))


def index(room: Room, draw: random.Random) -> None:
    """An index that names other files and tensors than there are."""
    (room.model / "model.safetensors").unlink(missing_ok=True)
    weight_map = dict.fromkeys(shapes(), "model-00001-of-00001.safetensors")
    value = {"metadata": {"total_size": NBYTES}, "weight_map": weight_map}
    files = {
        "config.json": room.whole["config.json"],
        "model-00001-of-00001.safetensors": room.whole["model.safetensors"],
        INDEX: changed(draw, value, as_json),
    }
    room.put(room.model, **files)
    try:
        make_plan(open_checkpoint(room.model))
    finally:
        (room.model / INDEX).unlink()
        (room.model / "model-00001-of-00001.safetensors").unlink()
        room.put(room.model, **room.whole)


def config(room: Room, draw: random.Random) -> None:
    """A config that is another model's, or nobody's: weighed, operated on and planned."""
    value = {**CONFIG, "model_type": draw.choice(FAMILIES)} if draw.random() < 0.3 else CONFIG
    if draw.random() < 0.1:
        value = {**value, "surgery_blocks": [BLOCK]}
    elif draw.random() < 0.1:
        value = {
            **value,
            draw.choice(
                ["text_config", "quantization_config", "auto_map", "surgery_blocks", "layer_types"]
            ): draw.choice(HOSTILE),
        }
    room.put(room.model, **room.whole)
    room.put(room.model, **{"config.json": changed(draw, value, as_json)})
    checkpoint = open_checkpoint(room.model)
    require_trust(checkpoint, False)
    for use in (
        lambda c: weigh(c, c.config),
        locate,
        lambda c: make_plan(relufy(c, repair="none")),
        lambda c: make_plan(upcycle(c, experts=2)),
        lambda c: make_plan(cast(c, "fp32")),
    ):
        with contextlib.suppress(SurgeryError):
            use(checkpoint)


def names(room: Room, draw: random.Random) -> None:
    """The same configs before the model's class, which is built from them without weights."""
    room.put(room.model, **room.whole)
    room.put(room.model, **{"config.json": changed(draw, CONFIG, as_json)})
    checkpoint = open_checkpoint(room.model)
    require_trust(checkpoint, False)
    require_verifiable(checkpoint, checkpoint)


RECIPE = {
    "source": "demo",
    "revision": None,
    "dtype": "bf16",
    "max_shard_size": "5GB",
    "verify": True,
    "push": {"repo": "a/b", "private": True},
    "calibration": {"tokens": 100, "sequence_length": 50},
    "operations": [
        {"operation": "relufy", "activation": "relu", "repair": "none", "layers": "0-1"},
        {"operation": "upcycle", "experts": 2, "top_k": 1},
        {"operation": "cast", "dtype": "fp16"},
    ],
}


def as_yaml(value: Any) -> bytes:
    import yaml

    return str(yaml.safe_dump(value, allow_unicode=True)).encode(errors="surrogatepass")


ALIASES = (
    b"a: &a [x, x]\n",
    b"b: &b [*a, *a, *a, *a, *a, *a, *a, *a]\n",
    b"&r [*r]\n",
    b"<<: *a\n",
    b"!!python/object/apply:os.system [true]\n",
    b"k: !!binary aGk=\n",
    b"? [1, 2]\n: 3\n",
    b"k: 2026-01-01\n",
    b"--- \n...\n---\n",
    b"k: 0x_\n",
    b"k: 1:60:1\n",
    b"%YAML 9.9\n---\n",
)


def recipes(room: Room, draw: random.Random) -> None:
    """A recipe, with --set; then applied to the small model."""
    data = changed(draw, RECIPE, as_yaml)
    if draw.random() < 0.3:
        data = draw.choice(ALIASES) + data if draw.random() < 0.5 else data + draw.choice(ALIASES)
    key = draw.choice(
        [
            "operations.0.activation",
            "source",
            "operations.9.x",
            "a.b.c",
            "operations.1.experts",
            "...",
            "",
            "operations",
        ]
    )
    changes = [f"{key}={draw.choice(HOSTILE)}"] if draw.random() < 0.2 else []
    found = recipe.parse(data.decode(errors="replace"), "recipe.yaml", changes)
    recipe.dump(found)
    if not any(isinstance(v, str) and "/" in v for o in found.operations for v in o.values()):
        make_plan(recipe.apply(found, room.source))


def record(room: Room, draw: random.Random) -> None:
    """A surgery.json that was not written by us."""
    room.put(room.output, **{"surgery.json": changed(draw, room.record, as_json)})
    found = read_record(room.output)
    check_files(room.source, room.output, found, (), Silent())


# --- files that are not ours ----------------------------------------------------------------------

SECRET = b"the content of somebody's file"
SIDE = ("LICENSE", "NOTICE", "tokenizer.json", "tokenizer_config.json", "merges.txt", "a.py")


class Leak(Exception):  # noqa: N818 - a finding, not an error of surgery
    """A file of somebody's was copied, or written to."""


def plant(draw: random.Random, path: Path, outside: Path) -> None:
    """Put a link, a pipe, a folder or a file where a file is expected."""
    path.parent.mkdir(exist_ok=True)
    targets = (outside, outside.parent, "/dev/zero", "/proc/self/environ", path.name, "nowhere")
    kind = draw.randrange(10)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.write_bytes(draw.randbytes(20))
    elif kind == 3:
        path.touch()
        os.truncate(path, 10**12)
    else:
        target = Path(draw.choice(targets))
        relative = target.is_absolute() and draw.random() < 0.5
        path.symlink_to(os.path.relpath(target, path.parent) if relative else target)


def links(room: Room, draw: random.Random) -> None:
    """A source with links, pipes and endless files in it."""
    folder = room.fresh("linked")
    room.put(folder, **room.whole)
    for name in draw.sample((*SIDE, "README.md", "config.json", "model.safetensors"), 2):
        (folder / name).unlink(missing_ok=True)
        plant(draw, folder / name, room.outside)
    plan = make_plan(open_checkpoint(folder))
    if any(SECRET in data for data in plan.small.values()):
        raise Leak("a file from outside is in the plan")


OURS = (
    "config.json",
    "model.safetensors",
    "surgery.json",
    "README.md",
    "recipe.yaml",
    "finetune",
    ".config.json.partial",
    ".model.safetensors.partial",
    ".surgery.json.partial",
    ".model.safetensors.digest",
    ".surgery.lock",
    "surgery.partial.json",
    ".README.md.partial",
)


def planted(room: Room, draw: random.Random) -> None:
    """An output in which somebody has put links in the place of what will be written."""
    folder = room.fresh("planted")
    plan = make_plan(room.source)
    begun = json.dumps({"fingerprint": plan.fingerprint}).encode()
    room.put(folder, **{"surgery.partial.json": begun})
    for name in draw.sample(OURS, 2):
        (folder / name).unlink(missing_ok=True)
        plant(draw, folder / name, room.outside)
    try:
        write(plan, folder, source=room.source)
        small = {"README.md": b"card", "recipe.yaml": b"recipe", "finetune/finetune.py": b"script"}
        finish(folder, {**room.record, "fingerprint": plan.fingerprint}, small)
    finally:
        if room.outside.read_bytes() != SECRET:
            raise Leak("a file outside was written to")


# --- text of strangers ----------------------------------------------------------------------------

METADATA = {"license": "mit", "language": ["en"], "base_model": "a/b", "tags": ["x"], "n": 1}


def metadata(room: Room, draw: random.Random) -> None:
    """The front matter of a source's README.md."""
    data = changed(draw, METADATA, as_yaml)
    if draw.random() < 0.3:
        data = draw.choice(ALIASES) + data
    room.put(room.model, **room.whole, **{"README.md": b"---\n" + data + b"\n---\n# x\n"})
    try:
        source = open_checkpoint(room.model)
        unread(source)
        card.render(source, room.source, room.output, room.record)
    finally:
        (room.model / "README.md").unlink()


def templates(room: Room, draw: random.Random) -> None:
    """The fine-tune script and its launch files, made from a record and a config of strangers."""
    import ast

    import yaml

    room.put(room.output, **{"surgery.json": changed(draw, room.record, as_json)})
    found = read_of_operations(room.output)
    config = parse_config(changed(draw, CONFIG, as_json), "config.json")
    for name, data in finetune.files(found, config, room.output).items():
        if name.endswith(".py"):
            ast.parse(data)
        elif name.endswith(".yaml"):
            yaml.safe_load(data)


ANALYSIS = ("analysis.json", "analysis.safetensors")


def analyses(room: Room, draw: random.Random) -> None:
    """An analysis that was damaged, or is another model's."""
    folder = room.analysis()
    whole = {name: (folder / name).read_bytes() for name in ANALYSIS}
    try:
        if draw.random() < 0.7:
            report = json.loads(whole["analysis.json"])
            room.put(folder, **{"analysis.json": changed(draw, report, as_json)})
        else:
            data = change_bytes(draw, whole["analysis.safetensors"])
            room.put(folder, **{"analysis.safetensors": data})
        thresholds(folder, room.source, draw.choice(list(RULES)), 0.5, (0, 1))
    finally:
        room.put(folder, **whole)


HEADS = ("lm_head.weight", "score.weight", "embed_out.weight", "classifier.weight")
CLASSES = ("LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaModel", "NoSuchModel", "")


def heads(room: Room, draw: random.Random) -> None:
    """Heads that are absent, tied, doubled, or of another class."""
    header, at = json.loads(json.dumps(HEADER)), NBYTES
    if draw.random() < 0.5:
        prefix = draw.choice(("module.", "_orig_mod.", "base_model.model.", "transformer."))
        header = {f"{prefix}{n}" if n[:2] != "__" else n: e for n, e in header.items()}
    for name in draw.sample(HEADS, draw.randrange(3)):
        rows = draw.choice((12, 2, 0))
        stop = at + rows * 16
        header[name if name not in header else f"extra.{name}"] = {
            "dtype": "BF16",
            "shape": [rows, 8],
            "data_offsets": [at, stop],
        }
        at = stop
    raw = as_json(header)
    shard = len(raw).to_bytes(8, "little") + raw + bytes(at)
    value = {**CONFIG, "architectures": [draw.choice(CLASSES)]}
    value["tie_word_embeddings"] = draw.choice((True, False, None, "yes"))
    room.put(room.model, **{"config.json": as_json(value), "model.safetensors": shard})
    try:
        checkpoint = open_checkpoint(room.model)
        for operate in (lambda c: relufy(c, repair="none"), lambda c: upcycle(c, experts=2)):
            notes_of(operate(checkpoint))
    finally:
        room.put(room.model, **room.whole)


TARGETS: dict[
    str, tuple[Callable[[Room, random.Random], None], float]
] = {  # and the part of the inputs
    "header": (header, 0.3),
    "index": (index, 0.15),
    "config": (config, 0.12),
    "names": (names, 0.005),
    "recipe": (recipes, 0.1),
    "record": (record, 0.125),
    "links": (links, 0.05),
    "planted": (planted, 0.03),
    "metadata": (metadata, 0.03),
    "templates": (templates, 0.03),
    "analyses": (analyses, 0.03),
    "heads": (heads, 0.03),
}


# --- watching -------------------------------------------------------------------------------------


class Watch:
    """What the interpreter's audit hook sees while an input is read."""

    def __init__(self, folder: Path) -> None:
        self.seen: list[str] = []
        self.on = False
        home = Path(recipe.__file__).resolve().parents[2]
        self.allowed = tuple(
            map(
                str,
                (
                    folder.resolve(),
                    home,
                    *map(Path, sysconfig.get_paths().values()),
                    sys.base_prefix,
                    "/proc",
                    "/dev/null",
                    tempfile.gettempdir(),
                ),
            )
        )
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path = arguments[0]
            if isinstance(path, str | bytes | os.PathLike):
                where = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - resolve() would open it
                self.seen += [] if where.startswith(self.allowed) else [f"opened {where!r}"]
        elif event in (
            "os.system",
            "os.exec",
            "subprocess.Popen",
            "socket.connect",
            "pickle.find_class",
        ):
            self.seen.append(f"{event} {arguments!r}"[:300])


def timed_out(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s of computing, or {WAIT} s in all")


def fuzz(
    inputs: int, seed: int, only: str | None, folder: Path
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return how the inputs of each target ended, and the findings."""
    room, watch = Room(folder), Watch(folder)
    signal.signal(signal.SIGALRM, timed_out)
    signal.signal(signal.SIGPROF, timed_out)
    counts: dict[str, dict[str, int]] = {}
    findings: list[str] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, (target, part) in TARGETS.items():
        if only not in (None, name):
            continue
        with contextlib.suppress(SurgeryError):
            target(room, random.Random(0))  # imports what it needs
        ended = counts.setdefault(name, {"read": 0, "refused": 0})
        for number in range(inputs if only else max(1, round(inputs * part))):
            draw = random.Random(f"{seed}/{name}/{number}")
            watch.seen, watch.on = [], True
            signal.alarm(WAIT)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                target(room, draw)
                ended["read"] += 1
            except SurgeryError:
                ended["refused"] += 1
            except Exception as e:
                where = "".join(traceback.format_tb(e.__traceback__)[-2:])
                findings.append(f"{name} {number}: {type(e).__name__}: {str(e)[:200]}\n{where}")
            finally:
                signal.alarm(0)
                signal.setitimer(signal.ITIMER_PROF, 0)
                watch.on = False
            findings += [f"{name} {number}: {what}" for what in watch.seen]
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if (after - before) * 1024 > MEMORY:
            findings.append(f"{name}: {(after - before) / 1e6:.1f} GB of memory")
        before = after
    return counts, findings


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--inputs", type=int, default=105_000)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--only", choices=list(TARGETS))
    a = p.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    start, cpu = time.perf_counter(), time.process_time()
    try:
        counts, findings = fuzz(a.inputs, a.seed, a.only, folder)
    finally:
        shutil.rmtree(folder)
    for name, ended in counts.items():
        print(
            f"{name:8} {sum(ended.values()):7,} inputs: {ended['read']:7,} read, "
            f"{ended['refused']:7,} refused"
        )
    total = sum(sum(e.values()) for e in counts.values())
    print(
        f"{total:,} inputs in {time.perf_counter() - start:.0f} s ({time.process_time() - cpu:.0f} "
        f"s CPU), {len(findings)} findings"
    )
    for found in {f.partition(": ")[2]: f for f in findings}.values():
        print(found)
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
