"""The texts that quality is measured on, by name, as a person knows them."""

from __future__ import annotations

TEXTS = {"evaluation": "held-out speeches", "second": "another domain"}
