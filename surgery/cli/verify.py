"""`surgery verify`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("verify")
@click.argument("source")
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--revision", help="Branch, tag or commit of SOURCE on the Hub.")
@click.option(
    "--trust-remote-code", is_flag=True, help="Let code that comes with the checkpoints run."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quiet", "-q", is_flag=True, help="Only the exit code.")
def verify_command(
    source: str,
    output: Path,
    revision: str | None,
    trust_remote_code: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Prove OUTPUT, a folder that surgery wrote, against the SOURCE it was made from: the files are
    whole, names and shapes fit the model class; where the conversion claims exactness, the fp32
    logits agree to 1e-5 and a damaged copy is caught; otherwise the perplexity of both. Exits 1
    where a check fails. The result goes into OUTPUT/surgery.json.

    \b
    Examples:
      surgery verify ./llama ./llama-mixtral-8x-top2
      surgery verify Qwen/Qwen3-8B ./Qwen3-8B-relu --json
    """
    from surgery.cli import screen
    from surgery.storage import open_checkpoint
    from surgery.workflow.verify import verify_folder

    observer = screen.Bars(quiet=quiet or as_json)
    verification = verify_folder(
        open_checkpoint(source, revision=revision), output, trust_remote_code, observer
    )
    if as_json:
        screen.echo_json(verification.as_dict())
    elif not quiet:
        screen.show_verification(verification.as_dict())
    if not verification.passed:
        screen.report_failure(output)
    return 0 if verification.passed else 1
