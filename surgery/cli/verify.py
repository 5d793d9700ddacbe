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
@click.option(
    "--allow-nonfinite",
    is_flag=True,
    help="Let a source pass whose logits are NaN or Inf: nothing can be compared with it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing: only the exit code tells.")
def verify_command(
    source: str,
    output: Path,
    revision: str | None,
    trust_remote_code: bool,
    allow_nonfinite: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Check OUTPUT, a folder that surgery wrote, against the SOURCE it was made from.

    The files must be whole, and names and shapes must fit the model class. Where the conversion
    claims to keep the function, the logits must agree to 1e-5 of their standard deviation, and a
    damaged copy must be caught. Any other conversion is measured, not judged: perplexity of both on
    two domains. Exits with 1 if a check fails. The result goes into OUTPUT/surgery.json.

    \b
    Examples:
      surgery verify ./llama ./llama-mixtral-8x-top2
      surgery verify Qwen/Qwen3-8B ./Qwen3-8B-relu --json
    """
    from surgery.cli import outcome, screen
    from surgery.storage import open_checkpoint
    from surgery.workflow.record import read_record
    from surgery.workflow.verify import verify_folder

    observer = screen.Bars(quiet=quiet or as_json)
    prefix = read_record(output)["source"].get("strip_prefix")
    checkpoint = open_checkpoint(source, revision=revision, strip_prefix=prefix)
    verification = verify_folder(
        checkpoint, output, trust_remote_code, observer, allow_nonfinite=allow_nonfinite
    )
    if as_json:
        screen.echo_json(verification.as_dict())
    elif not quiet:
        record = read_record(output)
        outcome.show_verification(verification.as_dict(), record)
        if verification.passed:
            outcome.show_next(output, record)
    if not verification.passed:
        outcome.report_failure(output)
    return 0 if verification.passed else 1
