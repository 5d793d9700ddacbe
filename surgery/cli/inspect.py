"""`surgery inspect`: weigh a checkpoint from its headers, or a bare config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from surgery.analysis.weigh import Weights

WEIGHTS = ("*.safetensors", "*.bin")


@click.command(
    "inspect", short_help="Weigh a model: parameters, FLOPs, bytes, milliseconds per token."
)
@click.argument("model", default=".")
@click.option(
    "--device",
    default="h100",
    show_default=True,
    metavar="NAME|RATES",
    help="A device by name (h100, a100, mi300x, rtx4090, cpu, ...) or as 3.35TB/s,989TFLOP/s.",
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
    help="Bytes per weight as if stored so: fp32, bf16, fp8, int4, mxfp4, ... [default: as stored]",
)
@click.option(
    "--context",
    default=0,
    type=click.IntRange(min=0),
    metavar="N",
    help="Count attention over N positions, and their KV cache at 2 bytes an element.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw shares and roofline to a .png or .svg.",
)
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
def inspect_command(
    model: str,
    device: str,
    batch: int,
    dtype: str | None,
    context: int,
    as_json: bool,
    plot_file: Path | None,
    revision: str | None,
) -> None:
    """Weigh MODEL without reading its weights: parameters and share of attention, MLPs, routers,
    norms and embeddings; active parameters, FLOPs and bytes of one token; the time it takes at
    best; the batch where MLPs turn compute-bound.

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
    import json

    from surgery.analysis.devices import decode, parse_device
    from surgery.report import inspection

    step_device = parse_device(device)
    weights, name = _weigh(model, revision)
    step = decode(weights, step_device, batch=batch, dtype=dtype, context=context)
    if plot_file:
        inspection.plot(weights, step, name, plot_file)
    if as_json:
        click.echo(json.dumps(inspection.as_dict(weights, step), indent=2))
    else:
        _print(inspection.render(weights, step, name))


def _print(report: Any) -> None:
    from rich.console import Console

    terminal = Console(highlight=False)
    # A pipe has no width: rich would assume 80 columns and wrap the tables.
    (terminal if terminal.is_terminal else Console(highlight=False, width=100)).print(report)


def _weigh(model: str, revision: str | None) -> tuple[Weights, str]:
    """The weights, and what to call the model."""
    from surgery.analysis.weigh import shapes_of, weigh

    if config_file := _bare_config(Path(model)):
        config = _read(config_file)
        named = config.get("_name_or_path") or (
            config_file.stem if config_file.stem != "config" else config_file.resolve().parent.name
        )
        return weigh(shapes_of(config), config), named
    from surgery.storage import open_checkpoint

    checkpoint = open_checkpoint(model, revision=revision)
    location = Path(checkpoint.source.location)
    return weigh(
        checkpoint, checkpoint.config
    ), location.resolve().name if location.exists() else str(checkpoint.source.location)


def _bare_config(path: Path) -> Path | None:
    """The config.json where there is nothing else to weigh."""
    if path.suffix == ".json":
        return path
    inside = path / "config.json"
    return inside if inside.is_file() and not any(any(path.glob(p)) for p in WEIGHTS) else None


def _read(path: Path) -> Mapping[str, Any]:
    import json

    from surgery.checkpoint.config import check
    from surgery.errors import SurgeryError

    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise SurgeryError(
            f"{path} does not exist", "give a folder, a Hub id or a config.json"
        ) from error
    except json.JSONDecodeError as error:
        raise SurgeryError(
            f"{path} is not JSON: {error}", "give the model's config.json"
        ) from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise SurgeryError(
            f"{path} has no model_type", "give the config.json of a Hugging Face checkpoint"
        )
    return check(config, str(path))
