from configurations import model_config, with_values

from megatron_tape.planning.flops import flops_per_token

SIZES = dict(
    num_layers=3,
    hidden_size=8,
    ffn_hidden_size=5,
    num_attention_heads=4,
    seq_length=6,
    vocab_size=11,
)


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
