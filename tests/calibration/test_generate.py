"""Text that a model writes itself is a sample of its own distribution, mixed into other text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from surgery import demo
from surgery.calibration.generate import generate
from surgery.calibration.settings import Calibration
from surgery.errors import UsageError
from surgery.storage import open_checkpoint

DEMO = Path(demo.__file__).parent / "model"


def test_ids_are_those_of_the_stock_model() -> None:
    """The ids are those sampled by hand from the stock model with the same random numbers.

    That is at temperature 1, with nothing cut off and without an end.
    """
    ids = generate(open_checkpoint(DEMO), sequences=2, length=24)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    own, expected = torch.full((2, 1), model.config.bos_token_id), []
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for _ in range(24):
            chosen = torch.multinomial(model(own).logits[:, -1].softmax(-1), 1)
            own = torch.cat([own, chosen], dim=1)
            expected.append(chosen)
    assert torch.equal(ids, torch.cat(expected, dim=1))


def test_a_quarter_by_the_model_evenly_between_the_text() -> None:
    """The last rows are held out, and must have both kinds."""
    source = open_checkpoint(DEMO)
    mixed = Calibration(tokens=256, sequence_length=32, generated=0.25).sample(source)
    text = Calibration(tokens=192, sequence_length=32).sample(source)
    known = {tuple(row) for row in text.input_ids.tolist()}
    own = [i for i, row in enumerate(mixed.input_ids.tolist()) if tuple(row) not in known]
    assert tuple(mixed.input_ids.shape) == (8, 33) and own == [2, 6]
    assert set(mixed.input_ids[:, 0].tolist()) == set(text.input_ids[:, 0].tolist())
    assert mixed.source == "built-in text of 6 domains, and 2 of 8 sequences by the model itself"


def test_all_of_it_by_the_model() -> None:
    """No text is read then."""
    s = Calibration(tokens=64, sequence_length=32, generated=1).sample(open_checkpoint(DEMO))
    assert tuple(s.input_ids.shape) == (2, 33) and s.text


def test_more_than_all_is_refused() -> None:
    """A share beyond 1 is a mistake in the recipe."""
    with pytest.raises(UsageError, match=r"1\.5"):
        Calibration(generated=1.5)
