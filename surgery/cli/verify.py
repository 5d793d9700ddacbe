"""`surgery verify`."""

from __future__ import annotations

from pathlib import Path

import click

from surgery.cli.paths import LOCATION, UserPath


@click.command("verify")
@click.argument("source", type=LOCATION)
@click.argument("output", type=UserPath())
@click.option("--revision", help="Branch, tag or commit of SOURCE on the Hub.")
@click.option(
    "--trust-remote-code", is_flag=True, help="Let code that comes with the checkpoints run."
)
@click.option(
    "--allow-nonfinite",
    is_flag=True,
    help="Let a source pass whose logits are NaN or Inf: nothing can be compared with it.",
)
@click.option(
    "--max-perplexity",
    type=float,
    metavar="TIMES",
    help="Fail where perplexity is more than so many times the source's, in the geometric mean "
    "over all domains. [default: what OUTPUT was made with]",
)
@click.option(
    "--text",
    type=LOCATION,
    multiple=True,
    metavar="PATH",
    help="Measure on this text too, a file, a .jsonl or a folder that nothing was fitted on; again "
    "for more.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    help="Tokens of each domain to measure quality on. [default: 512]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing: only the exit code tells.")
def verify_command(
    source: str,
    output: Path,
    revision: str | None,
    trust_remote_code: bool,
    allow_nonfinite: bool,
    max_perplexity: float | None,
    text: tuple[str, ...],
    tokens: int | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Check OUTPUT, a folder that surgery wrote, against the SOURCE it was made from.

    The files must be whole, and names and shapes must fit the model class. Where the conversion
    claims to keep the function, the logits must agree to 1e-5 of their standard deviation, and a
    damaged copy must be caught. Any other conversion is measured: perplexity of both on held-out
    text of every domain. Exits with 1 if a check fails, and where --max-perplexity is exceeded. The
    result goes into OUTPUT/surgery.json.

    \b
    Examples:
      surgery verify ./llama ./llama-mixtral-8x-top2
      surgery verify Qwen/Qwen3-8B ./Qwen3-8B-relu --max-perplexity 1.2 --text notes/
      surgery verify Qwen/Qwen3-8B ./Qwen3-8B-relu --json
    """
    from surgery.cli import outcome, screen
    from surgery.proof.require import Require
    from surgery.storage import open_checkpoint
    from surgery.workflow.record import read_record
    from surgery.workflow.request import Demands
    from surgery.workflow.verify import recorded_texts, verify_folder

    require = None if max_perplexity is None else Require(max_perplexity=max_perplexity)
    observer = screen.Bars(quiet=quiet or as_json)
    record = read_record(output)
    opened = {k: v for k, v in record["source"].items() if k in ("strip_prefix", "dequantize")}
    checkpoint = open_checkpoint(source, revision=revision, **opened)
    demands = Demands(
        trust_remote_code=trust_remote_code,
        allow_nonfinite=allow_nonfinite,
        require=require,
        texts=recorded_texts(record, output, text),
        tokens=tokens,
    )
    verification = verify_folder(checkpoint, output, demands, observer)
    record = read_record(output)
    if as_json:
        screen.echo_json(verification.as_dict())
    elif not quiet:
        outcome.show_verification(verification.as_dict(), record)
        if verification.passed:
            outcome.show_next(output, record)
            outcome.show_conclusion(record["verification"], record)
    if not verification.passed:
        outcome.report_failure(output, record)
    return 0 if verification.passed else 1
