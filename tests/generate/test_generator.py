"""Generation of whole rows: as the model alone would go on, whatever is beside a row and however long it grows."""

from dataclasses import replace

import pytest
import torch

from megalite.data.tokenizer import ByteTokenizer
from megalite.generate.generator import Generator
from megalite.generate.load import frozen
from megalite.generate.row import Stop
from megalite.generate.sampling import Sampling, choose
from megalite.kernels import inference
from megalite.models.transformer import Transformer
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from tests.nn.test_cache import build, whole_rows

CONFIG = ModelConfig(
    num_layers=2, hidden_size=24, num_heads=4, num_kv_heads=2, ffn_hidden_size=20, vocab_size=257, init_std=0.3
)
GPT2 = replace(CONFIG, name="gpt2", num_kv_heads=None, max_positions=12)
LFM2 = replace(CONFIG, name="lfm2", num_layers=3, attention_layers="1", window=5, num_experts=4)
GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=3)
PROMPTS = [[65, 66, 67, 68, 69], [70], [71, 72, 73]]


@pytest.fixture(scope="module", params=[CONFIG, GPT2, LFM2], ids=["llama", "gpt2", "lfm2"])
def model(request: pytest.FixtureRequest) -> Transformer:
    return build(request.param)


def generator(model: Transformer, context: int = 100, prefill_chunk: int = 2048) -> Generator:
    return Generator(model, ParallelState.single(), torch.device("cpu"), context=context, prefill_chunk=prefill_chunk)


@torch.no_grad()
def one_by_one(
    model: Transformer, prompt: list[int], sampling: Sampling, count: int, row: int, context: int
) -> list[int]:
    """The continuation from whole rows, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        chunk = context // 4
        forgotten = max(0, -(-(len(tokens) - context) // chunk) * chunk)
        logits = model.logits(whole_rows(torch.tensor(tokens[forgotten:])[:, None]))
        tokens.append(int(choose(logits[-1], sampling, [row], [len(tokens)])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_go_on_as_each_would_alone(model: Transformer, sampling: Sampling) -> None:
    # Beyond the context, so that rows are read again at different times.
    found = generator(model, context=8, prefill_chunk=3).generate(PROMPTS, sampling, Stop(max_new_tokens=11))
    for row, (prompt, completion) in enumerate(zip(PROMPTS, found, strict=True)):
        assert list(completion.tokens) == one_by_one(model, prompt, sampling, 11, row, 8)
        assert completion.reason == "length"


def test_rows_end_at_different_times() -> None:
    model = build(CONFIG)
    free = generator(model).generate(PROMPTS, SAMPLED, Stop(max_new_tokens=9))
    ends = (free[0].tokens[2], free[1].tokens[6])
    firsts = [next((i for i, t in enumerate(row.tokens) if t in ends), None) for row in free]
    found = generator(model).generate(PROMPTS, SAMPLED, Stop(max_new_tokens=9, tokens=ends))
    for row, before, first in zip(found, free, firsts, strict=True):
        assert row.tokens == before.tokens[:first]
        assert row.reason == ("stop_token" if first is not None else "length")
    assert len({len(row.tokens) for row in found}) > 1


def test_numbers_and_seeds_key_the_samples() -> None:
    whole = generator(build(CONFIG)).generate(PROMPTS, SAMPLED, Stop(max_new_tokens=6))
    (alone,) = generator(build(CONFIG)).generate(PROMPTS[2:], SAMPLED, Stop(max_new_tokens=6), numbers=[2])
    assert alone == whole[2]
    (other,) = generator(build(CONFIG)).generate(PROMPTS[2:], SAMPLED, Stop(max_new_tokens=6), numbers=[3])
    assert other != alone


def test_repetitions_are_counted_in_prompt_and_continuation() -> None:
    never_again = Sampling(temperature=0.0, repetition_penalty=1e9)
    for row, prompt in zip(
        generator(build(CONFIG)).generate(PROMPTS, never_again, Stop(max_new_tokens=20)), PROMPTS, strict=True
    ):
        assert len({*row.tokens, *prompt}) == len(row.tokens) + len(prompt)


def test_text_and_stop_strings() -> None:
    tokenizer, model = ByteTokenizer(), build(replace(CONFIG, vocab_size=128))
    told: dict[int, list[str]] = {0: [], 1: [], 2: []}
    last: list[int] = []

    def on_text(number: int, piece: str, is_last: bool) -> None:
        told[number].append(piece)
        if is_last:
            last.append(number)

    gen = generator(model)
    free = gen.generate(PROMPTS, SAMPLED, Stop(max_new_tokens=12), tokenizer=tokenizer, on_text=on_text)
    assert ["".join(told[i]) for i in range(3)] == [row.text for row in free] and sorted(last) == [0, 1, 2]
    assert [row.text for row in free] == [tokenizer.decode(row.tokens) for row in free]
    assert gen.speed.prompt_tokens == 9 and gen.speed.new_tokens == 3 * 11  # the first of a row comes with its prompt
    text = free[0].text
    assert text is not None
    (stopped,) = gen.generate(PROMPTS[:1], SAMPLED, Stop(max_new_tokens=12, strings=(text[5:8],)), tokenizer=tokenizer)
    assert stopped.text == text[: text.index(text[5:8])] and stopped.reason == "stop_string"


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 4])
def test_a_frozen_model_is_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "_PACKED_SIZE", 1)
    for config in (replace(CONFIG, name="gpt2", num_kv_heads=None), replace(LFM2, tie_embeddings=True)):
        model = build(config).float()
        tokens = torch.tensor(PROMPTS[0])[:, None]
        wanted = model.logits(whole_rows(tokens))
        weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
        torch.testing.assert_close(frozen(model, rows).logits(whole_rows(tokens)), wanted, rtol=0, atol=1e-5)
        left = {name: parameter for name, parameter in model.named_parameters() if parameter.numel()}
        assert all(torch.equal(parameter, weights[name]) for name, parameter in left.items())
        assert (len(left) == len(weights)) == (rows == 1) and "embedding.weight" in left
