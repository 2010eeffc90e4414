"""A family of one's own: a small transformer without positional embedding."""

from examples.nope_gpt import hub
from examples.nope_gpt.model import NopeGPT, NopeGPTConfig
from titan_nemotron.models.family import Family

FAMILY = Family(
    name="nope_gpt",
    config=NopeGPTConfig,
    model=NopeGPT,
    flavors={"small": NopeGPTConfig(vocab_size=2048, hidden_size=96, num_layers=3, num_attention_heads=4)},
    hub=hub,
)
