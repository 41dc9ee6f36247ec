"""Generation: the cache, batches, sampling, streaming and chat, each against the plain computation."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from retrofox.generation.chat import ChatSession, chat
from retrofox.generation.generate import complete, generate, part_tokens
from retrofox.loading.loaded_model import LoadedModel, open_model

PROMPTS = ["the fox forgets", "a", "the gate is open and the fox forgets the gate"]


@pytest.fixture(scope="module", params=["pico_llama", "pico_fox"])
def opened(request, pico_tokenizer) -> LoadedModel:
    """A plain and a converted pico model in turn."""
    return open_model(request.getfixturevalue(request.param)(), tokenizer=pico_tokenizer)


def run(opened: LoadedModel, prompts: list[str], new: int = 16, **options) -> dict:
    return generate(opened.model, prompts, new, tokenizer=opened.tokenizer, stream=False, ignore_eos=True, **options)


def by_hand(opened: LoadedModel, prompt: str, new: int) -> list[int]:
    """Greedy tokens, each from a forward pass over everything so far."""
    ids = opened.tokenizer(prompt)["input_ids"]
    start = len(ids)
    for _ in range(new):
        with torch.no_grad():
            logits = opened.model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids = [*ids, int(logits[0, -1].argmax())]
    return ids[start:]


def test_greedy_with_cache_equals_greedy_by_hand(opened):
    for prompt in PROMPTS:
        assert run(opened, [prompt])["token_ids"] == [by_hand(opened, prompt, 16)]


def test_a_left_padded_batch_equals_one_by_one(opened):
    together = run(opened, PROMPTS)
    assert together["token_ids"] == [run(opened, [prompt])["token_ids"][0] for prompt in PROMPTS]
    assert together["new_tokens"] == 16 * len(PROMPTS)
    assert together["tokens_per_second"] == pytest.approx(together["new_tokens"] / together["seconds"])


def test_a_seed_repeats_a_draw_and_leaves_the_global_state_alone(opened):
    torch.manual_seed(11)
    untouched = torch.rand(3)
    torch.manual_seed(11)
    first = run(opened, PROMPTS, temperature=1.0, top_p=0.9, seed=4)["token_ids"]
    assert torch.equal(torch.rand(3), untouched)
    assert run(opened, PROMPTS, temperature=1.0, top_p=0.9, seed=4)["token_ids"] == first
    assert run(opened, PROMPTS, temperature=1.0, top_p=0.9, seed=5)["token_ids"] != first
    assert run(opened, PROMPTS, temperature=1.0, top_p=1e-6, seed=5)["token_ids"] == run(opened, PROMPTS)["token_ids"]


def test_the_checkpoints_sampling_defaults_do_not_leak_in(opened, monkeypatch):
    greedy = run(opened, PROMPTS)["token_ids"]
    defaults = GenerationConfig(do_sample=True, temperature=9.0, repetition_penalty=3.0, num_beams=2)
    monkeypatch.setattr(opened.model, "generation_config", defaults)
    assert run(opened, PROMPTS)["token_ids"] == greedy


def test_text_ends_at_the_end_token(opened, monkeypatch):
    free = run(opened, PROMPTS)["token_ids"]
    end = free[0][5]
    monkeypatch.setattr(opened.model.generation_config, "eos_token_id", [end])
    result = generate(opened.model, PROMPTS, 16, tokenizer=opened.tokenizer, stream=False)
    for ids, whole in zip(result["token_ids"], free, strict=True):
        assert ids == (whole[: whole.index(end) + 1] if end in whole else whole)


def test_the_stream_holds_exactly_the_texts_and_comes_token_by_token(opened, capsys):
    class Pieces(io.StringIO):
        flushes = 0

        def flush(self):
            self.flushes += 1

    for prompts, form in ((PROMPTS[:1], "{1}\n"), (PROMPTS, "[{0}] {1}\n")):
        output = Pieces()
        result = generate(opened.model, prompts, 12, tokenizer=opened.tokenizer, output=output, ignore_eos=True)
        assert output.getvalue() == "".join(form.format(n, text) for n, text in enumerate(result["texts"], 1))
        assert output.flushes > 4
        assert "tokens/s" in capsys.readouterr().err


def test_bad_options_are_refused(opened):
    for options, message in (
        ({"prompts": []}, "no prompt"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": 1e-45}, "temperature must be 0"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p"),
        ({"top_p": 0.5}, "no effect on greedy"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"seed": 1}, "seed 1 has no effect on greedy decoding"),
        ({"seed": 1 << 63, "temperature": 1.0}, "seed must be at least 0 and below 2"),
        ({"prompts": ["a", "\udcff"]}, "a prompt is not UTF-8 text"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(opened.model, **{"prompts": ["a"], "tokenizer": opened.tokenizer, **options})


def test_a_prompt_file_that_is_no_text_is_refused(run, tmp_path):
    latin = tmp_path / "latin"
    latin.write_bytes("caf\xe9 au lait".encode("latin1"))
    code, out, err = run("generate", tmp_path, "--prompt-file", latin)
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert "is not UTF-8 text: invalid continuation byte at byte 3)" in err


def test_a_padding_token_that_the_model_lacks_pads_a_batch(opened, pico_tokenizer):
    alone = [run(opened, [prompt])["token_ids"][0] for prompt in PROMPTS]
    extended = copy.deepcopy(pico_tokenizer)
    extended.add_tokens([f"<{n}>" for n in range(288 - len(extended))])
    extended.add_special_tokens({"pad_token": "<pad>"})
    assert extended.pad_token_id == 288
    other = LoadedModel(opened.model, extended, opened.name, opened.source)
    assert run(other, PROMPTS)["token_ids"] == alone


def test_a_tokenizer_of_another_model_is_refused(pico_llama, pico_tokenizer):
    with pytest.raises(ValueError, match="outside the model's vocabulary of 64: the tokenizer belongs to another"):
        generate(pico_llama(vocab_size=64), ["the fox"], tokenizer=pico_tokenizer)


def test_chat_keeps_its_cache_over_turns_and_answers_as_without_it(opened):
    tokenizer = opened.tokenizer
    session = ChatSession(opened, system="be brief")
    for turn, text in enumerate(["the fox", "the gate", "again"]):
        messages = [*session.messages, {"role": "user", "content": text}]
        rendered = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        [fresh] = complete(opened, [ids], 10)
        assert session.reply(text, 10) == tokenizer.decode(fresh, skip_special_tokens=True)
        shared = len(tokenizer(TEMPLATE_START, add_special_tokens=False)["input_ids"])
        assert (session.reused_tokens >= shared) == (turn > 0)
    session.reset()
    assert session.messages == [{"role": "system", "content": "be brief"}]
    assert session.cache.get_seq_length() == 0


TEMPLATE_START = "<s>system:be brief</s><s>user:the fox</s><s>assistant:"


def test_chat_reads_until_exit_and_returns_the_conversation(opened, capsys):
    tokenizer = opened.tokenizer
    lines = iter(["the fox", "", "/reset", "the gate", "/exit"])
    output = io.StringIO()
    conversation = chat(
        opened.model,
        tokenizer=tokenizer,
        max_new_tokens=5,
        temperature=0.0,  # and top_p, which is for drawing, as it is by default
        read=lambda prompt: next(lines),
        output=output,
    )
    assert [message["role"] for message in conversation] == ["user", "assistant"]
    assert conversation[0]["content"] == "the gate"
    assert conversation[1]["content"] in output.getvalue()
    assert "tokens/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "chat_template is not set"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for m in messages %}", "end of template"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_can_not_render_a_role_says_so_at_once(opened, template, said):
    strict = copy.deepcopy(opened.tokenizer)
    strict.chat_template = template
    with pytest.raises(ValueError, match=f"the chat template can't render messages of .*{said}"):
        chat(opened.model, system="be brief", tokenizer=strict, read=lambda prompt: pytest.fail("asked for a message"))
    with pytest.raises(ValueError, match=f"the chat template can't render messages of .*{said}"):
        generate(opened.model, ["a"], tokenizer=strict, chat_template=True)


def test_a_long_prompt_is_read_in_parts(opened, monkeypatch):
    from retrofox.generation import generate as module

    prompts, lengths = ["the gate is open and the fox forgets " * 6, "the fox " * 9], []
    expected = run(opened, prompts)["token_ids"]
    forward = type(opened.model).forward

    def noted(self, *args, **kwargs):
        lengths.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(opened.model), "forward", noted)
    monkeypatch.setattr(module, "CPU_PART", 32)
    assert run(opened, prompts)["token_ids"] == expected
    converted = opened.model.config.model_type == "fox_llama"
    assert (max(lengths) <= 32) == converted


@pytest.mark.parametrize(
    ("width", "rows", "tokens"), [(1536, 1, 65536), (1536, 4, 16384), (14336, 1, 8192), (28672, 2, 8192)]
)
def test_a_part_is_as_long_as_a_gpus_memory_allows(width, rows, tokens):
    config = SimpleNamespace(model_type="fox_llama", intermediate_size=width, rope_parameters=None)
    model = SimpleNamespace(config=config, device=torch.device("cuda"), dtype=torch.bfloat16)
    assert part_tokens(model, rows) == tokens


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": 40}


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic"}, {"rope_type": "longrope", **LONGROPE}])
def test_a_prompt_whose_angles_depend_on_its_length_is_read_whole(rope, pico_fox, pico_tokenizer, monkeypatch):
    from retrofox.generation import generate as module

    rope = {**rope, "rope_theta": 5e3, "factor": 4.0}
    config = {"rope_parameters": rope, "max_position_embeddings": 40}
    model = pico_fox(rope="keep", config=config)
    opened, prompt = open_model(model, tokenizer=pico_tokenizer), "the gate is open and the fox forgets " * 6
    cached = run(opened, [prompt], 1)["token_ids"]
    monkeypatch.setattr(module, "CPU_PART", 32)
    lengths: list[int] = []
    model.register_forward_pre_hook(lambda *a: lengths.append(a[2]["input_ids"].shape[1]), with_kwargs=True)
    assert run(opened, [prompt], 1)["token_ids"] == cached
    assert lengths == [len(pico_tokenizer(prompt)["input_ids"])]


def test_threads_leave_the_models_own_settings_as_they_were(opened, monkeypatch):
    own, seen = opened.model.generation_config, []
    original = type(opened.model).generate

    def spied(model, *args, **kwargs):
        seen.append((model.generation_config is own, opened.model.generation_config is own))
        return original(model, *args, **kwargs)

    monkeypatch.setattr(type(opened.model), "generate", spied)
    expected = run(opened, PROMPTS[:1])["token_ids"]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: run(opened, PROMPTS[:1])["token_ids"], range(8)))
    assert found == [expected] * 8
    assert seen == [(False, True)] * 9
    assert opened.model.generation_config is own
