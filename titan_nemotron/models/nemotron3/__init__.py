"""Nemotron 3: hybrids of Mamba-2, attention, (Latent)MoE and MLP blocks with multi-token prediction."""

from titan_nemotron.models.family import Family
from titan_nemotron.models.nemotron3 import hub
from titan_nemotron.models.nemotron3.config import Nemotron3Config
from titan_nemotron.models.nemotron3.flavors import FLAVORS
from titan_nemotron.models.nemotron3.model import Nemotron3

FAMILY = Family(name="nemotron3", config=Nemotron3Config, model=Nemotron3, flavors=FLAVORS, hub=hub)
