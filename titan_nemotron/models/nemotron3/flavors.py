"""Named sizes of Nemotron 3. Multi-token prediction is off where the released base has none."""

from titan_nemotron.models.nemotron3.config import Nemotron3Config

FLAVORS: dict[str, Nemotron3Config] = {
    # Every part of the family at a size that trains on two CPU cores.
    "debug": Nemotron3Config(
        pattern="MEM*EME",
        vocab_size=4096,
        hidden_size=192,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        mamba_num_heads=12,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=32,
        chunk_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        moe_shared_expert_intermediate_size=384,
        moe_latent_size=96,
        mtp_blocks=1,
        mtp_depths=2,
    ),
    # The same at a size that learns something in minutes on two CPU cores.
    "tiny": Nemotron3Config(
        pattern="MEM*E",
        vocab_size=2048,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        mamba_num_heads=4,
        mamba_head_dim=32,
        n_groups=1,
        ssm_state_size=16,
        chunk_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=128,
        moe_latent_size=32,
        mtp_blocks=1,
        mtp_depths=2,
    ),
    "nano_30b": Nemotron3Config(
        pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        initializer_range=0.0173,
    ),
    "super_120b": Nemotron3Config(
        pattern="MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        hidden_size=4096,
        initializer_range=0.014,
        mamba_num_heads=128,
        n_routed_experts=512,
        num_experts_per_tok=22,
        moe_intermediate_size=2688,
        moe_shared_expert_intermediate_size=5376,
        moe_latent_size=1024,
        routed_scaling_factor=5.0,
        mtp_blocks=1,
        mtp_depths=2,
    ),
    "ultra_550b": Nemotron3Config(
        pattern=(
            "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*"
            "EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
        ),
        hidden_size=8192,
        initializer_range=0.0099,
        num_attention_heads=64,
        mamba_num_heads=256,
        n_routed_experts=512,
        num_experts_per_tok=22,
        moe_intermediate_size=5120,
        moe_shared_expert_intermediate_size=10240,
        moe_latent_size=2048,
        routed_scaling_factor=5.0,
        mtp_blocks=1,
        mtp_depths=2,
    ),
}
