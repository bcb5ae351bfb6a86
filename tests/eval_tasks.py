"""Small tasks in lm-eval's YAML, their questions in JSON files: what the evaluation's tests are asked."""

import inspect
import json
import re
import textwrap
from pathlib import Path

QUESTIONS = 8
_DATA = """
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/{data}.json, train: {folder}/train.json}}
  cache_dir: {folder}/cache
test_split: test
"""
_TASKS = {
    "toy_choice": """
tag: toy_tag
output_type: multiple_choice
fewshot_split: train
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: mcc, aggregation: matthews_corrcoef, higher_is_better: true}
metadata: {version: 2.5}
""",
    "toy_shots": """
output_type: multiple_choice
fewshot_split: train
num_fewshot: 2
doc_to_text: "Text: {{context}}\\nGoes on:"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "toy_cloze": """
tag: toy_tag
output_type: loglikelihood
doc_to_text: context
doc_to_target: "{{choices[answer]}}"
target_delimiter: " "
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "toy_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{context}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: byte_perplexity}
  - {metric: bits_per_byte}
""",
    "toy_answer": """
output_type: generate_until
fewshot_split: train
doc_to_text: context
doc_to_target: "{{choices[answer].split()[0]}}"
generation_kwargs: {until: ["\\n\\n", "."], max_gen_toks: 10}
filter_list:
  - {name: first, filter: [{function: regex, regex_pattern: "(\\\\w+)"}, {function: take_first}]}
  - {name: whole, filter: [{function: take_first}]}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}
""",
    "toy_pairs": """
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: mcc, aggregation: matthews_corrcoef, higher_is_better: true}
""",
    "toy_unsafe": """
output_type: loglikelihood
unsafe_code: true
doc_to_text: context
doc_to_target: context
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "toy_fails": """
output_type: loglikelihood
doc_to_text: context
doc_to_target: "{{choices[0]}}"
process_results: !function broken.fails
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
}
_BROKEN = """
def fails(doc, results):
    print("to stdout")
    return {"acc": 1 / 0}
"""


def write_tasks(folder: Path) -> Path:
    """Eight tasks, a group of two, and their data; of each text two questions are asked."""
    folder.mkdir()
    texts = list(dict.fromkeys(_texts()))
    rows = []
    for number, text in enumerate(texts[: QUESTIONS // 2]):
        for cut in (6, 12):
            words = text.split()
            right = " ".join(words[cut : cut + 3])
            others = [" ".join(other.split()[cut : cut + 3]) for other in texts[number + 1 : number + 4]]
            place = (number + cut) % 4
            rows.append(
                {
                    "document": f"text {number}",
                    "context": " ".join(words[:cut]),
                    "choices": [*others[:place], right, *others[place:]],
                    "answer": place,
                }
            )
    (folder / "questions.json").write_text(json.dumps(rows))
    (folder / "train.json").write_text(json.dumps([row | {"context": row["context"] + " so"} for row in rows]))
    long = [
        {"context": " ".join(texts[place : place + 3]), "choices": ["one"], "answer": 0, "document": "long"}
        for place in range(4)
    ]
    (folder / "long.json").write_text(json.dumps(long))
    for name, body in _TASKS.items():
        data = "long" if name == "toy_rolling" else "questions"
        (folder / f"{name}.yaml").write_text(f"task: {name}" + _DATA.format(folder=folder, data=data) + body.lstrip())
    (folder / "toy_missing.yaml").write_text(
        f"task: toy_missing\ndataset_path: nobody/has-this\ntest_split: test\n{_TASKS['toy_pairs'].lstrip()}"
    )
    (folder / "toy_both.yaml").write_text("group: toy_both\ntask: [toy_choice, toy_cloze]\n")
    (folder / "broken.py").write_text(_BROKEN)
    return folder


def _texts() -> list[str]:
    """Running text, as the fixtures were trained on."""
    found = []
    for member in vars(textwrap).values(), vars(inspect).values(), vars(json).values(), vars(re).values():
        for one in member:
            if inspect.isfunction(one) and (doc := inspect.getdoc(one)):
                words = " ".join(doc.split("\n\n")[-1].split()).split()
                if len(words) >= 20:
                    found.append(" ".join(words[:40]))
    return found
