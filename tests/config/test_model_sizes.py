from configurations import model_config, with_values

from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.parameters import parameter_count

SIZES = dict(
    num_layers=3,
    hidden_size=8,
    ffn_hidden_size=5,
    num_attention_heads=4,
    seq_length=6,
    vocab_size=11,
)


def test_the_parameter_count_is_the_sum_over_all_matrices():
    model = model_config(**SIZES, num_query_groups=2, mlp_size=7)
    layer = 8 * (4 + 2 * 2) * 2 + 8 * 8 + 3 * 8 * 5 + 2 * 8
    tape = 2 * 4 + 7 * 8 + 7 * 2 + 2 * 7
    assert parameter_count(model) == 2 * 11 * 8 + 3 * layer + 2 * tape + 8
    for change, expected in (
        ({"position_encoding": "rope"}, -2 * tape),
        ({"tie_embeddings": True}, -11 * 8),
        ({"num_layers": 1}, -2 * (layer + tape)),
        ({"kv_channels": 6}, 3 * (8 * (4 + 2 * 2) + 4 * 8) * (6 - 2)),
        ({"qkv_bias": True}, 3 * (4 + 2 * 2) * 2),
        ({"qk_norm": True}, 3 * 2 * 2),
        ({"attention_output_gate": True}, 3 * 8 * 4 * 2),
    ):
        assert parameter_count(with_values(model, **change)) - parameter_count(model) == expected
    per_head = model_config(**SIZES, mlp_size=7, token_mixing="per_head")
    assert parameter_count(per_head) - parameter_count(
        with_values(per_head, token_mixing="full")
    ) == 2 * (4 - 16)


def test_the_flop_count_is_the_sum_over_all_matmuls():
    model = model_config(**SIZES, num_query_groups=2, mlp_size=7)
    matrices = 8 * (4 + 2 * 2) * 2 + 8 * 8 + 3 * 8 * 5
    rope_pairs = 3 * 4 * (2 + 2)
    tape_pairs = 3 * 4 * (2 + 4)
    update = 7 * 8 + 2 * 2 * 7 + 2 * 2 * 2 + 4 * 2 * 2
    assert flops_per_token(model) == 6 * (
        3 * matrices + 2 * (tape_pairs + update) + rope_pairs + 8 * 11
    )
    rope = with_values(model, position_encoding="rope")
    assert flops_per_token(rope) == 6 * (3 * matrices + 3 * rope_pairs + 8 * 11)
