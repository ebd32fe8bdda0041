"""Numbers in tables of README.md and docs/ equal those computed from the result files in docs/results."""

import itertools
import json
import math
import statistics

import pytest
from conftest import ROOT

# 97.5 % quantile of Student's t with 2 degrees of freedom: three seeds.
T_QUANTILE = 4.302652729911275


def table(text: str, header: str) -> dict[str, list[str]]:
    """The cells of each row of the first table whose header line starts with `header`, by the first cell."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(header))
    found = {}
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :]):
        name, *cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        found[name] = cells
    return found


def rows(page: str, header: str) -> dict[str, list[str]]:
    """Like `table`, for the only such table of a page."""
    text = (ROOT / page).read_text()
    count = sum(line.startswith(header) for line in text.splitlines())
    assert count == 1, f"{page} has {count} tables that start with {header!r}"
    return table(text, header)


def results(name: str) -> dict:
    return json.loads((ROOT / "docs" / "results" / name).read_text())


def laptop(task: str) -> dict[str, dict]:
    """The variants of the experiments on softmax, Norm, Gate and Taylor orders, by name."""
    experiments = [found for found in results("laptop/results.json")["experiments"] if found["id"] in ("e1", "e4")]
    tasks = [found for experiment in experiments for found in experiment["tasks"] if found["task"] == task]
    return {variant["name"]: variant for found in tasks for variant in found["variants"]}


def mean(variant: dict) -> str:
    """As stored: single seeds of this file are rounded, so recomputed means can differ in the last digit."""
    summary = variant["recall"] or variant["loss"]
    return f"{summary['mean']:.3f} ± {summary['deviation']:.3f}"


def interval(variant: dict, reference: dict) -> str:
    """95 % interval of the difference paired by seed."""
    reference = dict(reference["numbers"])
    differences = [value - reference[seed] for seed, value in variant["numbers"]]
    middle, half = statistics.mean(differences), T_QUANTILE * statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{middle - half:+.3f} to {middle + half:+.3f}".replace("-", "−")


def size(bytes_: float) -> str:
    unit, name = next((unit, name) for unit, name in [(1e9, "GB"), (1e6, "MB"), (1e3, "KB")] if bytes_ >= unit)
    return f"{bytes_ / unit:.3g} {name}"


README_VARIANTS = {
    "softmax": "softmax",
    "Norm: L2 norm, no denominator": "Norm",
    "Gate: output gate, divided by length": "Gate",
    "Taylor orders 0..10": "orders 0..10",
    "Taylor orders 0..4": "orders 0..4",
    "Taylor orders 0..2": "orders 0..2",
    "Taylor orders 0..1": "orders 0..1",
    "linear attention, ELU + 1": "linear ELU",
}


def test_losses_in_the_readme():
    (task,) = next(found for found in results("text/results.json")["experiments"] if found["id"] == "orders")["tasks"]
    variants, table = {variant["name"]: variant for variant in task["variants"]}, rows("README.md", "| attention | held-out loss")
    assert table.keys() == README_VARIANTS.keys()
    for label, (loss, difference, state) in table.items():
        variant = variants[README_VARIANTS[label]]
        assert (loss, state) == (mean(variant), size(variant["state_bytes"])), label
        if difference not in ("", "not a declared claim"):
            assert difference == interval(variant, variants["softmax"]), label


def test_losses_at_laptop_scale():
    table = rows("docs/results-laptop.md", "| attention | recall | tinyshakespeare")
    assert len(table) == 9
    for label, cells in table.items():
        for task, cell in zip(["language", "tinyshakespeare.txt", "sotu.txt"], cells, strict=False):
            variant = laptop(task)["linear ELU" if label.startswith("linear") else label]
            assert cell == mean(variant), (label, task)
            assert cells[3] == size(variant["state_bytes"]), (label, task)


def rises(file: str) -> dict[str, list[str]]:
    """Loss increase by method, one value per budget: the mean over texts of the means over contexts."""
    points = results(file)["points"]
    found = {}
    for method in {point["method"] for point in points}:
        budgets = sorted({point["keys"] for point in points})
        found[method] = []
        for keys in budgets:
            texts = [point["contexts"] for point in points if point["method"] == method and point["keys"] == keys]
            found[method].append(f"{statistics.mean(statistics.mean(map(rise, contexts)) for contexts in texts):.3f}")
    return found


def rise(context: list[dict]) -> float:
    return sum(part["loss"] - part["original"] for part in context) / sum(part["count"] for part in context)


METHODS = {
    "16-bit window": "window",
    "window, 4 sinks": "window",
    "4-bit window": "4 bits",
    "8-bit window": "8 bits",
    "8-bit, half heavy hitters": "8 bits + chosen",
    "8-bit kinds per head": "8 bits by head",
    "choice per KV head": "all kinds per head",
    "choice per head of all kinds": "everything by head",
}


@pytest.mark.parametrize(
    ("page", "header", "file", "count"),
    [
        ("docs/results-kv-memory.md", "| memory | 2.9 MB |", "kv/twelve.json", 4),
        ("docs/results-kv-memory.md", "| memory | N = 64 | N = 128 |", "convert/frontier-8192.json", 4),
    ],
)
def test_loss_increase_with_fixed_size_memory(page, header, file, count):
    expected, table = rises(file), rows(page, header)
    assert len(table) == count
    for label, cells in table.items():
        values = expected[METHODS[label]]
        assert cells[: len(values)] == values, label


def unseen(method: str) -> dict[str, float]:
    """Loss increase on each unseen text, on all of them, and on all at positions from 1,536."""
    points = [point for point in results("kv/unseen.json")["points"] if point["method"] == method]
    found = {point["text"]: statistics.mean(map(rise, point["contexts"])) for point in points}
    found["all"] = statistics.mean(found.values())
    found["last"] = statistics.mean(rise(context[-1:]) for point in points for context in point["contexts"])
    return found


def test_loss_increase_on_unseen_texts():
    table, columns = rows("docs/results-kv-memory.md", "| memory | python |"), ["python", "manual", "novels", "news", "all", "last"]
    assert all(context[-1]["count"] == 511 for point in results("kv/unseen.json")["points"] for context in point["contexts"])
    for label, cells in table.items():
        values = unseen(METHODS[label])
        assert cells == [f"{values[column]:.3f}" for column in columns], label


def second() -> dict[tuple[str, str, int], list[dict]]:
    """The contexts of the second measurement at 2.9 MB, by method, text and number."""
    points = [point for point in results("kv/unseen-second.json")["points"] if point["keys"] == 128]
    return {(point["method"], point["text"], number): context for point in points for number, context in enumerate(point["contexts"])}


@pytest.mark.parametrize("page", ["README.md", "docs/results-kv-memory.md"])
def test_second_measurement(page):
    table, contexts = rows(page, "| memory, 2.9 MB |"), second()
    assert len(table) == 4
    for label, cells in table.items():
        groups = [[context for (method, name, _), context in contexts.items() if (method, name) == (METHODS[label], text)]
                  for text in ("c", "javascript", "handbook", "reference")]  # fmt: skip
        last = [statistics.mean(rise(context[-1:]) for context in group) for group in groups]
        whole = statistics.mean(statistics.mean(map(rise, group)) for group in groups)
        assert cells == [f"{value:.3f}" for value in [*last, whole, statistics.mean(last)]], label


def test_presses_on_the_same_contexts():
    """Columns of budgets: the mean over the first context of each text. The last one: all contexts that both programs measured."""
    saved, contexts = results("kv/kvpress-second.json")["rows"], second()
    own = {place: rise(context[-1:]) for (method, *place), context in contexts.items() if method == "all kinds per head" for place in [tuple(place)]}
    table = rows("docs/results-kv-memory.md", "| method | 23.6 MB |")
    assert table.keys() - {"**termwise, choice per head**"} == {row["method"] for row in saved}
    first = statistics.mean(own[text, 0] for text in ("c", "javascript", "handbook", "reference"))
    assert table["**termwise, choice per head**"][3:5] == [f"{first:.3f}", str(len(own))]
    for row in saved:
        context = contexts.get(("window", row["text"], row["context"]))
        assert context is None or abs(context[-1]["original"] / context[-1]["count"] - row["original"]) < 1e-3
    for method in table.keys() - {"**termwise, choice per head**"}:
        means = [statistics.mean(row["rise"] for row in saved if (row["method"], row["ratio"], row["context"]) == (method, ratio, 0))
                 for ratio in (0.5, 0.25, 0.125, 0.0625)]  # fmt: skip
        assert table[method][:4] == [f"{value:.3f}".replace("-", "−") for value in means], method
        assert first < means[3]


def last_positions(method: str, contexts: int) -> dict[tuple[str, int], float]:
    """Loss increase at positions from 1,536 of the first contexts of each unseen text."""
    points = [point for point in results("kv/unseen.json")["points"] if point["method"] == method]
    return {(point["text"], number): rise(context[-1:]) for point in points for number, context in enumerate(point["contexts"][:contexts])}


def test_comparison_with_kvpress():
    saved = results("kv/kvpress.json")["rows"]
    contexts = 1 + max(row["context"] for row in saved)
    own = last_positions("all kinds per head", contexts)
    # Contexts are the same if the losses of the original, computed by PyTorch and by termwise, agree.
    points = results("kv/unseen.json")["points"]
    original = {(point["text"], number): context[-1]["original"] / 511 for point in points for number, context in enumerate(point["contexts"])}
    same = {place for row in saved if abs(row["original"] - original[place := (row["text"], row["context"])]) < 1e-3}
    assert sorted(own.keys() - same) == [("python", 1), ("python", 2), ("python", 3)]
    own = {place: value for place, value in own.items() if place in same}
    quantile = 2.179  # of Student's t with 12 degrees of freedom
    table = rows("docs/results-kv-memory.md", "| method | 5.9 MB | 2.9 MB |")
    assert {row["method"] for row in saved} < table.keys() and len(table) == 15
    for label, (large, small, difference) in table.items():
        if label.startswith(("termwise, ", "**termwise, ")):
            name = label.strip("*").removeprefix("termwise, ")
            values, expected_large = last_positions(METHODS.get(name, "all kinds per head"), contexts), ""
            values = {place: value for place, value in values.items() if place in same}
        else:
            chosen = [row for row in saved if row["method"] == label and (row["text"], row["context"]) in same]
            by_ratio = {ratio: {(row["text"], row["context"]): row["rise"] for row in chosen if row["ratio"] == ratio} for ratio in (0.0625, 0.125)}
            values, expected_large = by_ratio[0.0625], f"{statistics.mean(by_ratio[0.125].values()):.3f}"
        assert (large, small) == (expected_large, f"{statistics.mean(values.values()):.3f}"), label
        if difference:
            paired = [own[place] - values[place] for place in own]
            middle, half = statistics.mean(paired), quantile * statistics.stdev(paired) / math.sqrt(len(paired))
            assert difference == f"{middle - half:+.3f} to {middle + half:+.3f}".replace("-", "−"), label


def generated(section: str) -> dict[str, list[str]]:
    """Loss, state and learning rate of each variant in one section of the generated page."""
    page = (ROOT / "docs/results/text/results.md").read_text()
    cells = table(page[page.index(f"\n## {section} ") :], "| variant | attention | loss | state")
    return {name: [loss, state, rate] for name, (_, loss, state, _, rate, *_) in cells.items()}


def test_losses_on_novels():
    """Means, deviations, bytes of state and learning rates are those of the generated tables."""
    page = (ROOT / "docs/results-text.md").read_text()
    header = "| attention | held-out loss | state | learning rate"
    orders, states = (table(page[page.index(title) :], header) for title in ("## Loss against Taylor order", "## Loss against bytes of state"))
    every = generated("STATE")
    assert orders == generated("ORDERS")
    assert len(states) == 12 and states == {name: every[name] for name in states}
    assert every.keys() - states.keys() <= orders.keys(), "a variant is in neither table"


def test_losses_with_the_delta_rule():
    saved = results("text-delta/results.json")
    (experiment,) = saved["experiments"]
    failed_runs = [run for run in saved["runs"] if run["status"] == "failed" and not run.get("tuning")]
    failures = [(run["attention"].removesuffix(" conv=off"), run["seed"]) for run in failed_runs]
    variants = {variant["name"]: variant for variant in experiment["tasks"][0]["variants"]}
    table, seen = rows("docs/results-text.md", "| attention | no decay, no delta rule |"), set()
    for row, (*cells, state) in table.items():
        order, _, dimension = row.partition(", ")
        for cell, rules in zip(cells, ["", ", delta", ", decay", ", delta, decay"], strict=True):
            name = row if row == "softmax" else f"{order}{rules}, unit keys{dimension and f', {dimension}'}"
            if cell:
                seeds = {seed for seed, _ in variants[name]["numbers"]}
                is_failed = any(attention == variants[name]["attention"] and seed not in seeds for attention, seed in failures)
                failed = " (one seed failed)" if is_failed else ""
                assert (cell, state) == (mean(variants[name]) + failed, size(variants[name]["state_bytes"])), name
                seen.add(name)
    assert seen == variants.keys()


TOKENIZATIONS = ["bytes", "BPE-512", "BPE-4096"]


def tokenization() -> dict[str, dict]:
    """The variants of each tokenization, by name."""
    (experiment,) = results("tokenization/results.json")["experiments"]
    return {task["task"]: {variant["name"]: variant for variant in task["variants"]} for task in experiment["tasks"]}


def test_losses_by_tokenization():
    tasks, table = tokenization(), rows("docs/results-text.md", "| attention | bytes | BPE-512 | BPE-4096")
    assert table.keys() == tasks["bytes"].keys()
    for name, cells in table.items():
        assert cells == [f"{mean(tasks[task][name])} ({tasks[task][name]['loss']['count']})" for task in TOKENIZATIONS], name


def test_gaps_by_training_tokens():
    """Mean over seeds of the loss minus that of softmax with the same seed, in nats per byte, at four steps."""
    runs, lines = results("tokenization/results.json")["runs"], (ROOT / "docs/results-text.md").read_text().splitlines()
    for task, variants in tokenization().items():
        curves = {name: {runs[run]["seed"]: runs[run] for run in variant["runs"]} for name, variant in variants.items()}
        held_out = curves["softmax"][1]["held_out"]
        bytes_per_token = held_out["loss"] / (held_out["bits_per_byte"] * math.log(2))
        for name in variants.keys() - {"softmax"}:
            gaps = []
            for point in range(4):
                pairs = [(run["curve"], curves["softmax"][seed]["curve"]) for seed, run in curves[name].items() if run["status"] == "finished"]
                gaps.append(statistics.mean(curve[point]["loss"] - other[point]["loss"] for curve, other in pairs) / bytes_per_token)
            cells = " | ".join(f"{gap:+.3f}".replace("-", "−") for gap in gaps)
            assert f"| {task} | {name} | {cells} |" in lines, (task, name)


def test_accuracy_on_mqar():
    (task,) = results("mqar/results.json")["experiments"][0]["tasks"]
    table = rows("docs/results-mqar.md", "| attention | seeds that solve it")
    assert table.keys() == {variant["name"] for variant in task["variants"]}
    for variant in task["variants"]:
        accuracies = [1 - error for _, error in variant["numbers"]]
        solved = sum(accuracy >= 0.9 for accuracy in accuracies)
        spread = f"{min(accuracies):.3f} to {max(accuracies):.3f}"
        expected = [f"{solved} of {len(accuracies)}", f"{statistics.mean(accuracies):.3f}", spread, size(variant["state_bytes"])]
        assert table[variant["name"]][:4] == expected, variant["name"]


def test_verdict_counts():
    """The counts of the generated pages, which another test compares with the result files."""
    for page, generated in [("docs/results-laptop.md", "laptop"), ("docs/results-write-rules.md", "second-half")]:
        table = rows(page, "| verdicts |")
        counts = rows(f"docs/results/{generated}/results.md", "|  | claims |")["each once"]
        claims, reproduced, inconclusive, contradicted, _, holm_reproduced, holm_contradicted = counts
        assert table[f"{claims} claims"] == [reproduced, inconclusive, contradicted]
        corrected = table["with Holm's correction within each experiment"]
        assert (corrected[0], corrected[2]) == (holm_reproduced, holm_contradicted)
        assert sum(map(int, corrected)) == int(claims)


def speedups(name: str) -> dict[str, list[float]]:
    """PyTorch time over termwise time by row of the README: attention forward and with backward, or one value per training step."""
    found = {}
    operations = next(table["ms"] for table in results(f"speed/operations{name}.json")["tables"] if table["title"] == "attention")
    for batch, heads, length in [(8, 4, 256), (2, 4, 1024), (1, 8, 2048)]:
        row, shape = f"batch {batch}, {heads} heads, length {length}", f"B {batch} H {heads} T {length}"
        names = [f"{shape} d 64  {pass_}" for pass_ in ("forward", "with backward")]
        found[f"attention, {row}"] = [operations["PyTorch"][name] / operations["termwise"][name] for name in names]
    for table in results(f"speed/step{name}.json")["tables"]:
        ms = {side: next(iter(times.values())) for side, times in table["ms"].items()}
        peers = {side: time for side, time in ms.items() if not side.startswith("termwise")}
        width = table["title"].removeprefix("step, ")
        found[f"float32, {width}"] = [min(peers["torch eager"], peers["compile"]) / ms["termwise f32"]]
        found[f"bf16, {width}"] = [min(peers.values()) / ms["termwise bf16"]]
    return found


def test_speed_in_the_readme():
    text = (ROOT / "README.md").read_text()
    lines = text[text.index("| PyTorch time / termwise time |") :].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in itertools.takewhile(lambda line: line.startswith("|"), lines)]
    machines = [speedups(""), speedups("-zen4")]
    names = [name for name, *_ in cells[:3]] + ["float32, width 256", "bf16, width 256", "float32, width 512", "bf16, width 512"]
    assert len(cells) == len(names)
    for name, (_, *values) in zip(names, cells, strict=True):
        expected = [value for machine in machines for value in machine[name]]
        assert [value for value in values if value] == [f"{value:.2f}" for value in expected], name


def test_training_steps_on_the_performance_page():
    columns = [(name, table) for name in ("", "-zen4") for table in (0, 1)]
    steps = [results(f"speed/step{name}.json")["tables"][table]["ms"] for name, table in columns]
    sides = {
        "termwise, float32": "termwise f32", "termwise, bf16": "termwise bf16", "PyTorch eager, float32": "torch eager",
        "PyTorch eager, \"medium\"": "torch medium", "PyTorch eager, bf16 autocast": "torch bf16", "PyTorch compile, float32": "compile",
        "PyTorch compile, \"medium\"": "compile medium", "PyTorch compile, bf16 autocast": "compile bf16",
    }  # fmt: skip
    table = rows("docs/performance.md", "| configuration | width 256, Zen 5")
    assert table.keys() == sides.keys()
    for row, cells in table.items():
        assert cells == [f"{next(iter(ms[sides[row]].values())):.0f}" for ms in steps], row
