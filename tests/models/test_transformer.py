"""The built-in transformer: what each position may see, what it weighs and what it costs."""

import math

import pytest
import torch
from torch.nn import functional

from headroom.models import builtin
from headroom.models.builtin import Rotary, Transformer

SMALL = {"layers": 2, "heads": 2, "width": 16}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _model(context: int = 12, outputs: int = 11, **args) -> Transformer:
    torch.manual_seed(0)
    model = builtin.build_model(
        "transformer", input_shape=(context,), outputs=outputs, args={**SMALL, **args}
    )
    assert isinstance(model, Transformer)
    return model


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_logits_are_given_at_every_position_of_rows_up_to_the_context(positions: str) -> None:
    model = _model(positions=positions)
    full = model(_tokens(3, 12))
    assert full.shape == (3, 12, 11)
    for length in (1, 5):
        short = model(_tokens(3, 12)[:, :length])
        torch.testing.assert_close(short, full[:, :length])


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_no_logit_depends_on_a_later_token(positions: str) -> None:
    model, tokens = _model(positions=positions), _tokens(2, 12)
    before = model(tokens)
    for place in (0, 6, 11):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        after = model(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place])
        assert not torch.allclose(after[:, place:], before[:, place:])


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_the_order_of_the_tokens_counts(positions: str) -> None:
    # One layer without positions would weigh the same tokens in any order alike.
    model, tokens = (
        _model(positions=positions, layers=1),
        torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]]),
    )
    first, second = model(tokens)[:, -1]
    assert not torch.allclose(first, second, rtol=1e-5, atol=1e-6)


def test_rope_makes_scores_depend_on_distance_alone() -> None:
    rotary, (query, key) = Rotary(8, context=64), torch.randn(2, 1, 1, 1, 8)
    scores = rotary(query.expand(1, 1, 64, 8)) @ rotary(key.expand(1, 1, 64, 8)).mT
    for distance in (0, 1, 17):
        same = scores[0, 0].diagonal(-distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=1e-4, atol=1e-5)
    assert scores[0, 0, :, 0].std() > 0.01  # and on the distance it does depend
    turned = rotary(query.expand(1, 1, 64, 8))
    torch.testing.assert_close(turned.norm(dim=-1), query.norm().expand(1, 1, 64))


def test_rope_is_rounded_to_bf16_only_once() -> None:
    rotary, x = Rotary(64, context=512), torch.randn(1, 2, 512, 64).bfloat16()
    assert rotary(x).dtype == torch.bfloat16
    torch.testing.assert_close(rotary(x), rotary(x.float()).bfloat16(), rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        logits = _model()(_tokens(2, 12))
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), _model()(_tokens(2, 12)), rtol=0, atol=0.02)


def test_attention_is_a_causal_softmax_over_turned_queries_and_keys() -> None:
    attention = _model().blocks[0].attention
    x = torch.randn(2, 5, 16)
    query, key, value = (
        part.view(2, 5, 2, 8).transpose(1, 2) for part in attention.inputs(x).chunk(3, dim=-1)
    )
    scores = attention.rotary(query) @ attention.rotary(key).mT / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf)
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 5, 16)
    torch.testing.assert_close(attention(x), attention.output(mixed), rtol=1e-4, atol=1e-6)


def test_the_matrix_that_embeds_tokens_reads_the_logits_out() -> None:
    model, tokens = _model(), _tokens(2, 6)
    expected = functional.linear(model.features(tokens), model.embedding.weight)
    torch.testing.assert_close(model(tokens), expected)
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert shapes.count((11, 16)) == 1
    unseen = next(token for token in range(11) if token not in tokens)
    model(tokens)[:, :, unseen].sum().backward()
    assert model.embedding.weight.grad[unseen].abs().sum() > 0


def test_weights_alone_are_saved_and_they_make_the_same_model_again() -> None:
    model, other = _model(), _model()
    assert not any("cos" in name or "sin" in name for name in model.state_dict())
    for p in other.parameters():
        torch.nn.init.normal_(p)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(_tokens(2, 12)), other(_tokens(2, 12)), rtol=0, atol=0)


def test_the_size_of_the_smallest_gpt_2_is_its_own_less_the_biases_of_linear_layers() -> None:
    with torch.device("meta"):
        gpt_2 = Transformer(
            50257, context=1024, layers=12, heads=12, width=768, dropout=0.1, rope=False
        )
    published = 124_439_808  # of openai/gpt2's checkpoint, the tied matrix counted once
    biases = 12 * (3 + 1 + 4 + 1) * 768
    assert sum(p.numel() for p in gpt_2.parameters()) == published - biases


