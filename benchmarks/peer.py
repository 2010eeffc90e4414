"""One small hybrid in both implementations: ours, and transformers' NemotronHForCausalLM with the same weights."""

import torch
from torch import nn

from titan_nemotron.checkpoint.load import hub_tensors
from titan_nemotron.models.layers.init import initialize
from titan_nemotron.models.nemotron3 import FAMILY
from titan_nemotron.models.nemotron3.config import Nemotron3Config

# About 20 M parameters with every kind of block, MTP left out because transformers has none.
HYBRID = Nemotron3Config(
    pattern="MEM*EMEM*E",
    vocab_size=8192,
    hidden_size=384,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    mamba_num_heads=12,
    mamba_head_dim=64,
    n_groups=2,
    ssm_state_size=64,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=384,
    moe_shared_expert_intermediate_size=512,
)


def pair(config: Nemotron3Config = HYBRID, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """(ours, transformers') in fp32 with equal weights; the logits are compared before anything is measured."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    ours = FAMILY.model(config)
    initialize(ours, seed)
    theirs = NemotronHForCausalLM(NemotronHConfig(**FAMILY.hub.config_to_hub(config, "float32")))
    # In memory transformers spells "backbone" as "model" and keeps a block's experts in one tensor.
    ours_by_hub_name = hub_tensors(ours.state_dict().items(), FAMILY.hub.tensors(config), {})
    fused = {name.replace("backbone.", "model."): tensor for name, tensor in ours_by_hub_name}
    for name in [name for name in fused if ".experts.0." in name]:
        experts = [fused.pop(name.replace(".experts.0.", f".experts.{e}.")) for e in range(config.n_routed_experts)]
        fused[name.replace(".experts.0.", ".experts.").removesuffix(".weight")] = torch.stack(experts)
    theirs.load_state_dict(fused)
    tokens = torch.randint(0, config.vocab_size, (1, 65), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        difference = (ours(tokens) - theirs(tokens).logits).abs().max().item()
    assert difference < 1e-3, f"the two models differ by {difference:.2e} before the benchmark"
    return ours, theirs
