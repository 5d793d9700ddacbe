"""A folder that is no checkpoint is called by its kind, with the command that makes one of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import write_llama

from surgery.errors import SurgeryError
from surgery.storage import open_checkpoint

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
ADAPTER = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "meta/base"})
CONFIG = json.dumps({"model_type": "llama"})

# The files of a folder, and words of the error.
FOLDERS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "nothing": ({}, ("no config.json in", "give the folder that holds config.json")),
    "no weights": ({"config.json": CONFIG}, ("no weights in", "model.safetensors")),
    "a LoRA adapter": (
        {"adapter_config.json": ADAPTER, "adapter_model.safetensors": ""},
        ("adapter (LoRA or the like) for meta/base", "load meta/base", "merge_and_unload"),
    ),
    "a LoRA adapter with a config": (
        {"config.json": CONFIG, "adapter_config.json": ADAPTER, "adapter_model.bin": ""},
        ("no weights", "adapter (LoRA or the like) for meta/base"),
    ),
    "an adapter alone": ({"adapter_model.safetensors": ""}, ("for its base model",)),
    "an adapter of a damaged config": (
        {"adapter_config.json": "{", "adapter_model.safetensors": ""},
        ("for its base model",),
    ),
    "a Trainer checkpoint of DeepSpeed": (
        {
            "config.json": CONFIG,
            "zero_to_fp32.py": "",
            "trainer_state.json": "{}",
            "rng_state_0.pth": "",
            "global_step500/mp_rank_00_model_states.pt": "",
        },
        ("DeepSpeed ZeRO checkpoint", "python zero_to_fp32.py . merged"),
    ),
    "a folder of global_step": (
        {"global_step500/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": "", "latest": "x"},
        ("DeepSpeed ZeRO checkpoint", "zero_to_fp32.py"),
    ),
    "inside global_step": (
        {"bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": ""},
        ("DeepSpeed ZeRO checkpoint",),
    ),
    "DCP": (
        {".metadata": "", "__0_0.distcp": "", "__1_0.distcp": ""},
        ("torch.distributed.checkpoint", "dcp_to_torch FOLDER model.pt", "dcp_to_torch_save"),
    ),
    "a Trainer checkpoint of FSDP": (
        {
            "config.json": CONFIG,
            "pytorch_model_fsdp_0/.metadata": "",
            "pytorch_model_fsdp_0/__0_0.distcp": "",
            "optimizer_0/__0_0.distcp": "",
            "trainer_state.json": "{}",
        },
        ("torch.distributed.checkpoint", "dcp_to_torch_save"),
    ),
    "Megatron": (
        {"latest_checkpointed_iteration.txt": "100", "iter_0000100/common.pt": ""},
        ("Megatron checkpoint",),
    ),
    "Mistral's form": (
        {"consolidated.safetensors": "", "tekken.json": "{}"},
        ("a part of a model in the original form", "(consolidated.safetensors)", "params.json"),
    ),
    "Meta's form": (
        {"params.json": "{}", "tokenizer.model": ""},
        ("a part of a model in the original form", "(params.json)", "Hugging Face version"),
    ),
    "Meta's form with a config": (
        {"config.json": CONFIG, "consolidated.00.pth": ""},
        ("no weights", "original form"),
    ),
    "GGUF": ({"model-Q4_K_M.gguf": ""}, ("model-Q4_K_M.gguf", "GGUF is an inference format")),
    "GGUF with a config": (
        {"config.json": CONFIG, "model-q8_0.gguf": ""},
        ("no weights", "GGUF is an inference format"),
    ),
    "MLX": ({"config.json": CONFIG, "weights.npz": ""}, ("MLX model (weights.npz)",)),
    "quantised MLX": (
        {
            "config.json": json.dumps(
                {"model_type": "llama", "quantization": {"group_size": 64, "bits": 4}}
            ),
            "model.safetensors": "",
        },
        ("is a quantised MLX model (4 bits)", "made from"),
    ),
    "TensorFlow": ({"config.json": CONFIG, "tf_model.h5": ""}, ("TensorFlow weights",)),
    "Flax": ({"config.json": CONFIG, "flax_model.msgpack": ""}, ("Flax weights",)),
    "ONNX": ({"config.json": CONFIG, "onnx/model.onnx": ""}, ("ONNX model (onnx/model.onnx)",)),
    "diffusers": (
        {"model_index.json": "{}", "text_encoder/config.json": CONFIG},
        ("pipeline of diffusers",),
    ),
    "checkpoints of a training": (
        {"checkpoint-500/config.json": CONFIG, "checkpoint-1000/config.json": CONFIG},
        ("models inside", "FOLDER/checkpoint-1000, FOLDER/checkpoint-500"),
    ),
    "the state of a training": (
        {"config.json": CONFIG, "optimizer.pt": "", "rng_state.pth": "", "scheduler.pt": ""},
        ("state of a training (optimizer.pt) without the weights", "save_pretrained"),
    ),
    "a cached model": (
        {
            "refs/main": "abc",
            "blobs/0123": "{}",
            "snapshots/abc/config.json": CONFIG,
            "snapshots/def/config.json": CONFIG,
        },
        ("in the cache of the Hub", "FOLDER/snapshots/abc, FOLDER/snapshots/def"),
    ),
    "a cache": (
        {"models--Qwen--Qwen3-8B/refs/main": "", "models--gpt2/refs/main": "", "version.txt": "1"},
        ("a cache of the Hub", "like Qwen/Qwen3-8B, gpt2"),
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_is_called_by_its_kind(kind: str, tmp_path: Path) -> None:
    files, words = FOLDERS[kind]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(SurgeryError) as caught:
        open_checkpoint(tmp_path)
    told = f"{caught.value.message}. {caught.value.hint}".replace(str(tmp_path), "FOLDER")
    for word in words:
        assert word in told
    assert "download" not in told and caught.value.hint


def test_a_file_is_called_by_its_kind(tmp_path: Path) -> None:
    """A single file is named, and the others of its folder do not hide what it is."""
    folder = write_llama(tmp_path / "m")
    (folder / "q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(SurgeryError) as caught:
        open_checkpoint(folder / "q4.gguf")
    assert "GGUF is an inference format" in caught.value.hint


def test_training_state_beside_a_model_is_no_fault(tmp_path: Path) -> None:
    """A checkpoint of the Trainer is a model, whatever lies beside it."""
    folder = write_llama(tmp_path / "checkpoint-500")
    for name in ("optimizer.pt", "rng_state.pth", "zero_to_fp32.py", "global_step500/states.pt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")
    assert "model.norm.weight" in open_checkpoint(folder).tensors


@pytest.mark.parametrize(
    "name",
    [
        "model-00002-of-00003.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
    ],
)
def test_a_pointer_of_git_lfs_says_git_lfs_pull(name: str, tmp_path: Path) -> None:
    """A pointer in the place of a tokenizer would be copied into the output as it is."""
    folder = write_llama(tmp_path / "m", shards=3)
    (folder / name).write_text(POINTER)
    with pytest.raises(SurgeryError) as caught:
        open_checkpoint(folder)
    assert caught.value.message == f"{name} is a pointer of Git LFS, and not the file itself"
    assert "git lfs pull" in caught.value.hint


def test_a_legacy_pointer(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_text(POINTER)
    with pytest.raises(SurgeryError, match=r"pytorch_model\.bin is a pointer of Git LFS"):
        open_checkpoint(folder)


def test_a_pointer_that_nothing_reads_is_no_fault(tmp_path: Path) -> None:
    """Half a clone is enough where the other half is not needed."""
    folder = write_llama(tmp_path / "m")
    (folder / "original").mkdir()
    for name in ("original/consolidated.00.pth", "model-q4.gguf", "logo.png"):
        (folder / name).write_text(POINTER)
    assert "model.norm.weight" in open_checkpoint(folder).tensors
