"""Checkpoints with blocks, each made once."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from custom_blocks import Workshop

    return Workshop(tmp_path_factory.mktemp("custom-blocks"))