def test_weights_start_as_gpt_2s_do() -> None:
    model = _model(outputs=500, layers=8, heads=4, width=64, positions="learned")
    stds = {name: p.std().item() for name, p in model.named_parameters() if p.dim() > 1}
    into_sum = {name for name in stds if name.endswith(("output.weight", "narrow.weight"))}
    assert len(into_sum) == 16 and len(stds) == 34
    for name, std in stds.items():
        expected = 0.02 / math.sqrt(2 * 8) if name in into_sum else 0.02
        assert std == pytest.approx(expected, rel=0.1), name
    assert all((p == 1).all() for n, p in model.named_parameters() if n.endswith("norm.weight"))
    # The first loss is that of a guess among all tokens.
    tokens = torch.randint(500, (4, 13), generator=torch.Generator().manual_seed(2))
    loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(500), abs=0.1)


def test_dropout_drops_in_training_only() -> None:
    model, tokens = _model(dropout=0.5), _tokens(2, 12)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    plain = _model().eval()
    assert torch.equal(model(tokens), plain(tokens))  # the same seed, the same weights


def test_it_learns_to_copy_what_it_saw_before() -> None:
    model = _model(context=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        half = torch.randint(0, 11, (32, 8), generator=random)
        row = torch.cat((half, half), dim=1)
        logits = model(row[:, :-1])
        loss = functional.cross_entropy(logits[:, 8:].flatten(0, 1), row[:, 9:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # A model without attention keeps log(11). How much less it is by now, rounding decides: from
    # eight seeds it was 0.02 to 1.45.
    assert loss.item() < 0.75 * math.log(11)


@pytest.mark.parametrize("positions", ["rope", "learned"])
@pytest.mark.parametrize("context", [3, 40])
def test_checking_counts_layers_head_and_attention_of_every_token(
    context: int, positions: str
) -> None:
    args = {"layers": 3, "heads": 2, "width": 16, "positions": positions}
    shape = {"input_shape": (context,), "outputs": 11}
    work, _ = builtin.check_model("transformer", **shape, args=args, task="tokens")
    layers = 3 * 12 * 16 * 16
    attention = 3 * 2 * context * 16  # scores and values, PaLM's appendix B
    assert work == context * (layers + 11 * 16 + attention)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"hidden": [3]}, "'hidden' is unknown; the model transformer takes layers, heads, width"),
        ({"layers": 0}, r"layers must be a whole number from 1 to 1,000 \(got 0\)"),
        ({"layers": 10**6}, r"layers must be a whole number from 1 to 1,000"),
        ({"heads": True}, r"heads must be a whole number from 1"),
        ({"width": "128"}, r"width must be a whole number from 1"),
        ({"width": 130}, r"width must be a multiple of heads \(got width 130 for 4 heads\)"),
        ({"width": 12}, r"width / heads must be even for positions rope \(got 12 / 4 = 3\)"),
        ({"positions": "alibi"}, r"positions must be rope or learned \(got 'alibi'\)"),
        ({"positions": ["rope"]}, r"positions must be rope or learned"),
        ({"dropout": 1}, r"dropout must be from 0 to below 1 \(got 1\)"),
    ],
)
def test_a_transformer_that_cannot_be_is_refused(args: dict, message: str) -> None:
    with pytest.raises(builtin.ModelError, match=f"^model.args: {message}"):
        builtin.check_model("transformer", input_shape=(8,), outputs=5, args=args, task="tokens")


def test_an_odd_head_will_do_for_learned_positions() -> None:
    args = {"width": 12, "positions": "learned"}
    assert builtin.check_model("transformer", input_shape=(8,), outputs=5, args=args, task="tokens")


def test_models_and_data_that_do_not_belong_together_are_refused() -> None:
    shape = {"input_shape": (8,), "outputs": 5, "args": {}}
    for name in ("linear", "mlp", "cnn"):
        words = f"^model.name: {name} learns from rows .* tokens; set model.name to transformer"
        with pytest.raises(builtin.ModelError, match=words):
            builtin.check_model(name, task="tokens", **shape)
    for task in ("classification", "regression"):
        words = f"^model.name: transformer learns from tokens, and this data is for {task}; choose"
        with pytest.raises(builtin.ModelError, match=words):
            builtin.check_model("transformer", task=task, **shape)
