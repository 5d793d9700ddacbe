"""Make experts of an MLP, lazily: cut it, scale it, make the copies differ, or take several models.

Gate and up of a part are rows, which the kernel copies. Its columns of down are computed, one
tensor at a time.

Shapes: F intermediate_size, H hidden_size; gate and up [F, H], down [H, F].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surgery.blocks.preconditions import require_plain, require_whole
from surgery.checkpoint import Checkpoint, LazyTensor, concatenate, constant, derive, normal
from surgery.errors import SurgeryError
from surgery.families import Mlp, locate
from surgery.families.targets import Shape, Target

if TYPE_CHECKING:
    import torch

_BY_NEURON = ("gate", "up", "gate_bias", "up_bias")  # fields of an Mlp with a row for each neuron
PIECE = 32 << 20  # bytes of matrices whose columns are moved at a time

# --- exact ----------------------------------------------------------------------------------------


def part(mlp: Mlp, start: int, stop: int) -> Mlp:
    """Return an MLP of neurons [start, stop). The bias of the output stays whole."""
    if (start, stop) == (0, mlp.width):
        return mlp
    down = _by_rows([mlp.down], lambda parts: _columns(parts[0], start, stop))
    kept: dict[str, Any] = {
        name: t.rows(start, stop) for name in _BY_NEURON if (t := getattr(mlp, name)) is not None
    }
    return dataclasses.replace(mlp, **kept, down=down)


def joined(experts: Sequence[Mlp]) -> Mlp:
    """Return one wide MLP with the neurons of all experts, one expert after another.

    The bias of its output is the mean of theirs.
    """
    first = experts[0]
    wide: dict[str, Any] = {
        name: concatenate([getattr(e, name) for e in experts])
        for name in _BY_NEURON
        if getattr(first, name)
    }
    biases = list(
        {e.down_bias.identity(): e.down_bias for e in experts if e.down_bias is not None}.values()
    )
    bias = _mean(biases, biases[0].dtype) if len(biases) > 1 else first.down_bias
    return dataclasses.replace(
        first, **wide, down=_by_rows([e.down for e in experts], _side_by_side), down_bias=bias
    )


def _by_rows(
    matrices: Sequence[LazyTensor], function: Callable[[Sequence[LazyTensor]], LazyTensor]
) -> LazyTensor:
    """Return `function` of the matrices.

    It is applied to a few rows at a time where the matrices are copied straight from their files.
    """
    height, size = matrices[0].shape[0], sum(t.nbytes for t in matrices)
    step = max(1, PIECE * height // size)
    if step >= height or not all(t.copied for t in matrices):
        return function(matrices)
    return concatenate(
        [
            function([t.rows(i, min(i + step, height)) for t in matrices])
            for i in range(0, height, step)
        ]
    )


def _columns(t: LazyTensor, start: int, stop: int) -> LazyTensor:
    return derive(
        f"columns {start}:{stop}",
        lambda t: t[:, start:stop].clone(),
        t,
        dtype=t.dtype,
        shape=(t.shape[0], stop - start),
    )


def _side_by_side(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Return matrices joined along their columns; one that is there several times is read once."""
    unique = {t.identity(): t for t in tensors}
    order = [list(unique).index(t.identity()) for t in tensors]
    shape = (tensors[0].shape[0], sum(t.shape[1] for t in tensors))

    def join(*values: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.cat([values[i] for i in order], 1)

    return derive(f"{order} along 1", join, *unique.values(), dtype=tensors[0].dtype, shape=shape)


def scaled(mlp: Mlp, factor: float) -> Mlp:
    """Return the MLP with its output multiplied by `factor`.

    Powers of two are exact in any dtype; for other factors `down` is kept in fp32.
    """
    if factor == 1:
        return mlp
    if factor == 0:
        return dataclasses.replace(mlp, down=constant(0.0, mlp.down.shape, mlp.down.dtype))
    exact = float(factor).hex().lstrip("-").startswith("0x1.0000000000000p")
    down = mlp.down.map(
        f"times {factor!r}", lambda t: t * factor, mlp.down.dtype if exact else "F32"
    )
    return dataclasses.replace(mlp, down=down)


def routed_experts(mlp: Mlp, target: Target, s: Shape) -> list[Mlp]:
    """Return the routed experts that make up one copy."""
    if target.shared and target.shared.whole:
        return [scaled(mlp, 0)]
    factor, w, first = 1.0 if target.groups else s.factor, s.expert_width, s.granularity - s.shards
    return [scaled(part(mlp, j * w, (j + 1) * w), factor) for j in range(first, s.granularity)]


def shared_expert(mlp: Mlp, target: Target, s: Shape) -> Mlp | None:
    """Return the shared expert, or None where there is none.

    It takes the first parts of the MLP. Where no part is shared but the class has a shared expert
    all the same, its output begins at zero.
    """
    if target.shared is None or not (s.shared or target.shared.required):
        return None
    if target.shared.whole:
        return mlp
    if not s.shared:
        return scaled(part(mlp, 0, s.expert_width), 0)
    gate = 2.0 if target.shared.gated else 1.0  # sigmoid(0) lets one half through
    return scaled(part(mlp, 0, s.shared * s.expert_width), gate * (0.5 if s.halved else 1.0))


# --- different ------------------------------------------------------------------------------------


def dropped(mlp: Mlp, ratio: float, key: str, seed: int) -> Mlp:
    """Draw ⌊ratio·F⌋ neurons anew: drop-upcycling (Nakamura et al. 2025, arXiv 2502.19261).

    They are the same neurons in gate, up and down, drawn from N(μ, σ²), where μ and σ are those of
    what they replace in each matrix or bias. The paper shares one set of indices between the three
    matrices; its published script draws one for each.
    """
    count = int(ratio * mlp.width)
    if not count:
        return mlp
    order = normal(f"{key} dropped", seed, 1.0, (mlp.width,), "F32")
    h = mlp.down.shape[0]
    recipe = f"{count} neurons drawn anew"

    def rows(t: torch.Tensor, order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        chosen, out = order.argsort(stable=True)[:count], t.clone()
        old = t[chosen].double()
        out[chosen] = (fresh * old.std() + old.mean()).to(t.dtype)
        return out

    def columns(t: torch.Tensor, order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        return rows(t.T, order, fresh).T

    def redraw(
        name: str, t: LazyTensor, function: Callable[..., torch.Tensor] = rows
    ) -> LazyTensor:
        fresh = normal(
            f"{key} {name}", seed, 1.0, (count, *([h] if len(t.shape) > 1 else [])), "F32"
        )
        return derive(recipe, function, t, order, fresh, dtype=t.dtype, shape=t.shape)

    drawn: dict[str, Any] = {
        name: redraw(name, t) for name in _BY_NEURON if (t := getattr(mlp, name)) is not None
    }
    return dataclasses.replace(mlp, **drawn, down=redraw("down", mlp.down, columns))


def noisy(mlp: Mlp, std: float, key: str, seed: int) -> Mlp:
    """Return the MLP with N(0, std²) added to every weight."""
    if not std:
        return mlp

    def add(name: str, t: LazyTensor) -> LazyTensor:
        noise = normal(f"{key} {name} noise", seed, std, t.shape, "F32")
        return derive(
            "plus, in F32",
            lambda a, b: (a.float() + b).to(a.dtype),
            t,
            noise,
            dtype=t.dtype,
            shape=t.shape,
        )

    return dataclasses.replace(
        mlp,
        gate=mlp.gate and add("gate", mlp.gate),
        up=add("up", mlp.up),
        down=add("down", mlp.down),
    )


# --- several models -------------------------------------------------------------------------------

_MAY_DIFFER = (
    "architectures",
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "attention_dropout",
    "max_position_embeddings",
    "tie_word_embeddings",
    "tokenizer_class",
    "vocab_size",
)


def require_kin(
    base: Checkpoint,
    other: Checkpoint,
    names: Iterable[str],
    effective: Callable[[Checkpoint], Mapping[str, Any]],
) -> None:
    """Require that `other` has the architecture of `base`, and its sizes in the tensors `names`.

    `effective` returns a checkpoint's config with the defaults filled in. Raises SurgeryError where
    they differ.
    """
    require_plain(other)
    require_whole(locate(other))
    a, b, where = effective(base), effective(other), other.source.location
    for key in sorted({*a, *b} - {*_MAY_DIFFER}):
        if a.get(key) != b.get(key):
            raise SurgeryError(
                f"the expert {where} has {key} {b.get(key)!r}, the base {a.get(key)!r}", _KIN
            )
    for name in names:
        shape, found = base.tensors[name].shape, other.tensors.get(name)
        if found is None:
            raise SurgeryError(f"the expert {where} has no tensor {name}, which the base has", _KIN)
        if found.shape != shape:
            raise SurgeryError(
                f"{name} of the expert {where} is {list(found.shape)}, the base's {list(shape)}",
                _KIN,
            )


_KIN = "experts are models fine-tuned from one base: the same architecture and sizes"


def average(base: Checkpoint, models: Sequence[Checkpoint]) -> Checkpoint:
    """Return `base` with every tensor the mean of the models' tensors.

    This is Branch-Train-MiX (Sukhbaatar et al. 2024, arXiv 2403.07816).
    """
    tensors = {
        name: _mean([m.tensors[name] for m in models], t.dtype) for name, t in base.tensors.items()
    }
    return base.replace(tensors=tensors)


def _mean(tensors: Sequence[LazyTensor], dtype: str) -> LazyTensor:
    def mean(*values: torch.Tensor) -> torch.Tensor:
        total = values[0].float()
        for value in values[1:]:
            total = total + value.float()
        return total / len(values)

    f32 = derive(
        f"mean of {len(tensors)} in F32", mean, *tensors, dtype="F32", shape=tensors[0].shape
    )
    return f32.cast(dtype)
