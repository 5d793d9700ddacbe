"""The command `surgery inspect`: weigh a checkpoint from its headers, or a bare config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surgery.cli.options import strip_prefix
from surgery.cli.paths import LOCATION, UserPath

if TYPE_CHECKING:
    from surgery.analysis.weigh import Weights

WEIGHTS = ("*.safetensors", "*.bin")


@click.command(
    "inspect", short_help="Weigh a model: parameters, FLOPs, bytes, milliseconds per token."
)
@click.argument("model", type=LOCATION, default=".")
@click.option(
    "--device",
    default="h100",
    show_default=True,
    metavar="NAME|RATES",
    help="The device: a name (h100, a100, mi300x, rtx4090, cpu, ...) or 3.35TB/s,989TFLOP/s.",
)
@click.option(
    "--batch",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Sequences decoded together.",
)
@click.option(
    "--dtype",
    metavar="NAME",
    help="Count weights as if stored in fp32, bf16, fp8, int4, mxfp4, ... [default: as stored]",
)
@click.option(
    "--context",
    default=0,
    type=click.IntRange(min=0),
    metavar="N",
    help="Count attention over N positions, and their KV cache at 2 bytes per element.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "--plot",
    "plot_file",
    type=UserPath(dir_okay=False),
    metavar="FILE",
    help="Draw the shares and the roofline to a .png, .svg or .pdf file.",
)
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@strip_prefix
def inspect_command(
    model: str,
    device: str,
    batch: int,
    dtype: str | None,
    context: int,
    as_json: bool,
    plot_file: Path | None,
    revision: str | None,
    strip_prefix: str | None,
) -> None:
    """Weigh MODEL without reading its weights.

    Shows the parameters and share of attention, MLPs, routers, norms and embeddings; the active
    parameters, FLOPs and bytes of one token; the least time it takes; and the batch from which the
    MLPs are compute-bound.

    MODEL is a folder, a .safetensors file, a Hub id (headers are fetched, never weights) or a
    config.json.

    \b
    Examples:
      surgery inspect meta-llama/Llama-2-70b-hf --device h100
      surgery inspect ./checkpoint --batch 32 --context 8192
      surgery inspect config.json --device 1TB/s,165TFLOP/s --dtype int4
      surgery inspect openai/gpt-oss-120b --json
      surgery inspect ./checkpoint --plot weights.png
    """
    from surgery.analysis.devices import decode, parse_device
    from surgery.cli.screen import echo_json, show
    from surgery.report import inspection

    step_device = parse_device(device)
    weights, name = _weigh(model, revision, strip_prefix)
    step = decode(weights, step_device, batch=batch, dtype=dtype, context=context)
    if plot_file:
        inspection.plot(weights, step, name, plot_file)
    if as_json:
        echo_json(inspection.as_dict(weights, step))
    else:
        show(inspection.render(weights, step, name))


def _weigh(model: str, revision: str | None, prefix: str | None) -> tuple[Weights, str]:
    """Return the weights, and what to call the model."""
    from surgery.analysis.weigh import shapes_of, weigh
    from surgery.files import expanded, is_url

    elsewhere = is_url(model) or "::" in model
    if not elsewhere and (config_file := _bare_config(expanded(model))):
        config = _read(config_file)
        own = config_file.stem
        folder = config_file.resolve().parent.name
        name = config.get("_name_or_path") or (own if own != "config" else folder)
        return weigh(shapes_of(config), config), name
    from surgery.storage import open_checkpoint

    checkpoint = open_checkpoint(model, revision=revision, strip_prefix=prefix)
    location = Path(checkpoint.source.location)
    name = location.resolve().name if location.exists() else str(checkpoint.source.location)
    return weigh(checkpoint, checkpoint.config), name


def _bare_config(path: Path) -> Path | None:
    """Return the path of config.json if there are no weights beside it."""
    from surgery.files import require_within
    from surgery.storage.local import places

    if path.suffix == ".json":
        return path
    inside = path / "config.json"
    if not inside.is_file() or any(any(path.glob(p)) for p in WEIGHTS):
        return None
    return require_within(inside, places(path))


def _read(path: Path) -> Mapping[str, Any]:
    """Return a config.json, checked."""
    from surgery.checkpoint.config import parse_config
    from surgery.errors import SurgeryError
    from surgery.files import JSON_LIMIT, content

    try:
        found = parse_config(content(path, JSON_LIMIT), str(path))
    except FileNotFoundError as error:
        hint = "give a folder, a Hub id or a config.json"
        raise SurgeryError(f"{path} does not exist", hint) from error
    if "model_type" not in found:
        hint = "give the config.json of a Hugging Face checkpoint"
        raise SurgeryError(f"{path} has no model_type", hint)
    return found
