"""lm-evaluation-harness on models saved by termwise, with local tasks: nothing is downloaded."""

import json
import os

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import numpy as np
import pytest
from conftest import need

import termwise

try:
    import torch
    import transformers
except ImportError:
    need("torch", False, "PyTorch or transformers is not installed")

try:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
except ImportError:
    need("lm_eval", False, "lm-evaluation-harness is not installed: pip install 'lm_eval[hf]'")

import termwise.hf

STORIES = [
    ("Once upon a time, there was a little girl", [" named Lily.", " who and and the.", " zzz qqq."]),
    ("The dog ran to the", [" park.", " because.", " seventeen of."]),
    ("Mom said, \"Do not", [" worry.\"", " umbrella the.\"", " Tim big.\""]),
    ("They played with the", [" ball all day.", " ran of day.", " said.\""]),
]

CHOICES = """
task: stories_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: text
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
PERPLEXITY = """
task: stories_perplexity
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}{{choices[0]}}"
metric_list: [{metric: byte_perplexity}]
"""
WRITING = """
task: stories_writing
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: text
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
# The last word of a passage, as in LAMBADA.
LAST_WORD = """
task: stories_last_word
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' ' + text.split(' ')[-1]}}"
target_delimiter: ""
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


@pytest.fixture(scope="module", params=["taylor=0..2", "softmax window=16 sinks=2", "softmax window=6 sinks=2 chosen=4 bits=8,4"])
def evaluated(request, stories, tmp_path_factory):
    """A model with another attention, loaded natively, and its results in the harness."""
    folder = tmp_path_factory.mktemp("lm_eval")
    native = termwise.load(stories).with_attention(request.param)
    native.save(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(stories, bos_token="<s>", eos_token="</s>", pad_token="<unk>")
    data = folder / "stories.jsonl"
    data.write_text("".join(json.dumps({"text": text, "choices": choices, "answer": 0}) + "\n" for text, choices in STORIES))
    for name, task in (("choice", CHOICES), ("perplexity", PERPLEXITY), ("writing", WRITING)):
        (folder / "tasks").mkdir(exist_ok=True)
        (folder / "tasks" / f"{name}.yaml").write_text(task.replace("DATA", str(data)))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    assert isinstance(model.model.layers[0].self_attn, termwise.hf.TermwiseAttention)
    os.environ["HF_HOME"] = str(folder / "home")
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=128, device="cpu")
    found = lm_eval.simple_evaluate(
        model=harness,
        tasks=["stories_choice", "stories_perplexity", "stories_writing"],
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        cache_requests=False,
    )
    return native, harness, found


def log_probability(native, context, continuation):
    """Log probability of a continuation in the native model."""
    ids = context + continuation
    logits = np.asarray(native.logits(ids)[0], np.float64)
    logs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)
    return sum(logs[i - 1, ids[i]] for i in range(len(context), len(ids)))


def test_choices_have_native_log_probabilities(evaluated):
    native, harness, found = evaluated
    samples = found["samples"]["stories_choice"]
    assert len(samples) == len(STORIES)
    if "window" in str(native.variants[0][0]):
        # A window keeps most of the accuracy of the trained attention. A series of two terms does not, so it has no bound.
        assert found["results"]["stories_choice"]["acc,none"] >= 0.75
    for sample in samples:
        text, choices = STORIES[sample["doc_id"]]
        for choice, ((said, _),) in zip(choices, sample["resps"], strict=True):
            # Tokenized as in the harness.
            assert abs(float(said) - log_probability(native, *harness._encode_pair(text, choice))) < 1e-3, (text, choice)


def test_perplexity_is_the_native_one(evaluated):
    native, harness, found = evaluated
    for sample in found["samples"]["stories_perplexity"]:
        text, choices = STORIES[sample["doc_id"]]
        ids = harness.tok_encode(text + choices[0])
        (said,) = (float(response[0]) if isinstance(response, (list, tuple)) else float(response) for response in sample["resps"][0])
        assert abs(said - log_probability(native, [harness.prefix_token_id], ids)) < 1e-3


def test_text_is_written_with_states(evaluated):
    native, harness, found = evaluated
    for sample in found["samples"]["stories_writing"]:
        ids = harness.tok_encode(STORIES[sample["doc_id"]][0])
        start = len(ids)
        for _ in range(8):
            ids.append(int(native.logits(ids)[0, -1].argmax()))
        expected = harness.tokenizer.decode(ids[start:], skip_special_tokens=True).split(".")[0]
        assert sample["resps"][0][0].strip() == expected.strip()


def test_last_words_are_scored_through_the_memory_of_a_conversion(stories, book, tmp_path):
    """Passages are longer than the memory: log probabilities are those of the bounded memory, and not those of the original."""
    counts = {"contexts": 1, "length": 128, "calibration_contexts": 1, "calibration_length": 128}
    termwise.convert(stories, book, keys=24, save=tmp_path / "small", cache=tmp_path / "cache", progress=False, **counts)
    passages = [" ".join(story.split()[:90]) for story in book.read_text()[:40_000].split("<|endoftext|>") if len(story.split()) >= 90][:4]
    assert len(passages) == 4
    (tmp_path / "passages.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "last_word.yaml").write_text(LAST_WORD.replace("DATA", str(tmp_path / "passages.jsonl")))
    tokenizer = transformers.AutoTokenizer.from_pretrained(stories, bos_token="<s>", eos_token="</s>", pad_token="<unk>")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    os.environ["HF_HOME"] = str(tmp_path / "home")
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=256, device="cpu")
    found = lm_eval.simple_evaluate(
        model=harness,
        tasks=["stories_last_word"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        cache_requests=False,
    )
    bounded, original = termwise.load(tmp_path / "small"), termwise.load(stories)
    changes, sums = [], 0.0
    for sample in found["samples"]["stories_last_word"]:
        context, word = passages[sample["doc_id"]].rsplit(" ", 1)
        ids = harness._encode_pair(context, " " + word)
        assert len(ids[0]) > 64
        [[(score, _)]] = sample["resps"]
        assert abs(float(score) - log_probability(bounded, *ids)) < 1e-3, (context, word)
        changes.append(abs(float(score) - log_probability(original, *ids)))
        sums += float(score)
    assert len(changes) == 4 and max(changes) > 1e-2
    assert abs(found["results"]["stories_last_word"]["perplexity,none"] - np.exp(-sums / 4)) < 1e-3 * np.exp(-sums / 4)
