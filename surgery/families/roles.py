"""The roles of tensors by their names: tables of patterns, of which the first match wins.

The row of a known family comes before the generic rules. A `model_type` that is in no table is
understood as far as its names are common ones. Both layouts of experts are covered: one tensor per
expert (`experts.3.up_proj.weight`) and fused experts (`experts.gate_up_proj`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache

from surgery.families.family import Family

# In the order of a report. `towers` are never run when text is decoded: other modalities and
# multi-token prediction.
ROLES = (
    "embedding",
    "head",
    "attention",
    "mixer",
    "mlp",
    "shared_experts",
    "routed_experts",
    "router",
    "norms",
    "other",
    "towers",
)
MLP_ROLES = ("mlp", "shared_experts", "routed_experts")
# Never multiplied; an embedding is a lookup of one row.
IDLE_ROLES = ("embedding", "towers")

LAYER = re.compile(
    r"^(?P<prefix>(?:[^.]+\.)*?(?:layers?|h|blocks?))\.(?P<index>[0-9]+)\.(?P<path>.+)$"
)
# What text never passes through: towers of other modalities with what leads from them into the
# language model, and multi-token prediction. In the names of tensors and of modules.
TOWERS = re.compile(
    r"(^|[._])(vision|visual|vit|sam|image|video|audio|speech|vqmodel|qformer|perceiver|resampler"
    r"|multi_modal|mm_projector|projector|connector|aligner|mtp|talker|code2wav)([._]|$)",
    re.IGNORECASE,
)
EXPERT = re.compile(r"experts\.([0-9]+)\.")
# The token embeddings, which are also the head where the checkpoint has no other.
TOKENS = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|embeddings)\.weight$")
DOWN = re.compile(r"(^|\.)(down_proj|w2|fc2|c_proj|dense_4h_to_h|output_linear|wo)([._]|$)")
GATED = re.compile(r"(^|\.)(gate_proj|gate_up_proj|w3|wi_1|input_linear)([._]|$)")

_NORM = r"(^|[._])(\w*[nN]orm\w*|ln\d?|ln_\w+)(\.\d+)?\.(weight|bias|scale)$"
IN_LAYER: tuple[tuple[str, str], ...] = (
    (_NORM, "norms"),
    (r"(^|\.)(linear_attn|mamba|ssm|rwkv)\.", "mixer"),
    (r"(^|\.)(\w*attn|\w*attention|\w*Attention)\.|(^|\.)mixer\.[qkvo]_proj\.", "attention"),
    (r"(^|\.)(shared_experts?|shared_mlp)\.", "shared_experts"),
    (r"(^|\.)(router|gate|wg|shared_expert_gate|moe_statics)(\.|$)", "router"),
    (r"(^|\.)experts[._]|(^|\.)(block_sparse_moe|mlp)\.(input|output)_linear\.", "routed_experts"),
    (r"(^|\.)mixer\.(gate|up|down)_proj\.", "mlp"),
    (
        r"(^|\.)(mlp|feed_forward|ffn|ff|DenseReluDense|fc1|fc2|gate_proj|up_proj|down_proj)\.",
        "mlp",
    ),
    (r"(^|\.)(intermediate|output)\.dense\.", "mlp"),
    (r"(^|\.)(mixer|conv|temporal_block)\.", "mixer"),
)
OUTSIDE: tuple[tuple[str, str], ...] = (
    (_NORM, "norms"),
    (r"(^|\.)(norm\w*|ln_f)\.", "norms"),
    (r"(^|\.)ffns?\.[0-9]+\.", "mlp"),  # a list of MLPs beside one of attentions
    (r"(^|\.)(lm_head|embed_out|output)\.", "head"),
    # Tables of which a token reads a few rows.
    (r"(^|\.)(\w*embed\w*|wte|wpe|memory_values_\d+)(\.|$)", "embedding"),
)


def classifier(family: Family | None) -> Callable[[str, bool], str]:
    """Return a function that gives the role of a tensor, one of ROLES.

    Its arguments are the tensor's path and whether that is relative to a decoder layer.
    """
    inside = _compile((*_own_rules(family), *IN_LAYER) if family else IN_LAYER)
    outside = _compile(OUTSIDE)

    @cache
    def classify(path: str, in_layer: bool) -> str:
        rules = inside if in_layer else outside
        return next((role for pattern, role in rules if pattern.search(path)), "other")

    return classify


def _own_rules(family: Family) -> Iterator[tuple[str, str]]:
    """Yield a rule for each path in the row of the family."""
    paths = (
        (family.shared, "shared_experts"),
        (family.router, "router"),
        (family.experts, "routed_experts"),
        (family.gate, "mlp"),
        (family.up, "mlp"),
        (family.down, "mlp"),
    )
    for path, role in paths:
        if path:
            yield rf"^{re.escape(path)}(\.|$)", role


def _compile(rules: tuple[tuple[str, str], ...]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), role) for pattern, role in rules)
