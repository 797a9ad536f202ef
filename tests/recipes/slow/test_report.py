"""The report of a run is one file with everything in it."""

import json
from html.parser import HTMLParser

import pytest

from moe_jax.recipes import write_report
from moe_jax.recipes.run import report


@pytest.fixture
def run(tmp_path):
    """An output folder with the log of four steps."""
    records = [dict(step=i, loss=3 - i / 2, tokens_per_second=10.0**i) for i in range(1, 5)]
    records[1]["eval_loss"], records[3]["eval_loss"] = 1.25, 1.5
    loads = [{"step": i, "layers": [1], "expert_load": [[i, 1]]} for i in range(1, 5)]
    samples = [{"step": i, "samples": [{"prompt": "a < b", "text": f"<script>{i}"}]} for i in (2, 4)]
    for name, rows in (("metrics", records), ("expert_load", loads), ("samples", samples)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    noted = {"model": "org/<model>", "lora": {"rank": 4}, "versions": {"jax": "1.2.3"}, "started": "today"}
    (tmp_path / "settings.json").write_text(json.dumps(noted))
    return tmp_path


class Read(HTMLParser):
    """The texts and tags of a page, and its addresses."""

    def __init__(self, page: str):
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_data(self, data):
        self.texts.append(data)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]


def test_one_file_has_everything(run):
    before = set(run.iterdir())
    file = write_report(run, model_step=2, devices="1 x GPU")
    assert set(run.iterdir()) - before == {file} and file.name == "report.html"
    page = Read(file.read_text())
    assert len(page.addresses) == 3 and all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not {"script", "link", "iframe"} & set(page.tags)
    numbers = "1.0000", "1.5000", "1.2500, step 2", "step 2", "550", "1.2.3", "1 x GPU"
    for text in (*numbers, "Step 4", "Step 2", "a < b", "<script>4", "org/<model>", '{"rank": 4}', "today"):
        assert text in page.texts, text


def test_a_run_on_preferences_has_rewards_and_no_experts(tmp_path):
    records = [dict(step=i, loss=1 / i, tokens_per_second=9.0, reward_margin=i / 4, reward_accuracy=0.5) for i in (1, 2)]
    records[1] |= dict(eval_loss=0.75, eval_reward_margin=0.1, eval_reward_accuracy=1.0)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "settings.json").write_text(json.dumps({"model": "org/model", "preference": {"loss": "dpo"}}))
    page = Read(write_report(tmp_path).read_text())
    assert len(page.addresses) == 3 and page.texts.count("Preferences of org/model") == 2
    where = page.texts.index("reward margin at the end")
    assert page.texts[where : where + 4] == ["reward margin at the end", "0.5000", "reward accuracy at the end", "0.5000"]


def test_a_report_that_fails_leaves_the_earlier_one(run, monkeypatch):
    file = write_report(run)
    before = file.read_text()
    monkeypatch.setattr(report, "escape", lambda text: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(run)
    assert file.read_text() == before


def test_a_log_alone_is_enough(run):
    for name in ("settings.json", "samples.jsonl", "expert_load.jsonl"):
        (run / name).unlink()
    assert len(Read(write_report(run).read_text()).addresses) == 2


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no metrics.jsonl with a step"):
        write_report(tmp_path)
