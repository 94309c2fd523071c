import pytest
import torch
from configurations import model_config, with_values
from models import WINDOWS, build, random_tokens, small_model
from torch.utils.flop_counter import FlopCounterMode

from megatron_tape.ops.visibility import Visibility, causal_mask
from megatron_tape.planning.flops import flops_per_token, layer_works
from megatron_tape.position import BUILT_IN

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


def seen_pairs(model, layer):
    """Return how many pairs of query and key a layer's mask contains."""
    visibility = Visibility.of_whole(torch.zeros(1, model.seq_length))
    if model.window_of(layer) is not None:
        visibility = visibility.with_window(model.window_of(layer))
    S = model.seq_length
    return causal_mask(S, S, visibility.bounds_2BT, "cpu").sum().item()


@pytest.mark.parametrize("window", [1, 2, 5, 11])
@pytest.mark.parametrize("encoding", ["rope", "tape"])
def test_layers_with_a_window_count_the_pairs_inside_it(encoding, window):
    model = small_model(
        position_encoding=encoding, sliding_window=window, full_attention_every=2, num_layers=4
    )
    full = with_values(model, sliding_window=None, full_attention_every=None)
    S = model.seq_length
    width = model.num_attention_heads * model.head_dim
    for layer, (work, full_work) in enumerate(zip(layer_works(model), layer_works(full))):
        if layer % 2 == 1:
            assert work == full_work
            continue
        averages = 1 + (encoding == "tape")
        pairs = seen_pairs(model, layer)
        assert work.attention == (1 + averages) * (width * pairs // S)
        # All other work is that of a layer without a window.
        assert work.total - work.attention == full_work.total - full_work.attention


@pytest.mark.parametrize("encoding", [encoding.name for encoding in BUILT_IN])
def test_a_window_saves_flops_unless_it_contains_the_whole_sequence(encoding):
    model = small_model(position_encoding=encoding, seq_length=512)
    flops = flops_per_token(model)
    for window in (512, 1000):
        assert flops_per_token(with_values(model, sliding_window=window)) == flops
    several = [flops_per_token(with_values(model, sliding_window=W)) for W in (1, 16, 256, 480)]
    assert several == sorted({*several})
    assert several[-1] < flops


@pytest.mark.parametrize("case", WINDOWS)
def test_flops_with_all_pairs_equal_those_that_torch_counts(case):
    """The naive backend also multiplies hidden pairs. The difference is the work that a window
    saves.
    """
    model = small_model(**WINDOWS[case], attention_backend="naive")
    built, _ = build(model)
    tokens = random_tokens(1, model.seq_length + 1, model.vocab_size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        built(tokens[:, :-1], tokens[:, 1:])
    counted = counter.get_total_flops() / 2 / model.seq_length

    estimated = flops_per_token(model) / 6
    for layer, work in enumerate(layer_works(model)):
        pairs = seen_pairs(model, layer)
        if model.window_of(layer) is None:
            pairs = model.seq_length**2 / 2  # by convention
        estimated += work.attention * (model.seq_length**2 / pairs - 1)
    assert estimated == pytest.approx(counted, rel=0.01)
