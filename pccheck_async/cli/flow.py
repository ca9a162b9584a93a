"""Docstrings as help that fills the terminal's width."""

from __future__ import annotations

import inspect

import typer

__all__ = ["flow_help"]


def flow_help(app: typer.Typer) -> None:
    """Make a line of each paragraph of the commands' help: what shows it keeps a docstring's line breaks."""
    for command in app.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            flow_help(group.typer_instance)
