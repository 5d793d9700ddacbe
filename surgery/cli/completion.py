"""`surgery completion`."""

from __future__ import annotations

import click


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the completion script of a SHELL.

    \b
    Examples:
      surgery completion bash >> ~/.bashrc
      surgery completion zsh >> ~/.zshrc
      surgery completion fish > ~/.config/fish/completions/surgery.fish
    """
    from click.shell_completion import get_completion_class

    from surgery.cli import surgery

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(surgery, {}, "surgery", "_SURGERY_COMPLETE").source())
