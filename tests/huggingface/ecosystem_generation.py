"""Rows of loading, computing and generating; see ecosystem.py."""

import torch
from ecosystem import Subject, equal_logits, equal_tokens, row
from transformers import AutoConfig, AutoModel, DynamicCache, TextStreamer, pipeline


@row("from_pretrained: no key missing or unexpected; the tokenizer decodes what it encodes")
def loads(subject: Subject):
    assert type(AutoConfig.from_pretrained(subject.directory, **subject.trust)).__name__.endswith(
        "Config"
    )
    text = "def compare(left, right):\n    return left == right"
    assert (
        subject.tokenizer.decode(subject.tokenizer(text, add_special_tokens=False).input_ids)
        == text
    )
    model, found = subject.model.__class__.from_pretrained(
        subject.directory, output_loading_info=True
    )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        found
    )
    base = subject.load(AutoModel)
    with torch.no_grad():
        equal_logits(
            model.lm_head(base(subject.ids(24)).last_hidden_state),
            subject.logits(model),
        )


@row("save_pretrained in shards, loaded again: equal logits")
def saves(subject: Subject):
    third = subject.model.get_memory_footprint() // 3
    subject.model.save_pretrained(subject.work / "saved", max_shard_size=third)
    subject.tokenizer.save_pretrained(subject.work / "saved")
    assert len(list((subject.work / "saved").glob("*.safetensors"))) > 1
    equal_logits(
        subject.logits(subject.load(directory=subject.work / "saved")), subject.logits(), 0
    )


@row("attention maps (eager): causal, each row sums to one; all hidden states")
def maps_and_states(subject: Subject):
    model = subject.load(attn_implementation="eager")
    ids = subject.ids(24)
    with torch.no_grad():
        output = model(ids, output_attentions=True, output_hidden_states=True)
    layers = model.config.num_hidden_layers
    assert len(output.attentions) == layers
    assert len(output.hidden_states) == layers + 1
    for weights in output.attentions:
        torch.testing.assert_close(
            weights.sum(-1),
            torch.ones_like(weights[..., 0]),
        )
        assert not weights.triu(1).any()
    equal_logits(output.logits, subject.logits())


@row(
    "attn_implementation sdpa, at load and switched to: eager's logits; padded, and in two parts"
    " over a cache"
)
def sdpa(subject: Subject):
    expected = subject.logits(subject.load(attn_implementation="eager"))
    model = subject.load(attn_implementation="sdpa")
    equal_logits(subject.logits(model), expected)
    model.set_attn_implementation("eager")
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"
    ids = torch.cat(
        [
            torch.full(
                (1, 3),
                subject.tokenizer.pad_token_id,
            ),
            subject.ids(24),
        ],
        1,
    )
    mask = torch.tensor([[0] * 3 + [1] * 24])
    equal_logits(subject.logits(model, ids, attention_mask=mask)[:, 3:], expected)
    cache = DynamicCache(config=model.config)
    parts = [
        subject.logits(model, part, past_key_values=cache)
        for part in subject.ids(24).split([15, 9], 1)
    ]
    equal_logits(torch.cat(parts, 1), expected)


@row("generate with the dynamic cache: the tokens of generate without a cache")
def dynamic_cache(subject: Subject):
    equal_tokens(subject.generate(subject.ids(24), cache_implementation="dynamic"), subject.greedy)


@row("generate with the static cache: the tokens of generate without a cache")
def static_cache(subject: Subject):
    equal_tokens(subject.generate(subject.ids(24), cache_implementation="static"), subject.greedy)


@row("generate from inputs_embeds: the tokens that follow the ids")
def embeddings(subject: Subject):
    embeds = subject.model.get_input_embeddings()(subject.ids(24))
    found = subject.model.generate(
        inputs_embeds=embeds, attention_mask=torch.ones(1, 24), do_sample=False, **subject.count()
    )
    equal_tokens(found, subject.greedy)


@row("beam search with a cache: the tokens of beam search without")
def beam_search(subject: Subject):
    found, expected = (
        subject.generate(subject.ids(24), num_beams=3, use_cache=cached) for cached in (True, False)
    )
    equal_tokens(found, expected)


@row("assisted generation (a model; prompt lookup): the greedy tokens")
def assisted(subject: Subject):
    draft = subject.load()
    draft.generation_config.num_assistant_tokens = 3
    torch.nn.init.normal_(
        draft.model.layers[0].mlp.down_proj.weight, std=0.02
    )  # makes some of its drafts wrong
    equal_tokens(subject.generate(subject.ids(24), assistant_model=draft), subject.greedy)
    equal_tokens(subject.generate(subject.ids(24), prompt_lookup_num_tokens=3), subject.greedy)


@row("pipeline and TextStreamer: the text of generate")
def pipeline_and_streamer(subject: Subject):
    class Kept(TextStreamer):
        text = ""

        def on_finalized_text(self, text, stream_end=False):
            self.text += text

    text = subject.tokenizer.decode(subject.ids(24)[0])
    generator = pipeline("text-generation", model=subject.model, tokenizer=subject.tokenizer)
    options = {"do_sample": False, **subject.count()}
    made = generator(text, return_full_text=False, **options)[0]["generated_text"]
    inputs = subject.tokenizer(text, return_tensors="pt")
    streamer = Kept(subject.tokenizer, skip_prompt=True)
    ids = subject.model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], streamer=streamer, **options
    )
    expected = subject.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])
    assert streamer.text == expected, (streamer.text, expected)
    assert made.strip() == expected.strip(), (made, expected)


@row("torch.compile traces the whole graph: equal logits")
def compiled(subject: Subject):
    model = torch.compile(subject.load(), fullgraph=True, backend="eager")
    for count in (24, 17):
        equal_logits(
            subject.logits(model, subject.ids(count), use_cache=False),
            subject.logits(ids=subject.ids(count)),
        )


class Logits(torch.nn.Module):
    """A model that only maps ids to logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


@row("torch.export with a dynamic length: equal logits at another length")
def exported(subject: Subject):
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        Logits(subject.load()), (subject.ids(24),), dynamic_shapes={"ids": {1: length}}
    )
    for count in (24, 33):
        equal_logits(
            program.module()(subject.ids(count)),
            subject.logits(ids=subject.ids(count)),
        )
